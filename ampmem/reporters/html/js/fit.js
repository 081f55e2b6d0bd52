/** Puts the page of a fit together. */
import { byId, fill, make, tableOf } from "./common/dom.js";
import { formatBytes } from "./common/format.js";
import { capacityShown, drawnFrom, fitFigure } from "./figures/fitfigure.js";
import { drawChartPage } from "./sections/chartpage.js";
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
  const columns = [data.fit.vary.argument, ...data.columns].map((head) => ({ head, number: true }));
  fill(byId("runs"), tableOf({ caption: "Peak reserved of each run, and peak allocated", columns, rows: data.table }));
  const above = data.capacity !== null && !capacityShown(drawnFrom(data));
  byId("capacity").textContent = above
    ? `Not drawn, because all runs are far below: the ${formatBytes(data.capacity)} that the allocator can take.`
    : "";
  byId("room").textContent = data.room;
  byId("foot").textContent = `Made by ampmem ${data.ampmem}. This page loads nothing from the network.`;
}

await drawChartPage({
  show: showTexts,
  section: "curves",
  isEmpty: (/** @type {FitView} */ data) => data.fit.arms.every(({ points }) => !points.some((point) => point.may_fit)),
  figure: fitFigure,
  height: HEIGHT,
});
