/** A page of texts and one chart, which is drawn anew for each theme, width and print. */
import { byId, fill, make } from "../common/dom.js";
import { MAX_SENTENCE, cleaned } from "../common/format.js";
import { given } from "../common/given.js";
import { shownTheme, startTheme } from "../common/theme.js";
import { loadPlotly } from "../figures/plotly.js";
import { drawJumps, startHelp } from "./jumps.js";
import { drawBeforeLoaded, startPrinting } from "./paper.js";
import { offerToSave, showAskedPicture } from "./saving.js";
/** @import { Theme } from "../common/theme.js" */
/** @import { Figure } from "../figures/figures.js" */

/** @typedef {{ampmem: string, title: string, config: Record<string, boolean|string>}} ChartView what every such page is drawn from has */

/**
 * A list, in a section that is hidden where there is nothing to list.
 * @param {string} section
 * @param {string} id
 * @param {Array<string|Node>} items
 */
export function listed(section, id, items) {
  byId(section).hidden = items.length === 0;
  fill(byId(id), ...items.map((item) => make("li", {}, item)));
}

/**
 * @template {ChartView} View
 * @typedef {object} ChartParts
 * @property {(data: View) => void} show puts the texts into the page
 * @property {string} section the part of the page that is hidden where there is nothing to draw
 * @property {(data: View) => boolean} isEmpty
 * @property {(data: View, theme: Theme, width: number, height: number) => Figure} figure
 * @property {number} height
 */

/**
 * @template {ChartView} View
 * @param {ChartParts<View>} parts
 */
async function startChart({ show, section, isEmpty, figure, height }) {
  const data = /** @type {View} */ (cleaned(JSON.parse(given(byId("page-data").textContent)), MAX_SENTENCE));
  fill(byId("title"), data.title);
  byId("foot").textContent = `Made by ampmem ${data.ampmem}. This page loads nothing from the network.`;
  show(data);
  const chart = byId("chart");
  const empty = isEmpty(data);
  byId(section).hidden = empty;
  drawJumps();
  startHelp();
  const plotly = await loadPlotly();
  const draw = (theme = shownTheme(), width = chart.clientWidth) => {
    if (empty) return null;
    const { data: traces, layout } = figure(data, theme, width, height);
    return plotly.react(chart, traces, layout, { ...data.config, responsive: false, displayModeBar: false });
  };
  await draw();
  startTheme(() => draw());
  window.addEventListener("resize", () => draw());
  startPrinting(({ theme, width } = {}) => draw(theme, width));
  offerToSave(plotly);
  await showAskedPicture(plotly);
  document.documentElement.dataset.drawn = "";
}

/**
 * Draws the page; what goes wrong stands in it.
 * @template {ChartView} View
 * @param {ChartParts<View>} parts
 */
export function drawChartPage(parts) {
  return drawBeforeLoaded(() => startChart(parts));
}
