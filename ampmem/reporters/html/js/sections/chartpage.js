/** A page of texts and one chart, which is drawn anew for each theme, width and print. */
import { byId } from "../common/dom.js";
import { MAX_SENTENCE, cleaned } from "../common/format.js";
import { given } from "../common/given.js";
import { shownTheme, startTheme } from "../common/theme.js";
import { loadPlotly } from "../figures/plotly.js";
import { drawBeforeLoaded, startPrinting } from "./paper.js";
/** @import { Theme } from "../common/theme.js" */
/** @import { Figure } from "../figures/figures.js" */

/** @typedef {{config: Record<string, boolean|string>}} ChartView what every such page is drawn from has */
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
  show(data);
  const chart = byId("chart");
  const empty = isEmpty(data);
  byId(section).hidden = empty;
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
  document.documentElement.dataset.drawn = "";
}

/**
 * Draws the page; what goes wrong stands in it.
 * @template {ChartView} View
 * @param {ChartParts<View>} parts
 */
export function drawChartPage(parts) {
  return drawBeforeLoaded(() =>
    startChart(parts).catch((error) => {
      byId("trouble").hidden = false;
      byId("trouble").textContent = `This page could not be drawn: ${error.message}`;
      throw error;
    }),
  );
}
