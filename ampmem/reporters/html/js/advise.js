/** Puts the page of a search for changes together. */
import { byId, fill, make, tableOf } from "./common/dom.js";
import { MAX_SENTENCE, cleaned } from "./common/format.js";
import { given } from "./common/given.js";
import { shownTheme, startTheme } from "./common/theme.js";
import { adviceFigure, adviceLimitShown } from "./figures/advicefigure.js";
import { loadPlotly } from "./figures/plotly.js";
import { drawBeforeLoaded, startPrinting } from "./sections/paper.js";
/** @import { AdviceView } from "./common/page.js" */

const HEIGHT = 420;

/**
 * A list, in a section that is hidden where there is nothing to list.
 * @param {string} section
 * @param {string} id
 * @param {Array<string|Node>} items
 */
function listed(section, id, items) {
  byId(section).hidden = items.length === 0;
  fill(byId(id), ...items.map((item) => make("li", {}, item)));
}

/** @param {AdviceView} data */
function showTexts(data) {
  byId("title").textContent = data.title;
  fill(byId("facts"), ...data.facts.flatMap(([name, text]) => [make("dt", {}, name), make("dd", {}, text)]));
  byId("best-title").textContent = `In code: ${data.change}`;
  const code = data.code.map((line) => make("code", {}, line));
  listed("best", "code", code);
  const links = data.pages.map(({ text, page }) => make("a", { href: encodeURIComponent(page) }, text));
  listed("timelines", "pages", links);
  listed("refused", "reasons", data.refused);
  listed("proven", "proofs", data.proven);
  const columns = data.columns.map((head, i) => ({ head, number: i > 0 && i < 5, wide: i === 6 }));
  fill(byId("runs"), tableOf({ caption: "The best run comes first", columns, rows: data.table, stacked: true }));
  const above = data.limit !== null && !adviceLimitShown(data);
  byId("limit").textContent = above ? `Above the picture is ${data.limit_text}.` : "";
  byId("foot").textContent = `Made by ampmem ${data.ampmem}. This page loads nothing from the network.`;
}

async function start() {
  const data = /** @type {AdviceView} */ (cleaned(JSON.parse(given(byId("page-data").textContent)), MAX_SENTENCE));
  showTexts(data);
  const chart = byId("chart");
  byId("curve").hidden = data.series.length === 0;
  const plotly = await loadPlotly();
  const draw = (theme = shownTheme(), width = chart.clientWidth) => {
    if (byId("curve").hidden) return null;
    const { data: traces, layout } = adviceFigure(data, theme, width, HEIGHT);
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
