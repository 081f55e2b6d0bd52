/** Runs side by side, and how one gets from the baseline's bytes to another's. */
import { byId, make, tableOf } from "../common/dom.js";
import { formatBytes } from "../common/format.js";
import { given } from "../common/given.js";
import { comparedAt, waterfallOf } from "../data/run.js";
import { stackedBars, waterfallBars } from "../figures/bars.js";
import { showSection } from "./section.js";
/** @import { Child, Column } from "../common/dom.js" */
/** @import { ComparedRuns, PageView } from "../common/page.js" */
/** @import { Instant } from "../data/run.js" */
/** @import { CategoryOf } from "../figures/bars.js" */

const OF_CHANGES = ["Change", "Kind", "Before", "After", "Category", "What"].map((head) => ({ head }));

/**
 * @param {string} first
 * @param {string[]} labels
 * @returns {Column[]}
 */
function columnsOf(first, labels) {
  return [{ head: first }, ...labels.map((head) => ({ head, number: true }))];
}

/** @param {ComparedRuns} comparison */
function lossTable({ labels, losses, loss_differences: differences }) {
  if (!losses.length) return null;
  const shown = losses.length > 7 ? [...losses.slice(0, 5), ...losses.slice(-1)] : losses;
  return tableOf({
    caption: shown.length < losses.length ? "Losses of the first and the last step" : "Losses",
    columns: columnsOf("Step", labels),
    rows: differences.length ? [...shown, differences] : shown,
  });
}

/**
 * @param {Instant[]} instants
 * @param {string[]} labels
 * @param {CategoryOf} categoryOf
 */
function byCategory(instants, labels, categoryOf) {
  /** @param {Array<number|null>} cells */
  const sizes = (cells) => cells.map((cell) => (cell === null ? "-" : formatBytes(cell)));
  const tables = instants.map(({ name, rows, totals }) => {
    const shown = rows.map(({ key, cells }) => [categoryOf(key)?.label ?? key, ...sizes(cells)]);
    const columns = columnsOf("Category", labels);
    return tableOf({ caption: name, columns, rows: [...shown, ["Live", ...sizes(totals)]], foot: true });
  });
  return make("details", {}, make("summary", {}, "Every category at every instant, as tables"), ...tables);
}

/**
 * @param {string} title
 * @param {Child[]} parts
 */
function block(title, ...parts) {
  return make("div", { class: "block" }, make("h3", {}, title), ...parts);
}

/**
 * Which steps the bars are of.
 * @param {ComparedRuns} comparison
 */
function stepsInWords({ labels, steps }) {
  const known = labels.flatMap((label, i) => (steps[i] ? [{ label, step: steps[i].index }] : []));
  if (!known.length) return null;
  const same = known.every(({ step }) => step === known[0].step);
  const words = same
    ? `At the same instants of step ${known[0].step}.`
    : `At the same instants of one step of each: ${known.map(({ label, step }) => `${label} step ${step}`).join(", ")}.`;
  return make("p", { class: "quiet" }, words);
}

/**
 * @param {PageView} page
 * @param {CategoryOf} categoryOf
 */
export function showComparison({ comparison, marks, categories }, categoryOf) {
  if (!comparison) return showSection("comparison");
  const { labels, baseline } = comparison;
  if (baseline !== null) byId("comparison-title").textContent = "The precisions side by side";
  const instants = comparedAt(comparison.steps, marks, categories);
  // The peaks are in the verdict.
  const bars = instants.slice(0, -1).map((instant) => block(instant.name, stackedBars(instant, labels, baseline, categoryOf)));
  const falls = comparison.waterfalls.map(([run, mark]) => {
    const fall = waterfallOf(given(instants.find(({ key }) => key === mark)), labels, baseline ?? 0, run);
    return block(`From ${fall.from} to ${fall.to}, ${fall.instant}`, waterfallBars(fall, categoryOf));
  });
  return showSection(
    "comparison",
    stepsInWords(comparison),
    comparison.remarks.length
      ? make("ul", { class: "remarks" }, ...comparison.remarks.map((remark) => make("li", {}, remark)))
      : null,
    ...comparison.failures.map((failure) => make("p", { class: "note" }, failure)),
    make("div", { class: "blocks" }, ...bars),
    falls.length ? make("div", { class: "blocks" }, ...falls) : null,
    make(
      "div",
      { class: "blocks" },
      make(
        "div",
        { class: "block" },
        tableOf({ caption: "Time and memory", columns: columnsOf("Measure", labels), rows: comparison.figures }),
      ),
      make("div", { class: "block" }, lossTable(comparison)),
    ),
    ...comparison.compiling.map(([caption, rows]) => tableOf({ caption, columns: OF_CHANGES, rows })),
    byCategory(instants, labels, categoryOf),
  );
}
