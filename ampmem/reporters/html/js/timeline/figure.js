/** The timeline as a plotly figure. Pure: everything it needs comes in. */
import { plotlyText, formatBytes } from "../common/format.js";
import { INKS } from "../common/theme.js";
import { byteTicks, timeTicks } from "../figures/ticks.js";
/** @import { CategoryView } from "../common/page.js" */
/** @import { Theme } from "../common/theme.js" */
/** @import { Drawing, FailureMark, Figure, PeakMark, View } from "../figures/figures.js" */

export const MARGIN = { left: 66, right: 10, top: 10, bottom: 42 };
const MAX_STEP_LINES = 60;
const HEADROOM = 1.13;
/** Where the peak's label has two lines. */
const NARROW_HEADROOM = 1.28;
const BORDER_PAD = 3;

/**
 * Sums of the visible series at each drawn instant.
 * @param {Array<ArrayLike<number>>} series
 * @param {boolean[]} shown by series
 */
export function stackedTotals(series, shown) {
  const totals = new Float64Array(series[0].length);
  series.forEach((values, category) => {
    if (shown[category]) for (let i = 0; i < totals.length; i += 1) totals[i] += values[i];
  });
  return totals;
}

/**
 * @param {CategoryView} category
 * @param {Float64Array} x
 * @param {Float64Array} y
 * @param {Theme} theme
 */
function areaOf(category, x, y, theme) {
  const color = category[theme];
  const pattern = category.pattern
    ? {
        fillpattern: {
          shape: category.pattern,
          fgcolor: INKS[theme].outline,
          bgcolor: color,
          size: 6,
          solidity: 0.25,
          fgopacity: category.key === "cached" ? 0.35 : 0.7,
        },
      }
    : {};
  return {
    type: "scatter",
    mode: "lines",
    name: plotlyText(category.label),
    x,
    y,
    stackgroup: "live",
    line: { width: 0, shape: "hv", simplify: false },
    fillcolor: color,
    hoverinfo: "skip",
    ...pattern,
  };
}

/**
 * @param {Float64Array} x
 * @param {Float64Array} totals
 * @param {Theme} theme
 */
function outlineOf(x, totals, theme) {
  return {
    type: "scatter",
    mode: "lines",
    name: "live",
    x,
    y: totals,
    line: { width: 1.4, color: INKS[theme].outline, shape: "hv", simplify: false },
    hoverinfo: "skip",
  };
}

/**
 * @param {number[]} lines
 * @param {Theme} theme
 */
function stepLines(lines, theme) {
  if (lines.length > MAX_STEP_LINES) return [];
  return lines.map((x) => ({
    type: "line",
    xref: "x",
    yref: "paper",
    x0: x,
    x1: x,
    y0: 0,
    y1: 1,
    line: { color: INKS[theme].quiet, width: 1, dash: "dot" },
  }));
}

/** How much of the block that was asked for is shown beyond what there is, as a share of that. */
const MOST_BEYOND = 0.35;

/**
 * The bytes up to which the plot has to show the device and the block that failed; 0 where neither is known.
 * @param {FailureMark|null} failure
 */
function topOfFailure(failure) {
  if (failure === null || failure.available === null) return 0;
  return Math.min(failure.used + failure.segment, failure.available * (1 + MOST_BEYOND));
}

/**
 * A line where memory ran out, with its name at the foot, out of the peak's way; the device's size, and the block that
 * went beyond it.
 * @param {FailureMark|null} failure
 * @param {View} view
 * @param {Theme} theme
 * @returns {{shapes: Record<string, unknown>[], annotations: Record<string, unknown>[]}}
 */
function failureMarks(failure, view, theme) {
  if (failure === null) return { shapes: [], annotations: [] };
  const ink = INKS[theme];
  const { x, available, used, block } = failure;
  const size = available === null ? [] : [sizeMark(available, ink.warn)];
  if (x < view.low || x > view.high) return marksOf(size);
  const axes = { xref: "x", yref: "paper" };
  const right = x > (view.low + view.high) / 2;
  const label = {
    ...axes,
    x,
    y: 0.04,
    text: "out of memory",
    showarrow: false,
    xanchor: right ? "right" : "left",
    yanchor: "bottom",
    bgcolor: ink.note,
    bordercolor: ink.warn,
    borderpad: 3,
    font: { size: 12, weight: 700, color: ink.warn },
  };
  const line = { ...axes, type: "line", x0: x, x1: x, y0: 0, y1: 1, line: { color: ink.warn, width: 2 } };
  const marks = marksOf([...size, { shapes: [line], annotations: [] }]);
  if (available !== null) {
    const width = (view.high - view.low) * 0.02;
    const top = topOfFailure(failure);
    const [x0, x1] = right ? [x - width, x] : [x, x + width];
    marks.shapes.push({
      ...{ type: "rect", xref: "x", yref: "y", x0, x1, y0: used, y1: top },
      ...{ line: { color: ink.warn, width: 1.5 }, fillcolor: ink.warn, opacity: 0.35 },
    });
    marks.annotations.push({ ...label, y: 0.14, text: plotlyText(block) });
  }
  marks.annotations.push(label);
  return marks;
}

/**
 * @param {number} available
 * @param {string} color
 */
function sizeMark(available, color) {
  const at = { xref: "paper", yref: "y" };
  return {
    shapes: [{ ...at, type: "line", x0: 0, x1: 1, y0: available, y1: available, line: { color, width: 1.5, dash: "dash" } }],
    annotations: [
      {
        ...{ ...at, x: 0, y: available, text: `${formatBytes(available)} in total`, showarrow: false },
        ...{ xanchor: "left", yanchor: "bottom", font: { size: 12, color } },
      },
    ],
  };
}

/** @param {Array<{shapes: Record<string, unknown>[], annotations: Record<string, unknown>[]}>} marks */
function marksOf(marks) {
  return { shapes: marks.flatMap((each) => each.shapes), annotations: marks.flatMap((each) => each.annotations) };
}

/** How wide a character of the peak's label is at most in the mean, in pixels. */
const CHARACTER = 7.3;
const BESIDE = 66;
export const NARROW_WIDTH = 560;

/**
 * The label of the peak, in two lines where there is little room, and how far beside the peak its middle is, in pixels:
 * all of it is in the picture.
 * @param {PeakMark} peak
 * @param {View} view
 * @param {number} width
 */
function peakLabel(peak, view, width) {
  const text = plotlyText(peak.label);
  const lines = width < NARROW_WIDTH ? text.split(", ") : [text];
  const inner = width - MARGIN.left - MARGIN.right;
  const at = (inner * (peak.x - view.low)) / (view.high - view.low);
  const half = (CHARACTER * Math.max(...lines.map((line) => line.length))) / 2 + BORDER_PAD;
  const middle = Math.max(half, Math.min(inner - half, at > inner / 2 ? at - BESIDE : at + BESIDE));
  return { text: lines.join(",<br>"), ax: middle - at };
}

/**
 * @param {PeakMark|null} peak
 * @param {View} view
 * @param {number} width
 * @param {Theme} theme
 */
function peakMarks(peak, view, width, theme) {
  if (!peak || peak.x < view.low || peak.x > view.high) return { traces: [], annotations: [] };
  const ink = INKS[theme];
  const marker = { symbol: "diamond", size: 9, color: ink.outline, line: { width: 1, color: ink.back } };
  return {
    traces: [
      {
        type: "scatter",
        mode: "markers",
        name: "peak",
        x: [peak.x],
        y: [peak.bytes],
        marker,
        cliponaxis: false,
        hoverinfo: "skip",
      },
    ],
    annotations: [
      {
        x: peak.x,
        y: peak.bytes,
        ...peakLabel(peak, view, width),
        ay: -14,
        yanchor: "bottom",
        arrowcolor: ink.outline,
        arrowwidth: 1,
        arrowhead: 0,
        standoff: 5,
        bgcolor: ink.note,
        bordercolor: ink.quiet,
        borderpad: BORDER_PAD,
        font: { size: 12, weight: 700, color: ink.ink },
      },
    ],
  };
}

/**
 * @param {Drawing} drawing
 * @param {CategoryView[]} categories those of the series
 * @param {Theme} theme
 * @returns {Figure & {top: number}} and the bytes at the top of the plot
 */
export function timelineFigure(drawing, categories, theme) {
  const { x, series, shown, present, live, view, byTime, width, height } = drawing;
  const totals = stackedTotals(series, shown.slice(0, live));
  const stacked = stackedTotals(series, shown).reduce((highest, value) => Math.max(highest, value), 1);
  const most = Math.max(stacked, topOfFailure(drawing.failure));
  const nticks = Math.max(3, Math.round(width / 130));
  const times = timeTicks(view, nticks);
  const top = most * (width < NARROW_WIDTH ? NARROW_HEADROOM : HEADROOM);
  const ticks = byteTicks(top, height < 300 ? 4 : 6);
  const ink = INKS[theme];
  const areas = categories.flatMap((category, i) =>
    shown[i] && present[i] ? [areaOf(category, x, series[i], theme)] : [],
  );
  const marks = peakMarks(drawing.peak, view, width, theme);
  const failure = failureMarks(drawing.failure, view, theme);
  const axis = {
    showgrid: true,
    gridcolor: ink.grid,
    zeroline: false,
    tickfont: { size: 12, color: ink.quiet },
    linecolor: ink.grid,
  };
  return {
    top,
    data: [...areas, outlineOf(x, totals, theme), ...marks.traces],
    layout: {
      width,
      height,
      margin: { l: MARGIN.left, r: MARGIN.right, t: MARGIN.top, b: MARGIN.bottom },
      showlegend: false,
      hovermode: false,
      dragmode: drawing.draggable ? "zoom" : false,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "inherit", size: 12, color: ink.quiet },
      selectdirection: "h",
      xaxis: {
        ...axis,
        showgrid: false,
        range: [view.low, view.high],
        title: {
          text: byTime ? "time since the first event" : "allocator event",
          font: { size: 12 },
          standoff: 8,
        },
        tickformat: ",d",
        nticks,
        ...(byTime ? { tickvals: times.values, ticktext: times.labels } : {}),
      },
      yaxis: { ...axis, range: [0, top], fixedrange: true, tickvals: ticks.values, ticktext: ticks.labels },
      shapes: [...stepLines(drawing.steps, theme), ...failure.shapes],
      annotations: [...marks.annotations, ...failure.annotations],
    },
  };
}
