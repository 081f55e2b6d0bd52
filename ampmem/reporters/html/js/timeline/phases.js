/** The phases of a run, and the strip of them above the timeline. */
import { fill, svgElement } from "../common/dom.js";
import { formatCount, formatDuration } from "../common/format.js";
import { MARGIN } from "./figure.js";
import { placeOf } from "./view.js";
/** @import { Run } from "../data/run.js" */
/** @import { Live } from "../data/stream.js" */
/** @import { View } from "../figures/figures.js" */

const NARROWEST = 1;
const LETTERS = new Map([
  ["data", "D"],
  ["forward", "F"],
  ["backward", "B"],
  ["optimizer", "O"],
  ["evaluation", "E"],
]);

/**
 * Step and phase of the event that led to `position`.
 * @param {Run} run
 * @param {number} position
 */
function placeInRun(run, position) {
  const event = position - 1;
  const phases = run.phase_runs;
  const step = run.steps.find((each) => each.first < position && position <= each.last) ?? null;
  if (event < 0 || !phases.length || phases[0][0] > event) return { step, phase: "" };
  let low = 0;
  let high = phases.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >>> 1;
    if (phases[middle][0] <= event) low = middle;
    else high = middle - 1;
  }
  return { step, phase: phases[low][1] };
}

/**
 * `event 2,307 · step 2 · backward · 36.3 ms`, without the time where times only order the events.
 * @param {Run} run
 * @param {Live} live
 * @param {number} index
 */
export function describedInstant(run, live, index) {
  const position = live.position(index);
  const { step, phase } = placeInRun(run, position);
  const time = run.timed ? formatDuration(live.times[index]) : "";
  return [`event ${formatCount(position)}`, step ? `step ${step.index}` : "", phase, time].filter(Boolean).join(" · ");
}

/**
 * Stretches of `runs` that are wide enough to see in `view`, in pixels; what is narrower joins its neighbour.
 * @param {Array<[number, string]>} runs first position and name, ascending
 * @param {number} end
 * @param {(position: number) => number} place horizontal place of a position
 * @param {View} view
 * @param {number} width
 * @returns {Array<{name: string, left: number, right: number}>}
 */
export function phaseBoxes(runs, end, place, view, width) {
  const scale = width / (view.high - view.low);
  /** @type {Array<{name: string, left: number, right: number}>} */
  const boxes = [];
  for (let i = 0; i < runs.length; i += 1) {
    const left = Math.max(0, (place(runs[i][0]) - view.low) * scale);
    const right = Math.min(width, (place(i + 1 < runs.length ? runs[i + 1][0] : end) - view.low) * scale);
    const before = boxes[boxes.length - 1];
    if (right <= left) continue;
    if (right - left < NARROWEST && before) before.right = right;
    else boxes.push({ name: runs[i][1], left: before ? Math.max(left, before.right) : left, right });
  }
  return boxes;
}

/**
 * The name of a phase as far as there is room; one letter stands for the phases of a step only, which differ in it.
 * @param {string} name
 * @param {number} width
 */
export function labelFor(name, width) {
  if (width > 7 * name.length + 8) return name;
  return width > 14 ? (LETTERS.get(name) ?? "") : "";
}

/**
 * Draws the strip over the plot, whose width it shares.
 * @param {Element} svg
 * @param {Run} run
 * @param {Live} live
 * @param {View} view
 * @param {boolean} byTime
 * @param {number} width
 */
export function drawPhases(svg, run, live, view, byTime, width) {
  const inner = Math.max(1, width - MARGIN.left - MARGIN.right);
  const place = (/** @type {number} */ position) => placeOf(live, live.indexOf(position), byTime);
  const boxes = phaseBoxes(run.phase_runs, run.stream?.events ?? 0, place, view, inner);
  svg.setAttribute("width", String(width));
  const parts = boxes.flatMap(({ name, left, right }) => {
    const rect = svgElement("rect", {
      x: MARGIN.left + left,
      y: 0,
      width: Math.max(0.5, right - left - 0.75),
      height: 22,
      class: `phase phase-${name}`,
    });
    rect.append(svgElement("title", {}, name));
    const label = labelFor(name, right - left);
    return label
      ? [rect, svgElement("text", { x: MARGIN.left + (left + right) / 2, y: 15, class: `phase-${name}` }, label)]
      : [rect];
  });
  fill(svg, ...parts);
}
