/** Horizontal bars with their numbers beside them: real tables, so that they can be read without being seen. */
import { make, named, paint } from "../common/dom.js";
import { formatBytes, formatShare, formatSigned } from "../common/format.js";

/** One bar from `start` over `bytes`, both in parts of `whole`. */
function piece(start, bytes, whole, category, name) {
  const bar = paint(
    make("span", { class: `piece ${name}`, title: category ? `${category.label} · ${formatBytes(bytes)}` : null }),
    category,
  );
  bar.style.left = `${whole ? (100 * start) / whole : 0}%`;
  bar.style.width = `${whole ? (100 * Math.abs(bytes)) / whole : 0}%`;
  return bar;
}

function rowHead(label) {
  return make("th", { scope: "row", class: label.length <= 18 ? "short" : null }, label);
}

function track(...pieces) {
  return make("td", { class: "track" }, make("span", { class: "track-line", "aria-hidden": "true" }, ...pieces));
}

function barTable(label, rows) {
  return make("table", { class: "bars", "aria-label": label }, make("tbody", {}, ...rows));
}

/**
 * A waterfall: each row begins where the one before ends; the last row is the whole.
 * @param {{rows: Array<{key: string, bytes: number}>, total: number}} composition
 */
export function compositionBars(composition, categoryOf, when = "at the peak") {
  let start = 0;
  const rows = composition.rows.map(({ key, bytes }) => {
    const category = categoryOf(key);
    const row = make(
      "tr",
      {},
      make("th", { scope: "row" }, named(category, key)),
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
    make("th", { scope: "row" }, `Live ${when}`),
    track(piece(0, composition.total, composition.total, null, "whole")),
    make("td", { class: "number" }, make("b", {}, formatBytes(composition.total))),
    make("td", {}),
  );
  return barTable(`Live ${when}: category, bytes, share`, [...rows, total]);
}

/**
 * One stacked bar for each run at one instant.
 * @param {{rows: Array<{key: string, cells: Array<number|null>}>, totals: Array<number|null>}} instant
 */
export function stackedBars(instant, labels, baseline, categoryOf) {
  const most = Math.max(1, ...instant.totals.map((total) => total ?? 0));
  const reference = baseline === null ? null : instant.totals[labels.indexOf(baseline)];
  const rows = labels.map((label, run) => {
    const total = instant.totals[run];
    let start = 0;
    const pieces = instant.rows.flatMap(({ key, cells }) => {
      if (!cells[run]) return [];
      const bar = piece(start, cells[run], most, categoryOf(key), "");
      start += cells[run];
      return [bar];
    });
    const compared =
      total === null || reference === null || reference === undefined || label === baseline
        ? ""
        : formatSigned(total - reference);
    return make(
      "tr",
      {},
      rowHead(label),
      track(...pieces),
      make("td", { class: "number" }, make("b", {}, total === null ? "-" : formatBytes(total))),
      make("td", { class: "number quiet" }, compared),
    );
  });
  return barTable(`Live bytes of each run, ${instant.name}, and the difference to ${baseline ?? "the first"}`, rows);
}

/** The lowest and highest point that a waterfall reaches. */
function waterfallExtent({ start, end, terms }) {
  let now = start;
  let most = Math.max(start, end);
  for (const { bytes } of terms) {
    now += bytes;
    most = Math.max(most, now);
  }
  return Math.max(1, most);
}

/** From one run's bytes to another's: `start` plus all terms is `end`. */
export function waterfallBars(waterfall, categoryOf) {
  const whole = waterfallExtent(waterfall);
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
      make("th", { scope: "row" }, named(category, key)),
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
