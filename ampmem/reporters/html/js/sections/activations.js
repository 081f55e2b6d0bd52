/** What the activations are for, where they were made, and in which type: why mixed precision does not halve them. */
import { fill, make } from "../common/dom.js";
import { formatBytes, formatCount, formatShare } from "../common/format.js";
import { PRECISIONS, precisionBars } from "../figures/bars.js";
import { showSection } from "./section.js";
import { longTable } from "./tables.js";
/** @import { ActivationsView, PrecisionBar, RunView } from "../common/page.js" */
/** @import { Kinds } from "../data/alive.js" */

const FIRST_BARS = 8;

/**
 * Narrows the allocation table to what `keep` says yes to.
 * @param {string} label
 * @param {(kind: number) => boolean} keep
 */
function narrowTo(label, keep) {
  document.dispatchEvent(new CustomEvent("narrow", { detail: { label, keep } }));
}

/**
 * Whether `module` is one of `pattern`'s, in which `*` stands for a number; without a pattern, whether it is none.
 * @param {string} module
 * @param {string|null} pattern
 */
export function isOf(module, pattern) {
  if (pattern === null) return module === "";
  const pieces = pattern.split(".");
  const path = module.split(".");
  return (
    path.length === pieces.length &&
    pieces.every((piece, i) => piece === path[i] || (piece === "*" && /^\d+$/.test(path[i])))
  );
}

/** @param {ActivationsView} view */
function legend({ whole, words }) {
  const rows = PRECISIONS.filter((key) => whole[key]).map((key) =>
    make(
      "li",
      {},
      make("span", { class: `swatch precision-${key}`, "aria-hidden": "true" }),
      `${words[key]}: ${formatBytes(whole[key])}, ${formatShare(whole[key], sizeOf(whole))}`,
    ),
  );
  return make("ul", { class: "legend" }, ...rows);
}

/** @param {PrecisionBar} bar */
function sizeOf(bar) {
  return bar.full + bar.low + bar.other;
}

/**
 * Bars of which a few are shown at first. Pressing the name of one narrows the allocation table.
 * @param {string} title
 * @param {ActivationsView} view
 * @param {PrecisionBar[]} bars
 * @param {PrecisionBar|null} rest
 * @param {(bar: PrecisionBar) => void} pick
 */
function barList(title, { words }, bars, rest, pick) {
  const box = make("div", {});
  const more = make("button", { type: "button" }, `Show all ${formatCount(bars.length)}`);
  /** @param {PrecisionBar} bar */
  const nameOf = (bar) => {
    if (bar === rest) return bar.label;
    const name = make("button", { type: "button", class: "link", title: "Show them in the allocation table" }, bar.label);
    name.addEventListener("click", () => pick(bar));
    return name;
  };
  /** @param {number} limit */
  const draw = (limit) => {
    const all = bars.length <= limit;
    const shown = all && rest ? [...bars, rest] : bars.slice(0, limit);
    fill(box, precisionBars(title, shown, words, nameOf), all ? null : more);
  };
  more.addEventListener("click", () => draw(bars.length));
  draw(FIRST_BARS);
  return make("div", { class: "block" }, make("h3", {}, title), box);
}

/** @param {ActivationsView} view */
function savingsTable(view) {
  const total = sizeOf(view.whole);
  const rows = view.savings.map((each) => [
    each.saved_for ?? "not seen saved",
    each.made_by ?? "-",
    each.dtype ?? "?",
    formatCount(each.tensors),
    formatBytes(each.bytes),
    formatShare(each.bytes, total),
  ]);
  const columns = [
    { head: "Saved for", wide: true },
    { head: "Made by", wide: true },
    { head: "Type" },
    { head: "Tensors", number: true },
    { head: "Bytes", number: true },
    { head: "Share", number: true },
  ];
  return make(
    "details",
    {},
    make("summary", {}, "Which op saved what another made, and its type"),
    longTable({ caption: "Saved for, and made by", columns, rows, stacked: true }, view.savings_left_out),
  );
}

/**
 * @param {RunView} run
 * @param {Kinds} kinds
 */
export function showActivations(run, kinds) {
  const view = run.activations;
  if (!view) return showSection("activations");
  const category = kinds.categories.findIndex(({ key }) => key === "activations");
  const column = view.by === "saved for" ? "name" : "op";
  /** @param {PrecisionBar} bar */
  const byOp = (bar) =>
    narrowTo(`activations ${view.by} ${bar.ops[0] === null ? "no op that was seen" : bar.detail || bar.label}`, (kind) => {
      return kinds.category(kind) === category && bar.ops.includes(kinds.text(column, kind) || null);
    });
  /** @param {PrecisionBar} bar */
  const byModule = (bar) =>
    narrowTo(`activations made in ${bar.label}`, (kind) => {
      return kinds.category(kind) === category && isOf(kinds.text("module", kind), bar.module);
    });
  return showSection(
    "activations",
    make("p", { class: "quiet" }, `What is kept for backward ${view.when}: ${formatBytes(sizeOf(view.whole))}.`),
    legend(view),
    make(
      "div",
      { class: "blocks" },
      barList(view.by === "saved for" ? "What they are kept for" : "Which ops made them", view, view.kinds, null, byOp),
      view.modules.length
        ? barList("Which modules made them", view, view.modules, view.modules_rest, byModule)
        : null,
    ),
    view.by === "saved for" ? savingsTable(view) : null,
  );
}
