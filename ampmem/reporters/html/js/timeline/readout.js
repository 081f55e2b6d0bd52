/** What is said of one instant: the readout beside the chart, which is its legend too, and the line over it. */
import { byId, fill, make, swatch } from "../common/dom.js";
import { formatBytes, formatCount, formatShare } from "../common/format.js";
import { MARGIN } from "./figure.js";
/** @import { CategoryView } from "../common/page.js" */
/** @import { Live } from "../data/stream.js" */

/** @typedef {Record<"row"|"exact"|"bytes"|"share"|"line", HTMLElement>} ReadoutRow */

/**
 * Makes one button for each category or layer that ever has bytes; the last of the stack comes first, as in the chart.
 * @param {CategoryView[]} categories
 * @param {boolean[]} present
 * @param {(category: number) => void} toggle
 * @returns {Map<number, ReadoutRow>}
 */
export function buildReadout(categories, present, toggle) {
  const rows = new Map();
  const order = categories
    .map((_, i) => i)
    .filter((i) => present[i])
    .reverse();
  for (const i of order) {
    const cells = {
      exact: make("span", { class: "exact" }),
      bytes: make("span", { class: "bytes" }),
      share: make("span", { class: "share" }),
      line: make("span", { class: "line" }),
    };
    const row = make(
      "button",
      { type: "button", class: "readout-row", "aria-pressed": "true", "data-category": categories[i].key },
      swatch(categories[i]),
      make("span", { class: "label" }, categories[i].label),
      cells.exact,
      cells.bytes,
      cells.share,
      cells.line,
    );
    cells.line.style.setProperty("--fill", `light-dark(${categories[i].light}, ${categories[i].dark})`);
    row.addEventListener("click", () => toggle(i));
    rows.set(i, { row, ...cells });
  }
  fill(byId("readout-rows"), ...[...rows.values()].map(({ row }) => row));
  return rows;
}

/**
 * Shows the bytes of one instant. `shown` says which of the values are drawn; the first `live` are categories.
 * @param {Map<number, ReadoutRow>} rows
 * @param {{title: string, where: string, values: Float64Array, live: number}} reading
 * @param {boolean[]} shown
 */
export function showReading(rows, reading, shown) {
  byId("readout-title").textContent = reading.title;
  byId("readout-where").textContent = reading.where;
  /** @param {Float64Array} values */
  const sum = (values) => values.reduce((all, value) => all + value, 0);
  const total = sum(reading.values.subarray(0, reading.live));
  const reserved = sum(reading.values);
  for (const [category, { row, exact, bytes, share, line }] of rows) {
    const value = reading.values[category];
    row.setAttribute("aria-pressed", String(Boolean(shown[category])));
    exact.textContent = formatCount(value);
    bytes.textContent = formatBytes(value);
    // Shares are of what lives; the layers are above that.
    share.textContent = category < reading.live ? formatShare(value, total) : "";
    line.style.width = `${total && category < reading.live ? (100 * value) / total : 0}%`;
  }
  byId("readout-exact").textContent = formatCount(total);
  byId("readout-total").textContent = formatBytes(total);
  byId("readout-reserved-row").hidden = reading.values.length === reading.live;
  byId("readout-reserved-exact").textContent = formatCount(reserved);
  byId("readout-reserved").textContent = formatBytes(reserved);
}

/**
 * Whether the peak's label would be under that of a cursor there; both are parts of the view.
 * @param {number} cursor
 * @param {number} peak
 */
function isJustRightOf(cursor, peak) {
  return cursor >= 0.15 && peak >= cursor && peak - cursor < 0.2;
}

/**
 * Draws the line at `part` of the view, and tells those who do not see it.
 * @param {{live: Live, index: number, where: string, total: number}} instant `total` are the bytes drawn there
 * @param {{part: number, peak: number, pinned: boolean, width: number}} place parts of the view; NaN for nowhere
 */
export function placeCursor({ live, index, where, total }, { part, peak, pinned, width }) {
  const frame = byId("chart-frame");
  const line = byId("cursor");
  frame.setAttribute("aria-valuemax", String(live.position(live.length - 1)));
  frame.setAttribute("aria-valuenow", String(live.position(index)));
  frame.setAttribute("aria-valuetext", `${where}: ${formatBytes(total)}`);
  line.hidden = !(part >= 0 && part <= 1);
  line.classList.toggle("pinned", pinned);
  line.classList.toggle("leftwards", part > 0.8 || isJustRightOf(part, peak));
  if (!line.hidden) line.style.left = `${MARGIN.left + part * (width - MARGIN.left - MARGIN.right)}px`;
  byId("cursor-total").textContent = formatBytes(total);
}
