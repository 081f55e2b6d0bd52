/** What the charts of pages with one chart have in common. */
import { plotlyText } from "../common/format.js";
import { INKS } from "../common/theme.js";
import { byteTicks } from "./ticks.js";
/** @import { Theme } from "../common/theme.js" */

/** From far above all that is drawn, the line of a limit would press the rest flat. */
const FAR = 2;
/** From this width down, a legend has a line for each of its entries, and names beside marks have no room. */
export const NARROW_CHART = 560;
export const MARGINS = { l: 72, r: 16, t: 24, b: 48 };
/** The most ticks that plotly puts on an axis by itself. */
const MOST_TICKS = 10;
/** The least height of a zone with a text in it, in pixels. */
const TEXT_HEIGHT = 20;

/**
 * Whether the line of a limit is in a picture that reaches up to `most`.
 * @param {number|null} limit
 * @param {number} most
 */
export function isNear(limit, most) {
  return limit !== null && limit <= FAR * most;
}

/**
 * Whether a text fits into a zone of so many of the picture's bytes.
 * @param {number} bytes
 * @param {number} all the picture's bytes
 * @param {number} height of the picture
 */
export function isRoomy(bytes, all, height) {
  return (bytes / all) * (height - MARGINS.t - MARGINS.b) >= TEXT_HEIGHT;
}

/**
 * The layout of a chart of bytes.
 * @param {Theme} theme
 * @param {{width: number, height: number}} size
 * @param {{title: string, range: number[], whole?: boolean}} x with ticks at `whole` numbers only
 * @param {number[]} range of the bytes
 */
export function chartLayout(theme, { width, height }, x, [least, most]) {
  const ink = INKS[theme];
  const axis = { gridcolor: ink.grid, zeroline: false, linecolor: ink.grid, tickfont: { size: 12, color: ink.quiet } };
  const ticks = byteTicks(most, 6, least);
  return {
    width,
    height,
    margin: MARGINS,
    dragmode: false,
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "inherit", size: 12, color: ink.quiet },
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { color: ink.ink } },
    hoverlabel: { bgcolor: ink.note, bordercolor: ink.quiet, font: { color: ink.ink } },
    xaxis: {
      ...axis,
      range: x.range,
      ...(x.whole && x.range[1] - x.range[0] < MOST_TICKS ? { dtick: 1 } : {}),
      showspikes: false,
      fixedrange: true,
      title: { text: plotlyText(x.title), font: { size: 12 }, standoff: 8 },
    },
    yaxis: { ...axis, range: [least, most], fixedrange: true, tickvals: ticks.values, ticktext: ticks.labels },
  };
}

/**
 * A dashed line across the picture.
 * @param {number} y
 * @param {Theme} theme
 */
export function lineAcross(y, theme) {
  return { type: "line", xref: "paper", x0: 0, x1: 1, y0: y, y1: y, line: { color: INKS[theme].ink, width: 1.5, dash: "dash" } };
}

/**
 * A text at a line across the picture.
 * @param {number} y
 * @param {string} text
 * @param {Theme} theme
 * @param {"top"|"bottom"} yanchor
 * @param {"left"|"right"} xanchor
 */
export function textAcross(y, text, theme, yanchor = "top", xanchor = "left") {
  const font = { size: 12, color: INKS[theme].ink };
  return { xref: "paper", x: xanchor === "left" ? 0 : 1, y, xanchor, yanchor, showarrow: false, text: plotlyText(text), font };
}

/**
 * The faint line of the peak allocated under another line, `of` its name and group.
 * @param {{name: string, legendgroup: string, x: number[], y: number[], color: string}} of
 */
export function faintLine({ color, ...of }) {
  const line = { color, width: 1.2, dash: "dot" };
  return { type: "scatter", mode: "lines", ...of, showlegend: false, opacity: 0.55, line, hoverinfo: "skip" };
}

/**
 * Marks that are filled where a run surely fits, and open and larger where not.
 * @param {string} symbol
 * @param {boolean[]} filled
 * @param {number} size
 * @param {{color: string, back: string}} colors
 */
export function fittingMarks(symbol, filled, size, { color, back }) {
  return {
    symbol: filled.map((each) => (each ? symbol : `${symbol}-open`)),
    size: filled.map((each) => (each ? size : size + 2)),
    color,
    opacity: 1,
    line: { width: filled.map((each) => (each ? 1 : 2)), color: back },
  };
}
