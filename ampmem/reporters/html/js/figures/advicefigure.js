/** Runs with changes as a plotly figure: memory over its price. Pure: everything it needs comes in. */
import { plotlyText } from "../common/format.js";
import { INKS } from "../common/theme.js";
import { cutInMiddle } from "./labels.js";
import { MARGINS, NARROW_CHART, chartLayout, faintLine, fittingMarks, isNear, lineAcross, textAcross } from "./layout.js";
/** @import { AdviceSeries, AdviceView } from "../common/page.js" */
/** @import { Theme } from "../common/theme.js" */
/** @import { Figure } from "./figures.js" */

/** Beside, above and below all that is drawn, this part of the picture is free. */
const FREE = 0.06;
/** Of a name beside a mark, in pixels: half of its line, half of the mark, how far it is from it, a character's width. */
const HALF = 8;
const MARK = 11;
const BESIDE_MARK = 18;
const LETTER = 6.5;
const LONGEST = 80;

/** @param {AdviceView} data */
function pointsOf(data) {
  return data.series.flatMap((each) => each.points);
}

/** @param {AdviceView} data */
function mostOf(data) {
  return Math.max(1, ...pointsOf(data).map((point) => point.most));
}

/**
 * Whether the line of the limit is in the picture.
 * @param {AdviceView} data
 * @returns {data is AdviceView & {limit: number}}
 */
export function adviceLimitShown(data) {
  return isNear(data.limit, mostOf(data));
}

/**
 * @param {AdviceSeries} series
 * @param {Theme} theme
 */
function runsOf(series, theme) {
  const { points, symbol } = series;
  return {
    type: "scatter",
    mode: series.joined ? "lines+markers" : "markers",
    name: plotlyText(series.name),
    legendgroup: series.name,
    x: points.map((point) => point.cost),
    y: points.map((point) => point.most),
    line: { color: series[theme], width: 2.5 },
    marker: fittingMarks(symbol, points.map((point) => point.meets), 10, { color: series[theme], back: INKS[theme].back }),
    text: points.map((point) => point.text.map((line) => plotlyText(line)).join("<br>")),
    hoverinfo: "text",
  };
}

/**
 * @param {AdviceSeries} series
 * @param {Theme} theme
 */
function allocatedUnder(series, theme) {
  const { name, points } = series;
  const [x, y] = [points.map((point) => point.cost), points.map((point) => point.allocated)];
  return faintLine({ name: plotlyText(`${name}: peak allocated`), legendgroup: name, x, y, color: series[theme] });
}

/**
 * A ring around each run that no other beats.
 * @param {AdviceView} data
 * @param {Theme} theme
 */
function ringsOf(data, theme) {
  const points = pointsOf(data).filter((point) => point.unbeaten);
  return {
    type: "scatter",
    mode: "markers",
    name: "no other run beats these",
    x: points.map((point) => point.cost),
    y: points.map((point) => point.most),
    marker: { symbol: "circle-open", size: 20, color: INKS[theme].ink, line: { width: 1.5 } },
    hoverinfo: "skip",
  };
}

/**
 * The names of the runs that no other beats, beside their marks, as near as they are over no other name or mark.
 * @param {AdviceView} data
 * @param {Theme} theme
 * @param {{x: (cost: number) => number, y: (bytes: number) => number, right: number, foot: number}} place in pixels
 */
function namesOf(data, theme, { x, y, right, foot }) {
  const { ink } = INKS[theme];
  const longest = Math.min(LONGEST, Math.floor(right / 2 / LETTER));
  const points = pointsOf(data);
  const taken = points.map(({ cost, most }) => ({ left: x(cost) - MARK, end: x(cost) + MARK, line: y(most), half: MARK }));
  if (adviceLimitShown(data)) taken.push({ left: 0, end: right, line: y(data.limit), half: 1 });
  const named = points.filter((point) => point.unbeaten).sort((one, two) => two.most - one.most);
  return named.map(({ cost, most, text: [name] }) => {
    const text = cutInMiddle(name, longest);
    const long = BESIDE_MARK + LETTER * text.length;
    const leftwards = x(cost) + long > right;
    const left = leftwards ? x(cost) - long : x(cost) + MARK;
    const end = left + long - MARK;
    const across = taken.filter((each) => each.left < end && left < each.end);
    const isFree = (/** @type {number} */ line) =>
      line > HALF && line < foot - HALF && across.every((each) => Math.abs(each.line - line) >= HALF + each.half);
    const line = Array.from({ length: foot }, (_, i) => y(most) + (i % 2 ? i + 1 : -i)).find(isFree) ?? y(most);
    taken.push({ left, end, line, half: HALF });
    const beside = leftwards ? { xanchor: "right", ax: -BESIDE_MARK } : { xanchor: "left", ax: BESIDE_MARK };
    const leader = { arrowhead: 0, arrowwidth: 1, arrowcolor: ink, standoff: 10 };
    const font = { size: 11, color: ink };
    return { x: cost, y: most, text: plotlyText(text), ...beside, ay: line - y(most), ...leader, font };
  });
}

/**
 * @param {AdviceView} data
 * @param {Theme} theme
 * @param {number} width
 * @param {number} height
 * @returns {Figure}
 */
export function adviceFigure(data, theme, width, height) {
  const points = pointsOf(data);
  const joined = data.series.filter((series) => series.joined && series.points.length > 1);
  const limit = adviceLimitShown(data) ? [data.limit] : [];
  const high = Math.max(mostOf(data), ...limit);
  const low = Math.min(
    ...points.map((point) => point.most),
    ...joined.flatMap((series) => series.points.map((point) => point.allocated)),
    ...limit,
  );
  const free = (high - low || high) * FREE;
  const [least, most] = [Math.max(0, low - free), high + 2 * free];
  const costs = points.map((point) => point.cost);
  const first = Math.min(...costs);
  // Equal costs, above all of 0, are at the left end of an axis that begins with them.
  const last = Math.max(...costs) > first ? Math.max(...costs) : first + 1;
  const beside = (last - first) * FREE;
  const shown = adviceLimitShown(data);
  const [right, foot] = [width - MARGINS.l - MARGINS.r, height - MARGINS.t - MARGINS.b];
  const names = width < NARROW_CHART ? [] : namesOf(data, theme, {
    x: (cost) => (right * (cost - first + beside)) / (last - first + 2 * beside),
    y: (bytes) => (foot * (most - bytes)) / (most - least),
    right,
    foot,
  });
  return {
    data: [
      ...joined.map((series) => allocatedUnder(series, theme)),
      ...data.series.map((series) => runsOf(series, theme)),
      ringsOf(data, theme),
    ],
    layout: {
      ...chartLayout(theme, { width, height }, { title: data.axis, range: [first - beside, last + beside] }, [least, most]),
      hovermode: "closest",
      shapes: shown ? [lineAcross(data.limit, theme)] : [],
      annotations: [...(shown ? [textAcross(data.limit, data.limit_text, theme, "top", "right")] : []), ...names],
    },
  };
}
