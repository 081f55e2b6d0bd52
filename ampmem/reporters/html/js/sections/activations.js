/** What the activations are for, where they were made, and in which type: why mixed precision does not halve them. */
import { fill, make } from "../common/dom.js";
import { formatBytes, formatCount, formatShare } from "../common/format.js";
import { PRECISIONS, precisionBars } from "../figures/bars.js";
import { showSection } from "./section.js";
import { longTable } from "./tables.js";
/** @import { ActivationsView, PrecisionBar } from "../common/page.js" */
/** @import { Kinds } from "../data/alive.js" */
/** @import { Run } from "../data/run.js" */
/** @import { Live } from "../data/stream.js" */

const FIRST_BARS = 8;

/** @typedef {{label: string, keep: (kind: number) => boolean}} Narrowing of the allocation table */

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
      make("span", {}, `${words[key]}: ${formatBytes(whole[key])}, ${formatShare(whole[key], sizeOf(whole))}`),
    ),
  );
  return make("ul", { class: "legend" }, ...rows);
}

/** @param {PrecisionBar} bar */
function sizeOf(bar) {
  return bar.full + bar.low + bar.other;
}

/**
 * Bars of which a few are shown at first. Those have a link that `pick` says what to do for.
 * @param {string} title
 * @param {ActivationsView} view
 * @param {PrecisionBar[]} bars
 * @param {PrecisionBar|null} rest
 * @param {(bar: PrecisionBar) => (() => void)|null} pick
 */
function barList(title, { words }, bars, rest, pick) {
  const box = make("div", {});
  const more = make("button", { type: "button", class: "show-all" }, `Show all ${formatCount(bars.length)}`);
  /** @param {PrecisionBar} bar */
  const nameOf = (bar) => {
    const picked = bar === rest ? null : pick(bar);
    if (!picked) return bar.label;
    const name = make("button", { type: "button", class: "link", title: "Show them in the allocation table" }, bar.label);
    name.addEventListener("click", picked);
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
    each.saved_for ?? "not saved by any op",
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
    make("summary", {}, "By the op that saved it, the op that made it, and its type"),
    longTable({ caption: "Saved for, and made by", columns, rows, stacked: true }, view.savings_left_out),
  );
}

/**
 * What a bar is about, for the table: what it is called, and which kinds of allocations.
 * @param {ActivationsView} view
 * @param {Kinds} kinds
 */
function narrowings(view, kinds) {
  const category = kinds.categories.findIndex(({ key }) => key === "activations");
  const column = view.by === "saved for" ? "name" : "op";
  /** @type {(bar: PrecisionBar) => Narrowing} */
  const byOp = ({ label, detail, ops }) => {
    const pairs = new Set(ops.map((pair) => JSON.stringify(pair)));
    const unseen = ops.every(([op]) => op === null);
    return {
      label: `activations ${view.by} ${unseen ? "none of the ops seen" : detail || label}`,
      keep: (kind) =>
        kinds.category(kind) === category &&
        pairs.has(JSON.stringify([kinds.text(column, kind) || null, kinds.text("dtype", kind) || null])),
    };
  };
  /** @type {(bar: PrecisionBar) => Narrowing} */
  const byModule = (bar) => ({
    label: `activations made in ${bar.label}`,
    keep: (kind) => kinds.category(kind) === category && isOf(kinds.text("module", kind), bar.module),
  });
  return { byOp, byModule };
}

/**
 * Fills the section, or hides it. A bar leads to the table, in which `pin` makes the page show an instant and `show` brings it
 * into view; where that would not come to the bytes of the bar, it leads nowhere.
 * @param {Run} run
 * @param {Kinds} kinds
 * @param {Live} live
 * @param {(index: number) => void} pin
 * @param {() => void} show
 */
export function showActivations(run, kinds, live, pin, show) {
  const view = run.said.activations;
  if (!view) return showSection("activations");
  const index = live.indexOf(run.activations);
  const counts = live.aliveAt(index);
  const { byOp, byModule } = narrowings(view, kinds);
  /** @param {(bar: PrecisionBar) => Narrowing} narrowing */
  const leads = (narrowing) => (/** @type {PrecisionBar} */ bar) => {
    const detail = narrowing(bar);
    const bytes = counts?.reduce((sum, count, kind) => sum + (count && detail.keep(kind) ? count * kinds.bytes(kind) : 0), 0);
    if (bytes !== sizeOf(bar)) return null;
    return () => {
      pin(index);
      document.dispatchEvent(new CustomEvent("narrow", { detail }));
      show();
    };
  };
  return showSection(
    "activations",
    make("p", { class: "quiet" }, `Activations alive ${view.when}: ${formatBytes(sizeOf(view.whole))}.`),
    legend(view),
    make(
      "div",
      { class: "blocks" },
      barList(view.by === "saved for" ? "What they were saved for" : "Which ops made them", view, view.kinds, null, leads(byOp)),
      view.modules.length
        ? barList("Which modules made them", view, view.modules, view.modules_rest, leads(byModule))
        : null,
    ),
    view.by === "saved for" ? savingsTable(view) : null,
  );
}
