/** Horizontal bars with their numbers beside them: real tables, so that they can be read without being seen. */
import { make, named, paint } from "../common/dom.js";
import { formatBytes, formatShare, formatSigned } from "../common/format.js";
/** @import { CategoryView, PrecisionBar, PrecisionWords } from "../common/page.js" */
/** @import { Composition, Fall, Instant } from "../data/run.js" */

/** @typedef {(key: string) => CategoryView|null} CategoryOf the category with this key */

/**
 * One bar from `start` over `bytes`, both in parts of `whole`.
 * @param {number} start
 * @param {number} bytes
 * @param {number} whole
 * @param {CategoryView|null} category
 * @param {string} name
 */
function piece(start, bytes, whole, category, name) {
  const bar = paint(
    make("span", { class: `piece ${name}`, title: category ? `${category.label} · ${formatBytes(bytes)}` : null }),
    category,
  );
  bar.style.left = `${whole ? (100 * start) / whole : 0}%`;
  bar.style.width = `${whole ? (100 * Math.abs(bytes)) / whole : 0}%`;
  return bar;
}

/** Up to this length a name stays on one line, as in verdict.html. */
const SHORT = 18;

/**
 * @param {string} label
 * @param {HTMLElement|null} shown what is shown of it, if that is more than its text
 */
function rowHead(label, shown = null) {
  return make("th", { scope: "row", class: label.length <= SHORT ? "short" : null }, shown ?? label);
}

/**
 * @param {CategoryView|null} category
 * @param {string} key
 */
function categoryHead(category, key) {
  return rowHead(category?.label ?? key, named(category, key));
}

/** @param {HTMLElement[]} pieces */
function track(...pieces) {
  return make("td", { class: "track" }, make("span", { class: "track-line", "aria-hidden": "true" }, ...pieces));
}

/**
 * @param {string} label
 * @param {HTMLElement[]} rows
 */
function barTable(label, rows) {
  return make("table", { class: "bars", "aria-label": label }, make("tbody", {}, ...rows));
}

/**
 * A waterfall: each row begins where the one before ends; the last row is the whole.
 * @param {Composition} composition
 * @param {CategoryOf} categoryOf
 */
export function compositionBars(composition, categoryOf, when = "at the peak") {
  let start = 0;
  const rows = composition.rows.map(({ key, bytes }) => {
    const category = categoryOf(key);
    const row = make(
      "tr",
      {},
      categoryHead(category, key),
      track(piece(start, bytes, composition.total, category, "")),
      make("td", { class: "number" }, make("b", {}, formatBytes(bytes))),
      make("td", { class: "number quiet" }, formatShare(bytes, composition.total)),
    );
    start += bytes;
    return row;
  });
  const total = make(
    "tr",
    { class: "sum" },
    rowHead(`Live ${when}`),
    track(piece(0, composition.total, composition.total, null, "whole")),
    make("td", { class: "number" }, make("b", {}, formatBytes(composition.total))),
    make("td", {}),
  );
  return barTable(`Live ${when}: category, bytes, share`, [...rows, total]);
}

/**
 * One stacked bar for each run at one instant.
 * @param {Instant} instant
 * @param {string[]} labels
 * @param {number|null} baseline
 * @param {CategoryOf} categoryOf
 */
export function stackedBars(instant, labels, baseline, categoryOf) {
  const most = Math.max(1, ...instant.totals.map((total) => total ?? 0));
  const reference = baseline === null ? null : instant.totals[baseline];
  const rows = labels.map((label, run) => {
    const total = instant.totals[run];
    const same = firstLike(instant, run);
    if (total !== null && same < run) {
      return make("tr", {}, rowHead(label), make("td", { class: "quiet", colspan: 3 }, `the same as ${labels[same]}`));
    }
    let start = 0;
    const pieces = instant.rows.flatMap(({ key, cells }) => {
      if (!cells[run]) return [];
      const bar = piece(start, cells[run], most, categoryOf(key), "");
      start += cells[run];
      return [bar];
    });
    const compared =
      total === null || reference === null || run === baseline ? "" : formatSigned(total - reference);
    return make(
      "tr",
      {},
      rowHead(label),
      track(...pieces),
      make("td", { class: "number" }, make("b", {}, total === null ? "-" : formatBytes(total))),
      make("td", { class: "number quiet" }, compared),
    );
  });
  return barTable(`Live bytes of each run, ${instant.name}, and the difference to ${baseline === null ? "the first" : labels[baseline]}`, rows);
}

/**
 * The first run that has the same in every category at this instant; `run` itself where none before it has.
 * @param {Instant} instant
 * @param {number} run
 */
function firstLike({ rows, totals }, run) {
  return totals.findIndex((total, i) => total !== null && rows.every(({ cells }) => cells[i] === cells[run]));
}

/**
 * The lowest and highest point that a waterfall reaches.
 * @param {Fall} waterfall
 */
function waterfallExtent({ start, end, terms }) {
  let now = start;
  let most = Math.max(start, end);
  for (const { bytes } of terms) {
    now += bytes;
    most = Math.max(most, now);
  }
  return Math.max(1, most);
}

/**
 * From one run's bytes to another's: `start` plus all terms is `end`.
 * @param {Fall} waterfall
 * @param {CategoryOf} categoryOf
 */
export function waterfallBars(waterfall, categoryOf) {
  const whole = waterfallExtent(waterfall);
  /**
   * @param {string} label
   * @param {number} bytes
   */
  const end = (label, bytes) =>
    make(
      "tr",
      { class: "sum" },
      rowHead(label),
      track(piece(0, bytes, whole, null, "whole")),
      make("td", { class: "number" }, make("b", {}, formatBytes(bytes))),
    );
  let now = waterfall.start;
  const terms = waterfall.terms.map(({ key, bytes }) => {
    const category = categoryOf(key);
    const row = make(
      "tr",
      {},
      categoryHead(category, key),
      track(piece(Math.min(now, now + bytes), bytes, whole, category, bytes < 0 ? "less" : "more")),
      make("td", { class: "number" }, formatSigned(bytes)),
    );
    now += bytes;
    return row;
  });
  return barTable(`From ${waterfall.from} to ${waterfall.to}, ${waterfall.instant}`, [
    end(waterfall.from, waterfall.start),
    ...terms,
    end(waterfall.to, waterfall.end),
  ]);
}

/** @type {Array<"full"|"low"|"other">} */
export const PRECISIONS = ["full", "low", "other"];

/**
 * One bar for each of `bars`, in parts by precision; the longest is as wide as there is room.
 * @param {string} label
 * @param {PrecisionBar[]} bars
 * @param {PrecisionWords} words
 * @param {(bar: PrecisionBar) => HTMLElement|string} nameOf
 */
export function precisionBars(label, bars, words, nameOf) {
  /** @param {PrecisionBar} bar */
  const size = (bar) => bar.full + bar.low + bar.other;
  const most = Math.max(1, ...bars.map(size));
  const rows = bars.map((bar) => {
    let start = 0;
    const pieces = PRECISIONS.filter((key) => bar[key]).map((key) => {
      const part = piece(start, bar[key], most, null, `precision-${key}`);
      part.title = `${words[key]}: ${formatBytes(bar[key])}`;
      start += bar[key];
      return part;
    });
    return make(
      "tr",
      {},
      make("th", { scope: "row" }, nameOf(bar), bar.detail ? make("small", {}, bar.detail) : null),
      track(...pieces),
      make("td", { class: "number" }, make("b", {}, formatBytes(size(bar)))),
    );
  });
  return barTable(label, rows);
}
