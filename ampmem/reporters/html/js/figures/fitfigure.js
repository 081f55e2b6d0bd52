/** The curves of a fit as a plotly figure. Pure: everything it needs comes in. */
import { formatCount, plotlyText } from "../common/format.js";
import { INKS } from "../common/theme.js";
import { chartLayout, faintLine, fittingMarks, isNear, isRoomy, lineAcross, textAcross } from "./layout.js";
/** @import { FitResult, FitView } from "../common/page.js" */
/** @import { Theme } from "../common/theme.js" */
/** @import { Figure } from "./figures.js" */

/** Beside the first and the last value, and above and below all that is drawn, this part of the picture is free. */
const MARGIN = 0.06;
const BEYOND = 1.5;
/** Curves that are as near as this part of the picture's height look like one. */
const NEAR = 1 / 120;
/** By how many curves lie under one: under dashes and smaller marks they are still seen. */
const OVER = [
  { dash: "solid", size: 10 },
  { dash: "8px,8px", size: 7 },
  { dash: "3px,9px", size: 4 },
];
/** Crosses of several precisions are one above the other, by this part of what the line below them stands for. */
const ROW = 0.04;

/**
 * The runs of one precision: the peaks of those that fit or may fit, by value, and the values of those that do not.
 * @param {FitResult["arms"][number]} run
 */
function runsOf({ arm: precision, points }) {
  const fitting = points.filter((point) => point.may_fit);
  return {
    precision,
    values: fitting.map((point) => point.value),
    reserved: fitting.map((point) => point.reserved_bytes ?? 0),
    allocated: fitting.map((point) => point.allocated_bytes ?? 0),
    surely: fitting.map((point) => point.fits),
    failing: points.filter((point) => !point.may_fit).map((point) => point.value),
  };
}

/**
 * The page's data with the runs of each curve.
 * @param {FitView} view
 */
export function drawnFrom(view) {
  return { ...view, curves: view.curves.map((curve, i) => ({ ...curve, ...runsOf(view.fit.arms[i]) })) };
}

/** @typedef {ReturnType<typeof drawnFrom>} Drawn */
/** @typedef {Drawn["curves"][number]} Curve */

/** @param {Drawn} data */
function largest(data) {
  return Math.max(1, ...data.curves.flatMap((curve) => curve.reserved));
}

/** @param {Drawn} data */
function smallest(data) {
  return Math.min(...data.curves.flatMap((curve) => [...curve.reserved, ...curve.allocated]), data.capacity ?? Infinity);
}

/**
 * Whether the line of the capacity is in the picture.
 * @param {Drawn} data
 * @returns {data is Drawn & {capacity: number}}
 */
export function capacityShown(data) {
  return isNear(data.capacity, largest(data));
}

/**
 * The height of the line through the points of `curve`; null beside them.
 * @param {Curve} curve
 * @param {number} value
 */
function heightAt({ values, reserved }, value) {
  const after = values.findIndex((each) => each >= value);
  if (after < 0) return null;
  if (values[after] === value) return reserved[after];
  if (after === 0) return null;
  const part = (value - values[after - 1]) / (values[after] - values[after - 1]);
  return reserved[after - 1] + part * (reserved[after] - reserved[after - 1]);
}

/**
 * How many of the curves before `curve` most of its points lie on.
 * @param {Curve} curve
 * @param {Curve[]} curves
 * @param {number} near in bytes
 */
export function countUnder(curve, curves, near) {
  const before = curves.slice(0, curves.indexOf(curve));
  return before.filter((other) => {
    const on = curve.values.filter((value, i) => {
      const height = heightAt(other, value);
      return height !== null && Math.abs(height - curve.reserved[i]) <= near;
    });
    return on.length > curve.values.length / 2;
  }).length;
}

/**
 * @param {Curve} curve
 * @param {Theme} theme
 * @param {number} under how many curves it lies on
 */
function reservedOf(curve, theme, under) {
  const { dash, size } = OVER[Math.min(under, OVER.length - 1)];
  return {
    type: "scatter",
    mode: "lines+markers",
    name: plotlyText(curve.label),
    legendgroup: curve.precision,
    x: curve.values,
    y: curve.reserved,
    line: { color: curve[theme], width: 2.5, dash },
    marker: fittingMarks(curve.symbol, curve.surely, size, { color: curve[theme], back: INKS[theme].back }),
    text: curve.texts.map((lines) => lines.map((line) => plotlyText(line)).join("<br>")),
    hoverinfo: "text",
  };
}

/**
 * @param {Curve} curve
 * @param {Theme} theme
 */
function allocatedOf(curve, theme) {
  const { precision, values, allocated } = curve;
  const color = curve[theme];
  return faintLine({ name: plotlyText(`${precision} allocated`), legendgroup: precision, x: values, y: allocated, color });
}

/**
 * @param {Curve} curve
 * @param {string} argument
 * @param {Theme} theme
 * @param {number} height
 */
function failingOf(curve, argument, theme, height) {
  return {
    type: "scatter",
    mode: "markers",
    name: plotlyText(`${curve.precision} does not fit`),
    legendgroup: curve.precision,
    showlegend: false,
    x: curve.failing,
    y: curve.failing.map(() => height),
    marker: { symbol: "x", size: 9, color: curve[theme], line: { width: 1, color: INKS[theme].back } },
    text: curve.failing.map((value) => plotlyText(`${curve.precision}, ${argument} ${formatCount(value)}: does not fit`)),
    hoverinfo: "text",
  };
}

/**
 * @param {Drawn} data
 * @param {Theme} theme
 * @param {number} bytes from the foot to the top of the picture
 * @param {number} height
 */
function capacityOf(data, theme, bytes, height) {
  if (!capacityShown(data)) return { shapes: [], annotations: [] };
  /** @type {object[]} */
  const shapes = [lineAcross(data.capacity, theme)];
  const annotations = [textAcross(data.capacity, data.capacity_text, theme)];
  if (data.may !== null && data.may > data.capacity) {
    const high = Math.min(data.may, topOf(data));
    const zone = { ...lineAcross(data.capacity, theme), type: "rect", y1: high, line: { width: 0 }, layer: "below" };
    shapes.push({ ...zone, fillcolor: INKS[theme].quiet, opacity: 0.12 });
    if (data.may === high) {
      shapes.push(lineAcross(high, theme));
      annotations.push(textAcross(high, data.may_text, theme, "bottom"));
    }
    if (isRoomy(high - data.capacity, bytes, height)) annotations.push(textAcross(data.capacity, "shaded: may fit", theme, "bottom"));
  }
  return { shapes, annotations };
}

/**
 * The highest of the curves and the lines that are in the picture, in bytes.
 * @param {Drawn} data
 */
function topOf(data) {
  const most = largest(data);
  if (!capacityShown(data)) return most;
  const high = Math.max(most, data.capacity);
  return data.may !== null && isNear(data.may, most) ? Math.max(high, data.may) : high;
}

/**
 * A band from the last value at which a precision costs to the first at which it saves; one label for equal bands.
 * @param {Drawn} data
 * @param {Theme} theme
 */
function crossingsOf(data, theme) {
  const ink = INKS[theme];
  /** @type {Map<string, {from: number, to: number, precisions: string[]}>} */
  const bands = new Map();
  for (const { arm: precision, verdict, costs_at: from, saves_at: to } of data.fit.break_even) {
    if (verdict !== "crosses" || from === null || to === null) continue;
    const band = bands.get(`${from} ${to}`) ?? { from, to, precisions: [] };
    band.precisions.push(precision);
    bands.set(`${from} ${to}`, band);
  }
  const shown = [...bands.values()];
  return {
    shapes: shown.map(({ from, to }) => ({
      type: "rect",
      yref: "paper",
      x0: from,
      x1: to,
      y0: 0,
      y1: 1,
      fillcolor: ink.quiet,
      opacity: 0.25,
      line: { width: 1, color: ink.quiet },
    })),
    annotations: shown.map(({ to, precisions }, i) => ({
      yref: "paper",
      x: to,
      y: 0.03 + 0.08 * i,
      xanchor: "left",
      yanchor: "bottom",
      showarrow: false,
      text: plotlyText(`${precisions.join(", ")}: less allocated than fp32 from ${formatCount(to)}`),
      font: { size: 12, color: ink.ink },
    })),
  };
}

/**
 * @param {FitView} view
 * @param {Theme} theme
 * @param {number} width
 * @param {number} height
 * @returns {Figure}
 */
export function fitFigure(view, theme, width, height) {
  const data = drawnFrom(view);
  const { argument } = data.fit.vary;
  const line = topOf(data);
  const floor = smallest(data);
  const span = line - floor || line;
  // Crosses stand above all that is drawn, one row for each precision.
  const most = line + span * (MARGIN + ROW * (data.curves.length + 1));
  const least = Math.max(0, floor - span * MARGIN);
  const capacity = capacityOf(data, theme, most - least, height);
  const crossings = crossingsOf(data, theme);
  const reached = Math.max(...data.curves.flatMap((curve) => curve.values));
  // What does not fit may be far to the right of all that does.
  const failing = data.curves.map((curve) => ({
    ...curve,
    failing: curve.failing.filter((value) => value <= BEYOND * reached),
  }));
  const values = failing.flatMap((curve) => [...curve.values, ...curve.failing]);
  const [first, last] = [Math.min(...values), Math.max(...values)];
  const free = (last - first || 1) * MARGIN;
  const x = { title: argument, whole: true, range: [first - free, last + free] };
  return {
    data: [
      ...data.curves.map((curve) => allocatedOf(curve, theme)),
      ...data.curves.map((curve) => reservedOf(curve, theme, countUnder(curve, data.curves, (most - least) * NEAR))),
      ...failing.map((curve, i) => failingOf(curve, argument, theme, line + span * (MARGIN + ROW * i))),
    ],
    layout: {
      ...chartLayout(theme, { width, height }, x, [least, most]),
      // Equal runs are all told at once.
      hovermode: "x unified",
      shapes: [...capacity.shapes, ...crossings.shapes],
      annotations: [...capacity.annotations, ...crossings.annotations],
    },
  };
}
