/** Puts a page of texts and tables together; figures are drawn by `drawFigures`, which such a page may bring along. */
import { byId } from "./common/dom.js";
import { shownTheme, startTheme } from "./common/theme.js";
import { loadPlotly } from "./figures/plotly.js";
import { drawJumps, startHelp } from "./sections/jumps.js";
import { drawBeforeLoaded, startPrinting } from "./sections/paper.js";
import { offerToSave, showAskedPicture } from "./sections/saving.js";
/** @import { Theme } from "./common/theme.js" */

await drawBeforeLoaded(async () => {
  byId("foot").textContent = "This page loads nothing from the network.";
  drawJumps();
  startHelp();
  const figures = window.drawFigures;
  const plotly = figures || document.querySelector("table.bars") ? await loadPlotly() : null;
  const draw = (/** @type {{theme?: Theme, width?: number}} */ { theme, width } = {}) =>
    figures?.(theme ?? shownTheme(), width);
  startTheme(() => draw());
  startPrinting(draw);
  window.addEventListener("resize", () => draw());
  await draw();
  offerToSave(plotly);
  if (plotly) await showAskedPicture(plotly);
  document.documentElement.dataset.drawn = "";
});
