/** The head and the rows of the allocation table, and what a row unfolds to. */
import { make, named } from "../common/dom.js";
import { formatBytes, formatCount } from "../common/format.js";
import { isLibraryFrame } from "../data/frames.js";
import { together } from "../data/alive.js";
import { ascends } from "../data/rows.js";
/** @import { Child } from "../common/dom.js" */
/** @import { LayerRow } from "../data/alive.js" */
/** @import { Cells, Field, Order } from "../data/rows.js" */

/** @type {Array<{field: Field, head: string, class: string}>} */
export const COLUMNS = [
  { field: "size", head: "Size", class: "number" },
  { field: "count", head: "Count", class: "number quiet" },
  { field: "category", head: "Category", class: "" },
  { field: "dtype", head: "Dtype", class: "code" },
  { field: "shape", head: "Shape", class: "code" },
  { field: "module", head: "Module", class: "clip" },
  { field: "what", head: "Name or operator", class: "clip code" },
  { field: "code", head: "Your code", class: "clip code" },
  { field: "made", head: "Made in", class: "quiet" },
];

/**
 * What is said before a value where a row is a few lines, and its column has no head.
 * @type {Map<Field, string>}
 */
const STACKED = new Map([
  ["module", "in"],
  ["code", "at"],
  ["made", "made in"],
]);

/**
 * The head, whose buttons sort.
 * @param {Order} order
 * @param {(field: Field) => void} sort
 */
export function headOf(order, sort) {
  const cells = COLUMNS.map(({ field, head, class: kind }) => {
    const button = make("button", { type: "button", class: "sort", id: `sort-${field}` }, head);
    button.addEventListener("click", () => sort(field));
    const direction = ascends(order) ? "ascending" : "descending";
    const sorted = field === order.field ? direction : null;
    const number = kind.startsWith("number") ? "number " : "";
    return make("th", { scope: "col", role: "columnheader", class: `${number}field-${field}`, "aria-sort": sorted }, button);
  });
  return make("tr", { role: "row" }, make("td", { role: "cell", class: "field-open" }), ...cells);
}

/** Whether stacks have the frames of torch and of launchers, too: the same for all rows. */
export class StackSwitch {
  /** @param {Element} body where the stacks are */
  constructor(body) {
    this.body = body;
    this.all = false;
  }

  /**
   * A stack, outermost call first.
   * @param {string[]} frames
   */
  list(frames) {
    const hidden = frames.filter(isLibraryFrame).length;
    const some = hidden > 0 && hidden < frames.length;
    const items = frames.map((frame) => make("li", { class: some && isLibraryFrame(frame) ? "library" : null }, frame));
    const list = make("ol", { class: "stack" }, ...items);
    if (!some) return list;
    const button = make("button", { type: "button", class: "link frames", "data-hidden": hidden });
    this.#say(button);
    button.addEventListener("click", () => this.#turn());
    return make("div", {}, list, button);
  }

  #turn() {
    this.all = !this.all;
    this.body.classList.toggle("all-frames", this.all);
    /** @type {NodeListOf<HTMLElement>} */
    const buttons = this.body.querySelectorAll("button.frames");
    for (const button of buttons) this.#say(button);
  }

  /** @param {HTMLElement} button */
  #say(button) {
    const count = Number(button.dataset.hidden);
    const what = `${formatCount(count)} frame${count === 1 ? "" : "s"} of torch and launchers`;
    button.textContent = this.all ? `Hide ${what}` : `Show ${what}`;
  }
}

/**
 * A row, which opens to its details.
 * @param {LayerRow} each
 * @param {Cells} cells
 * @param {StackSwitch} stacks
 */
export function rowOf(each, cells, stacks) {
  const { bytes } = each;
  const { kind } = each.rows[0];
  const category = cells.kinds.categories[cells.kinds.category(kind)];
  const open = make(
    "button",
    {
      type: "button",
      class: "expand",
      "aria-expanded": "false",
      "aria-label": `Details of ${formatBytes(bytes)} ${category?.label ?? ""}`,
    },
    "▸",
  );
  const row = make(
    "tr",
    { class: "allocation", role: "row" },
    make("td", { role: "cell", class: "field-open" }, open),
    ...COLUMNS.map((column) => cellOf(column, each, cells)),
  );
  /** @type {HTMLElement|null} */
  let details = null;
  const toggle = () => {
    const opened = open.getAttribute("aria-expanded") !== "true";
    open.setAttribute("aria-expanded", String(opened));
    open.textContent = opened ? "▾" : "▸";
    if (opened && !details) {
      details = detailsOf(each, cells, stacks);
      row.after(details);
    }
    if (details) details.hidden = !opened;
  };
  open.addEventListener("click", (event) => {
    event.stopPropagation();
    toggle();
  });
  row.addEventListener("click", toggle);
  return row;
}

/**
 * @param {typeof COLUMNS[number]} column
 * @param {LayerRow} each
 * @param {Cells} cells
 */
function cellOf({ field, class: kind }, each, cells) {
  const { kinds } = cells;
  const value = cells.value(field, each);
  const name = `${kind} field-${field}${value === "" ? " unknown" : ""}`.trim();
  if (field === "size") return make("th", { scope: "row", role: "rowheader", class: name }, formatBytes(each.bytes));
  const title = field === "code" ? cells.ownFrame(each.rows[0].kind) || null : null;
  const label = STACKED.get(field) ?? null;
  return make("td", { role: "cell", class: name, title, "data-label": label }, ...inside());

  /** @returns {Child[]} */
  function inside() {
    if (field === "count") return [each.count > 1 ? `× ${formatCount(each.count)}` : ""];
    if (field === "category") return [named(kinds.categories[kinds.category(each.rows[0].kind)])];
    const text = String(value) || "-";
    return [text];
  }
}

/**
 * @param {LayerRow} row
 * @param {Cells} cells
 * @param {StackSwitch} stacks
 */
function detailsOf({ rows, count, bytes, sum }, { kinds }, stacks) {
  const { kind } = rows[0];
  const each = count * bytes === sum ? "each" : "the largest";
  /** @param {"name"|"module"} column */
  const all = (column) => together(rows.map((row) => kinds.text(column, row.kind)));
  const frames = kinds.frames(kind);
  const facts = [
    ["Bytes", count > 1 ? `${formatCount(bytes)} ${each}, ${formatCount(sum)} together` : formatCount(bytes)],
    ["Dtype", kinds.text("dtype", kind)],
    ["Shape", kinds.shape(kind)],
    [kinds.text("what", kind) ? "Saved for" : "Name", all("name")],
    ["Module", all("module")],
    ["Operator", kinds.text("op", kind)],
    ["Made in", kinds.phase(kind)],
  ].filter(([, text]) => text);
  const list = make(
    "dl",
    { class: "details-facts" },
    ...facts.flatMap(([label, text]) => [make("dt", {}, label), make("dd", {}, text)]),
  );
  const stack = frames.length
    ? stacks.list(frames)
    : make("p", { class: "quiet" }, "No Python stack was recorded for it.");
  return make(
    "tr",
    { class: "details", role: "row" },
    make("td", { colspan: COLUMNS.length + 1, role: "cell" }, list, stack),
  );
}
