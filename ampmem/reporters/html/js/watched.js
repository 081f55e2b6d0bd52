/** Puts the page of a watched run together. */
import { byId, fill, make, tableOf } from "./common/dom.js";
import { limitShown, watchedFigure } from "./figures/watchedfigure.js";
import { drawChartPage, listed } from "./sections/chartpage.js";
/** @import { WatchedView } from "./common/page.js" */

const HEIGHT = 420;

/** @param {WatchedView} data */
function showFull(data) {
  byId("full").hidden = data.full.length === 0;
  const columns = data.full_columns.map((head, i) => ({ head, number: i === 3, wide: i === 4 }));
  const rows = data.full.map(({ cells: [number, ...rest], page }) => [
    page === null ? number : make("a", { href: encodeURIComponent(page) }, `page of ${number}`),
    ...rest,
  ]);
  fill(byId("full-table"), tableOf({ columns, rows, stacked: true }));
}

/** @param {WatchedView} data */
function showTexts(data) {
  byId("command").textContent = data.command;
  fill(byId("lines"), ...data.lines.map((line) => make("li", {}, line)));
  listed("shortage", "shortage-lines", data.shortage);
  const columns = data.held_columns.map((head, i) => ({ head, number: i > 0 }));
  if (data.held.length > 0) fill(byId("held"), tableOf({ columns, rows: data.held, foot: true }));
  const above = data.limit !== null && !limitShown(data);
  byId("limit").textContent = above ? `Not drawn, because the run is far below: ${data.limit_text}.` : "";
  showFull(data);
  const commands = data.commands.map((command) => make("code", {}, command));
  listed("next", "commands", commands);
  listed("notes", "remarks", data.notes);
}

await drawChartPage({
  show: showTexts,
  section: "run",
  isEmpty: (/** @type {WatchedView} */ data) => data.curves.every((curve) => curve.steps.length === 0),
  figure: watchedFigure,
  height: HEIGHT,
});
