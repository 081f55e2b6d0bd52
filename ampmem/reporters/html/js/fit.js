/** Puts the page of a fit together. */
import { byId, fill, make, tableOf } from "./common/dom.js";
import { MAX_SENTENCE, cleaned, formatBytes } from "./common/format.js";
import { given } from "./common/given.js";
import { shownTheme, startTheme } from "./common/theme.js";
import { capacityShown, fitFigure } from "./figures/fitfigure.js";
import { loadPlotly } from "./figures/plotly.js";
import { drawBeforeLoaded, startPrinting } from "./sections/paper.js";
/** @import { FitView } from "./common/page.js" */

const HEIGHT = 420;

/**
 * @param {string} id
 * @param {string[]} lines
 */
function listed(id, lines) {
  fill(byId(id), ...lines.map((line) => make("li", {}, line)));
}

/** @param {FitView} data */
function showTexts(data) {
  byId("title").textContent = data.title;
  fill(byId("facts"), ...data.facts.flatMap(([name, text]) => [make("dt", {}, name), make("dd", {}, text)]));
  listed("fitting", data.fitting);
  byId("against").hidden = data.break_even.length === 0;
  listed("break-even", data.break_even);
  byId("notes").hidden = data.remarks.length === 0;
  listed("remarks", data.remarks);
  const columns = [data.argument, ...data.columns].map((head) => ({ head, number: true }));
  fill(byId("runs"), tableOf({ caption: "Peak reserved of each run, and peak allocated", columns, rows: data.table }));
  const above = data.capacity !== null && !capacityShown(data);
  byId("capacity").textContent = above
    ? `The ${formatBytes(data.capacity)} that the allocator can take are above the picture.`
    : "";
  byId("room").textContent = data.room;
  byId("foot").textContent = `Made by ampmem ${data.ampmem}. This page loads nothing from the network.`;
}

async function start() {
  const data = /** @type {FitView} */ (cleaned(JSON.parse(given(byId("page-data").textContent)), MAX_SENTENCE));
  showTexts(data);
  const chart = byId("chart");
  byId("curves").hidden = data.curves.every((curve) => curve.values.length === 0);
  const plotly = await loadPlotly();
  const draw = (theme = shownTheme(), width = chart.clientWidth) => {
    if (byId("curves").hidden) return null;
    const { data: traces, layout } = fitFigure(data, theme, width, HEIGHT);
    return plotly.react(chart, traces, layout, { ...data.config, responsive: false, displayModeBar: false });
  };
  await draw();
  startTheme(() => draw());
  window.addEventListener("resize", () => draw());
  startPrinting(({ theme, width } = {}) => draw(theme, width));
  document.documentElement.dataset.drawn = "";
}

await drawBeforeLoaded(() =>
  start().catch((error) => {
    byId("trouble").hidden = false;
    byId("trouble").textContent = `This page could not be drawn: ${error.message}`;
    throw error;
  }),
);
