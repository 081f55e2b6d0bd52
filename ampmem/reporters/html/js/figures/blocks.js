/** The blocks of the address map under the mouse and the keyboard: what is said of one, and which one it is. */
import { byId, fill, make } from "../common/dom.js";
import { formatBytes, formatCount } from "../common/format.js";
/** @import { Kinds } from "../data/alive.js" */
/** @import { RunStep } from "../data/run.js" */
/** @import { CategoryOf } from "./bars.js" */
/** @import { Cut, Layout, Piece } from "./addresses.js" */

/** @typedef {{kinds: Kinds, steps: RunStep[], categoryOf: CategoryOf}} Told what is known of a run's blocks */
/** @typedef {{width: number, rowHeight: number, cut: (piece: Piece) => Cut[]}} Drawn how the map lies: bytes in a row */

const HINT = "Point at a block to see what it is; click it to see its allocation in the table.";

/**
 * The number of the piece that holds the byte at `at`, with all segments end to end.
 * @param {Piece[]} pieces
 * @param {number} at
 */
export function pieceAt(pieces, at) {
  let low = 0;
  let high = pieces.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >>> 1;
    if (pieces[middle].start <= at) low = middle;
    else high = middle - 1;
  }
  return low;
}

/** @param {number} bytes */
function exactly(bytes) {
  return bytes < 1024 ? formatBytes(bytes) : `${formatBytes(bytes)} (${formatCount(bytes)} B)`;
}

/**
 * Where a piece is: `segment 2, 4.0 MiB from its start`.
 * @param {Piece} piece
 */
function pieceWhere({ segment, offset }) {
  return `segment ${formatCount(segment + 1)}, ${formatBytes(offset)} from its start`;
}

/**
 * What a block is, in one line.
 * @param {Piece} piece
 * @param {Told} told
 */
export function blockText(piece, { kinds, steps, categoryOf }) {
  const size = exactly(piece.bytes);
  if (piece.key === "cached") return `${size}, cached: reserved, but not in a block that is in use. In ${pieceWhere(piece)}.`;
  const label = categoryOf(piece.key)?.label ?? piece.key;
  const { block } = piece;
  if (!block) return `${size}, ${label}. In ${pieceWhere(piece)}. This page does not say which allocation it is.`;
  const asked = kinds.bytes(block.kind);
  const name = kinds.text("name", block.kind);
  const op = kinds.text("op", block.kind);
  const module = kinds.text("module", block.kind);
  const about = [
    label,
    name || op,
    name && op ? `made by ${op}` : "",
    module ? `in ${module}` : "",
    [kinds.text("dtype", block.kind), kinds.shape(block.kind)].filter(Boolean).join(" "),
    asked === piece.bytes ? "" : `${exactly(asked)} of it requested`,
  ].filter(Boolean);
  const step = steps.find(({ first, last }) => first <= block.born && block.born < last);
  const when = [kinds.phase(block.kind), step ? `step ${formatCount(step.index)}` : ""].filter(Boolean).join(" of ");
  const born = `Allocated by event ${formatCount(block.born + 1)}${when ? `, ${when}` : ""}.`;
  return `${size}, ${about.join(", ")}. ${born} In ${pieceWhere(piece)}.`;
}

/** A frame around the canvas that listens, the block that is chosen in it, and the line that says what it is. */
export class BlockPicker {
  #at = -1;

  /**
   * @param {HTMLCanvasElement} canvas
   * @param {Layout} layout
   * @param {Drawn} drawn
   * @param {Told} told
   */
  constructor(canvas, layout, drawn, told) {
    this.pieces = layout.pieces;
    this.drawn = drawn;
    this.told = told;
    this.mark = make("div", { "aria-hidden": "true" });
    this.said = byId("addresses-readout");
    this.said.textContent = this.pieces.length ? HINT : "";
    this.frame = make(
      "div",
      {
        class: "addresses-frame",
        tabindex: "0",
        role: "slider",
        "aria-label": "Blocks, by address",
        "aria-valuemin": "1",
        "aria-valuemax": String(Math.max(1, this.pieces.length)),
        "aria-valuenow": "1",
        "aria-valuetext": HINT,
      },
      canvas,
      this.mark,
    );
    this.#listen();
  }

  #listen() {
    this.frame.addEventListener("pointermove", (event) => this.#choose(this.#under(event)));
    this.frame.addEventListener("pointerleave", () => this.#choose(-1));
    this.frame.addEventListener("click", (event) => {
      this.#choose(this.#under(event));
      this.#narrow();
    });
    this.frame.addEventListener("keydown", (event) => {
      if (!event.ctrlKey && !event.metaKey && !event.altKey && this.#key(event.key)) {
        event.preventDefault();
        event.stopPropagation();
      }
    });
  }

  /**
   * The number of the piece under the mouse, -1 where there is none.
   * @param {MouseEvent} event
   */
  #under(event) {
    const box = this.frame.getBoundingClientRect();
    const part = (event.clientX - box.left) / box.width;
    const row = Math.floor((event.clientY - box.top) / this.drawn.rowHeight);
    const byte = (row + Math.min(Math.max(part, 0), 1)) * this.drawn.width;
    const last = this.pieces[this.pieces.length - 1];
    return last && byte >= 0 && byte < last.start + last.bytes ? pieceAt(this.pieces, byte) : -1;
  }

  /** @param {string} key whether it was for the map */
  #key(key) {
    const last = this.pieces.length - 1;
    /** @type {Record<string, number>} */
    const to = { ArrowRight: this.#at + 1, ArrowLeft: this.#at - 1, Home: 0, End: last };
    if (key in to) {
      this.#choose(Math.min(Math.max(to[key], 0), last));
      return true;
    }
    if (key === "ArrowDown" || key === "ArrowUp") {
      const from = this.pieces[Math.max(this.#at, 0)];
      const byte = from ? from.start + (key === "ArrowDown" ? this.drawn.width : -this.drawn.width) : 0;
      this.#choose(Math.min(pieceAt(this.pieces, Math.max(byte, 0)), last));
      return true;
    }
    if (key !== "Enter" && key !== " ") return false;
    this.#narrow();
    return true;
  }

  /** @param {number} at the number of a piece, -1 for none */
  #choose(at) {
    if (at === this.#at) return;
    this.#at = at;
    const piece = this.pieces[at];
    this.said.textContent = piece ? blockText(piece, this.told) : HINT;
    this.frame.setAttribute("aria-valuenow", String(Math.max(1, at + 1)));
    this.frame.setAttribute("aria-valuetext", this.said.textContent);
    fill(this.mark, ...(piece ? this.drawn.cut(piece).map((each) => this.#markOf(each)) : []));
  }

  /** @param {Cut} cut */
  #markOf({ row, left, width }) {
    const mark = make("span", { class: "mark" });
    const { rowHeight } = this.drawn;
    Object.assign(mark.style, { left: `${100 * left}%`, width: `${100 * width}%`, top: `${row * rowHeight}px` });
    mark.style.height = `${rowHeight - 2}px`;
    return mark;
  }

  /** Has the table show the allocation in the chosen block. */
  #narrow() {
    const block = this.pieces[this.#at]?.block;
    if (!block) return;
    const piece = this.pieces[this.#at];
    const more = this.pieces.filter((each) => each.block?.kind === block.kind).length - 1;
    const label = `the block of ${formatBytes(piece.bytes)} in ${pieceWhere(piece)}${more ? `, and ${formatCount(more)} like it` : ""}`;
    const keep = (/** @type {number} */ kind) => kind === block.kind;
    document.dispatchEvent(new CustomEvent("narrow", { detail: { label, keep } }));
    byId("narrowed").scrollIntoView({ block: "nearest" });
  }
}
