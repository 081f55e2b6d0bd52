/** What of a run is in view when its page opens, and what is in view in words. */
import { formatBytes, formatCount } from "../common/format.js";
import { instantsOf, placeOf } from "./view.js";
/** @import { Run, RunStep } from "../data/run.js" */
/** @import { Live } from "../data/stream.js" */
/** @import { View } from "../figures/figures.js" */

/** @typedef {{step: RunStep, first: number, last: number}} Opening positions between which a step is shown */

/**
 * Where the stretch begins that ends a step and has neither forward nor backward: its update, and what comes after it.
 * @param {Run} run
 * @param {RunStep} step
 */
function updateStart(run, step) {
  let start = step.last;
  for (const [first, phase] of run.phase_runs) {
    if (first >= step.last) break;
    if (phase === "forward" || phase === "backward") start = step.last;
    else if (start === step.last) start = Math.max(first, step.first);
  }
  return start;
}

/**
 * The step that a run opens on: the last that finished, or that in which memory ran out. It is shown without its update
 * where that has more events than all before it, as with an optimizer that loops over the parameters, and the peak is
 * before it.
 * @param {Run} run
 * @returns {Opening|null} null where there is no step
 */
export function openingOf(run) {
  const step = (run.failure ? null : run.steps.findLast((each) => each.finished)) ?? run.steps.at(-1);
  if (!step) return null;
  const update = updateStart(run, step);
  const long = step.last - update > update - step.first;
  return { step, first: step.first, last: long && step.peak <= update ? update : step.last };
}

/**
 * What is in view, and where the run's peak is if it is not.
 * @param {Run} run
 * @param {Live} live
 * @param {View} view
 * @param {boolean} byTime
 */
export function viewInWords(run, live, view, byTime) {
  return [stretchInWords(run, live, view, byTime), peakElsewhere(run, live, view, byTime)].filter(Boolean).join(" ");
}

/**
 * @param {Run} run
 * @param {Live} live
 * @param {View} view
 * @param {boolean} byTime
 */
function peakElsewhere({ peak, steps }, live, view, byTime) {
  /** @param {number} position */
  const inView = (position) => {
    const place = placeOf(live, live.indexOf(position), byTime);
    return place >= view.low && place <= view.high;
  };
  if (!peak || inView(peak.position)) return "";
  const size = peak.said;
  const equal = steps.some((step) => step.peak_bytes === peak.bytes && inView(step.peak));
  if (equal) return `The run's peak, ${size}, was first reached in step ${peak.step}.`;
  return `The run's peak, ${size} in step ${peak.step}, is not in view.`;
}

/**
 * @param {Run} run
 * @param {Live} live
 * @param {View} view
 * @param {boolean} byTime
 */
function stretchInWords(run, live, view, byTime) {
  const near = (view.high - view.low) * 1e-6;
  /**
   * Many positions may have one time.
   * @param {number} first
   * @param {number} last
   */
  const shows = (first, last) =>
    Math.abs(placeOf(live, live.indexOf(first), byTime) - view.low) <= near &&
    Math.abs(placeOf(live, live.indexOf(last), byTime) - view.high) <= near;
  if (shows(0, run.stream?.events ?? 0)) return "The whole run.";
  const opening = openingOf(run);
  const ended = run.steps.length > 1 ? run.steps.findLast((each) => each.finished) : null;
  /** @param {RunStep} step */
  const named = (step) => `Step ${step.index}${step === ended ? ", the last" : ""}`;
  const step = run.steps.find((each) => shows(each.first, each.last));
  if (step) return `${named(step)}.`;
  if (opening && shows(opening.first, opening.last)) {
    const left = formatCount(opening.step.last - opening.last);
    return `${named(opening.step)}, without its update, which has ${left} more events.`;
  }
  const { first, last } = instantsOf(live, view, byTime);
  return `Events ${formatCount(live.position(first))} to ${formatCount(live.position(last))}.`;
}

/**
 * The peak of `step`, else of the run: its instant, bytes and name, and what a reading of it is called.
 * @param {Run} run
 * @param {Live} live
 * @param {RunStep|null} step
 */
export function peakOf(run, live, step) {
  if (step) {
    const label = labelOf(`step ${step.index} peak`, step, step.peak_bytes);
    const title = `At the peak of step ${step.index}`;
    return { index: live.indexOf(step.peak), bytes: step.peak_bytes, label, title };
  }
  const { peak } = run;
  if (!peak) return null;
  const label = labelOf("peak", peak, peak.bytes);
  return { index: live.indexOf(peak.position), bytes: peak.bytes, label, title: "At the peak" };
}

/**
 * What stands at a peak: its size, or what of it was requested, where the curves do not reach the peak itself.
 * @param {string} name
 * @param {{said: string, rounded: boolean}} peak
 * @param {number} requested
 */
function labelOf(name, { said, rounded }, requested) {
  return rounded ? `${name} ${said}, ${formatBytes(requested)} of it requested` : `${name} ${said}`;
}
