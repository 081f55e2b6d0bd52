/** Runs side by side, and how one gets from the baseline's bytes to another's. */
import { byId, make, tableOf } from "../common/dom.js";
import { formatBytes, formatDuration, formatSigned } from "../common/format.js";
import { stackedBars, waterfallBars } from "../figures/bars.js";
import { showSection } from "./section.js";
/** @import { Child, Column } from "../common/dom.js" */
/** @import { ComparisonView } from "../common/page.js" */
/** @import { CategoryOf } from "../figures/bars.js" */

/** @param {ComparisonView} comparison */
function figures(comparison) {
  const { labels, step_time: times } = comparison;
  /**
   * @template T
   * @param {Array<T|null>} values by run
   * @param {(value: T) => string} show
   */
  const each = (values, show) =>
    labels.map((_, i) => {
      const value = values?.[i];
      return value === null || value === undefined ? "-" : show(value);
    });
  const rows = [
    ["Step time, median", ...each(times, (time) => time.text ?? formatDuration(time.median_ns))],
    ["Fastest to slowest", ...each(times, (time) => `${formatDuration(time.min_ns)} - ${formatDuration(time.max_ns)}`)],
  ];
  rows.push(["Peak reserved", ...each(comparison.peak_reserved, formatBytes)]);
  if (comparison.baseline !== null) {
    rows.push([`Step time vs ${comparison.baseline}`, ...each(times, (time) => time.ratio_text ?? "-")]);
    rows.push([`Peak vs ${comparison.baseline}`, ...each(comparison.peak_difference, formatSigned)]);
    rows.push([`Activations after forward, vs ${comparison.baseline}`, ...each(comparison.activation_ratio_texts, String)]);
  }
  return tableOf({
    caption: "Time and memory",
    columns: columnsOf("Measure", labels),
    rows: rows.filter((row) => row.slice(1).some((cell) => cell !== "-")),
  });
}

/**
 * @param {string} first
 * @param {string[]} labels
 * @returns {Column[]}
 */
function columnsOf(first, labels) {
  return [{ head: first }, ...labels.map((head) => ({ head, number: true }))];
}

/** @param {ComparisonView} comparison */
function losses(comparison) {
  if (!comparison.losses.length) return null;
  const shown =
    comparison.losses.length > 7 ? [...comparison.losses.slice(0, 5), ...comparison.losses.slice(-1)] : comparison.losses;
  const text = (/** @type {number|null} */ value) => (value === null ? "-" : String(Number(value.toPrecision(6))));
  const rows = shown.map((row) => [String(row.step), ...(row.texts ?? row.values.map(text))]);
  const differences = comparison.loss_difference_texts;
  if (comparison.baseline !== null && differences) rows.push([`vs ${comparison.baseline}, up to`, ...differences]);
  return tableOf({
    caption: shown.length < comparison.losses.length ? "Losses of the first and the last step" : "Losses",
    columns: columnsOf("Step", comparison.labels),
    rows,
  });
}

/**
 * @param {ComparisonView} comparison
 * @param {CategoryOf} categoryOf
 */
function byCategory(comparison, categoryOf) {
  const tables = comparison.instants.map((instant) => {
    const rows = instant.rows.map(({ key, cells }) => [
      categoryOf(key)?.label ?? key,
      ...cells.map((cell) => (cell === null ? "-" : formatBytes(cell))),
    ]);
    rows.push(["Live", ...instant.totals.map((total) => (total === null ? "-" : formatBytes(total)))]);
    return tableOf({ caption: instant.name, columns: columnsOf("Category", comparison.labels), rows, foot: true });
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
 * @param {ComparisonView} comparison
 */
function stepsInWords({ instants, labels, steps }) {
  const known = labels.flatMap((label, run) => (steps[run] === null ? [] : [{ label, step: steps[run] }]));
  if (!instants.length || !known.length) return null;
  const same = known.every(({ step }) => step === known[0].step);
  const words = same
    ? `At the same instants of step ${known[0].step}.`
    : `At the same instants of one step of each: ${known.map(({ label, step }) => `${label} step ${step}`).join(", ")}.`;
  return make("p", { class: "quiet" }, words);
}

/**
 * @param {ComparisonView|null} comparison
 * @param {CategoryOf} categoryOf
 */
export function showComparison(comparison, categoryOf) {
  if (!comparison) return showSection("comparison");
  const { labels, baseline } = comparison;
  if (baseline !== null) byId("comparison-title").textContent = "The precisions side by side";
  // The peaks are in the verdict.
  const bars = comparison.instants.slice(0, -1).map((instant) =>
    block(instant.name, stackedBars(instant, labels, baseline, categoryOf)),
  );
  const falls = comparison.waterfall.map((each) =>
    block(`From ${each.from} to ${each.to}, ${each.instant}`, waterfallBars(each, categoryOf)),
  );
  return showSection(
    "comparison",
    stepsInWords(comparison),
    comparison.remarks.length
      ? make("ul", { class: "remarks" }, ...comparison.remarks.map((remark) => make("li", {}, remark)))
      : null,
    ...comparison.failures.map(({ label, failure }) => make("p", { class: "note" }, `${label} failed: ${failure}`)),
    bars.length ? make("div", { class: "blocks" }, ...bars) : null,
    falls.length ? make("div", { class: "blocks" }, ...falls) : null,
    make(
      "div",
      { class: "blocks" },
      make("div", { class: "block" }, figures(comparison)),
      make("div", { class: "block" }, losses(comparison)),
    ),
    comparison.instants.length ? byCategory(comparison, categoryOf) : null,
  );
}
