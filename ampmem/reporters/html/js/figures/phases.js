/** The strip of phases above the timeline. */
import { fill, svgElement } from "../common/dom.js";
import { placeOf } from "./view.js";
import { MARGIN } from "./timelinefigure.js";

const NARROWEST = 1;

/**
 * Stretches of `runs` that are wide enough to see in `view`, in pixels; what is narrower joins its neighbour.
 * @param {Array<[number, string]>} runs first position and name, ascending
 * @param {(position: number) => number} place horizontal place of a position
 */
export function phaseBoxes(runs, end, place, view, width) {
  const scale = width / (view.high - view.low);
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

function labelFor(name, width) {
  if (width > 7 * name.length + 8) return name;
  return width > 14 ? name[0].toUpperCase() : "";
}

/** Draws the strip over the plot, whose width it shares. */
export function drawPhases(svg, run, live, view, byTime, width) {
  const inner = Math.max(1, width - MARGIN.left - MARGIN.right);
  const place = (position) => placeOf(live, live.indexOf(position), byTime);
  const boxes = phaseBoxes(run.phase_runs, run.stream.events, place, view, inner);
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
