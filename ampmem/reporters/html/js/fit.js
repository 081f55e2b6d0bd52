/** Puts the page of a fit together. */
import { byId, fill, make, tableOf } from "./common/dom.js";
import { formatBytes } from "./common/format.js";
import { capacityShown, drawnFrom, fitFigure } from "./figures/fitfigure.js";
import { drawChartPage, listed } from "./sections/chartpage.js";
/** @import { FitView } from "./common/page.js" */

const HEIGHT = 420;

/** @param {FitView} data */
function showTexts(data) {
  fill(byId("facts"), ...data.facts.flatMap(([name, text]) => [make("dt", {}, name), make("dd", {}, text)]));
  listed("fitting", "fitting", data.fitting);
  listed("against", "break-even", data.break_even);
  listed("notes", "remarks", data.remarks);
  const columns = [data.fit.vary.argument, ...data.columns].map((head, i) => ({ head, number: true, wide: i > 0 }));
  fill(byId("runs"), tableOf({ caption: "Peak reserved of each run (and peak allocated)", columns, rows: data.table, stacked: true }));
  const above = data.capacity !== null && !capacityShown(drawnFrom(data));
  byId("capacity").textContent = above
    ? `Not drawn, because all runs are far below: the ${formatBytes(data.capacity)} that the allocator can take.`
    : "";
  fill(byId("room"), data.room);
}

await drawChartPage({
  show: showTexts,
  section: "curves",
  isEmpty: (/** @type {FitView} */ data) => data.fit.arms.every(({ points }) => !points.some((point) => point.may_fit)),
  figure: fitFigure,
  height: HEIGHT,
});
