/** A watched run as a plotly figure: lines over its steps, bands of categories. Pure: everything it needs comes in. */
import { plotlyText } from "../common/format.js";
import { INKS } from "../common/theme.js";
import { NARROW_CHART, chartLayout, isNear, lineAcross, textAcross } from "./layout.js";
/** @import { CategoryView, FullView, WatchedLine, WatchedView } from "../common/page.js" */
/** @import { Theme } from "../common/theme.js" */
/** @import { Figure } from "./figures.js" */

const MARGIN = 0.03;
/** A band is at least this part of the picture wide: three of 20,000 steps are no pixel. */
const NARROWEST = 0.006;
const ENTRY = 19;
const LOOKS = [
  { width: 2, dash: "solid" },
  { width: 1.5, dash: "solid" },
  { width: 1.5, dash: "dot" },
];

/** @param {WatchedView} data */
function highest(data) {
  const lines = data.curves.flatMap((curve) => curve.bytes);
  const bands = data.full.map(({ categories }) => Object.values(categories).reduce((sum, size) => sum + size, 0));
  return [...lines, ...bands].reduce((most, size) => Math.max(most, size), 1);
}

/**
 * Whether the line of the device's memory is in the picture.
 * @param {WatchedView} data
 * @returns {data is WatchedView & {limit: number}}
 */
export function limitShown(data) {
  return isNear(data.limit, highest(data));
}

/**
 * @param {WatchedLine} curve
 * @param {number} i
 * @param {Theme} theme
 */
function lineOf(curve, i, theme) {
  const ink = INKS[theme];
  return {
    type: "scatter",
    mode: "lines",
    name: plotlyText(curve.name),
    x: curve.steps,
    y: curve.bytes,
    line: { color: i === 0 ? ink.ink : ink.quiet, ...LOOKS[i] },
    text: curve.texts.map((text) => plotlyText(text)),
    hoverinfo: "text",
  };
}

/**
 * A full recording as a band: the categories at its peak, one above the other.
 * @param {FullView} full
 * @param {CategoryView[]} categories
 * @param {Theme} theme
 * @param {number} span how many steps are in the picture
 */
function bandOf({ first, last, categories: sizes }, categories, theme, span) {
  const middle = (first + last) / 2;
  const half = Math.max((last - first + 1) / 2, (span * NARROWEST) / 2);
  let y1 = 0;
  return categories
    .filter(({ key }) => sizes[key])
    .map((category) => {
      const y0 = y1;
      y1 += sizes[category.key];
      const look = { fillcolor: category[theme], line: { width: 0 }, layer: "below" };
      return { type: "rect", x0: middle - half, x1: middle + half, y0, y1, ...look };
    });
}

/**
 * The categories of the bands, for the legend.
 * @param {WatchedView} data
 * @param {Theme} theme
 */
function legendOf({ full, categories }, theme) {
  return categories
    .filter(({ key }) => full.some((each) => each.categories[key]))
    .map((category) => ({
      type: "scatter",
      mode: "markers",
      name: plotlyText(category.label),
      x: [null],
      y: [null],
      marker: { symbol: "square", size: 12, color: category[theme] },
      hoverinfo: "skip",
    }));
}

/**
 * @param {WatchedView} data
 * @param {Theme} theme
 * @param {number} width
 * @param {number} height
 * @returns {Figure}
 */
export function watchedFigure(data, theme, width, height) {
  const ink = INKS[theme];
  const steps = data.curves[0].steps;
  const first = steps[0];
  const last = Math.max(steps[steps.length - 1], data.failed ?? 0);
  const span = last - first + 1;
  const most = (limitShown(data) ? Math.max(highest(data), data.limit) : highest(data)) * (1 + MARGIN);
  const traces = [...data.curves.map((curve, i) => lineOf(curve, i, theme)), ...legendOf(data, theme)];
  const size = { width, height: width < NARROW_CHART ? height + ENTRY * traces.length : height };
  const x = { title: "step", whole: true, range: [first - span * MARGIN, last + span * MARGIN] };
  const layout = chartLayout(theme, size, x, [0, most]);
  /** @type {object[]} */
  const shapes = data.full.flatMap((each) => bandOf(each, data.categories, theme, span));
  const annotations = [];
  const font = { size: 12, color: ink.ink };
  if (limitShown(data)) {
    shapes.push(lineAcross(data.limit, theme));
    annotations.push(textAcross(data.limit, data.limit_text, theme));
  }
  if (data.failed !== null) {
    const line = { color: ink.warn, width: 1.5 };
    shapes.push({ type: "line", yref: "paper", x0: data.failed, x1: data.failed, y0: 0, y1: 1, line });
    const text = plotlyText(`failed in step ${data.failed}`);
    annotations.push({ yref: "paper", x: data.failed, y: 1, xanchor: "right", yanchor: "bottom", showarrow: false, text, font });
  }
  return {
    data: traces,
    layout: {
      ...layout,
      hovermode: "x unified",
      dragmode: "zoom",
      xaxis: { ...layout.xaxis, fixedrange: false },
      shapes,
      annotations,
    },
  };
}
