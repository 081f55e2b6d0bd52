/** Puts the page of a search for changes together. */
import { byId, fill, make, tableOf } from "./common/dom.js";
import { adviceFigure, adviceLimitShown } from "./figures/advicefigure.js";
import { drawChartPage, listed } from "./sections/chartpage.js";
/** @import { AdviceView } from "./common/page.js" */

const HEIGHT = 420;

/** @param {AdviceView} data */
function showTexts(data) {
  fill(byId("facts"), ...data.facts.flatMap(([name, text]) => [make("dt", {}, name), make("dd", {}, text)]));
  byId("best-title").textContent = `In code: ${data.change}`;
  const code = data.code.map((line) => make("code", {}, line));
  listed("best", "code", code);
  const links = data.pages.map(([text, page]) => make("a", { href: encodeURIComponent(page) }, text));
  listed("timelines", "pages", links);
  listed("refused", "reasons", data.refused);
  listed("proven", "proofs", data.proven);
  listed("computed", "suggestions", data.computed);
  byId("blocks").hidden = data.blocks.length === 0;
  const heads = data.block_columns.map((head, i) => ({ head, number: i !== 1 }));
  fill(byId("order"), tableOf({ caption: "The first one is checkpointed first", columns: heads, rows: data.blocks }));
  const columns = data.columns.map((head, i) => ({ head, number: i > 0 && i < 5, wide: i === 6 }));
  fill(byId("runs"), tableOf({ caption: "The best run comes first", columns, rows: data.table, stacked: true }));
  const above = data.limit !== null && !adviceLimitShown(data);
  byId("limit").textContent = above ? `Not drawn, because all runs are far below: ${data.limit_text}.` : "";
}

await drawChartPage({
  show: showTexts,
  section: "curve",
  isEmpty: (/** @type {AdviceView} */ data) => data.series.length === 0,
  figure: adviceFigure,
  height: HEIGHT,
});
