/** What the charts of pages with one chart have in common. */
import { INKS } from "../common/theme.js";
/** @import { Theme } from "../common/theme.js" */

/**
 * The layout around the plot, and what both axes have.
 * @param {Theme} theme
 * @param {number} width
 * @param {number} height
 */
export function chartLayout(theme, width, height) {
  const ink = INKS[theme];
  const axis = { gridcolor: ink.grid, zeroline: false, linecolor: ink.grid, tickfont: { size: 12, color: ink.quiet } };
  const around = {
    width,
    height,
    dragmode: false,
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "inherit", size: 12, color: ink.quiet },
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { color: ink.ink } },
    hoverlabel: { bgcolor: ink.note, bordercolor: ink.quiet, font: { color: ink.ink } },
  };
  return { axis, around };
}
