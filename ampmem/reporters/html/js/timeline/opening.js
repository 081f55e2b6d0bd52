/** What of a run is in view when its page opens, and what is in view in words. */
import { formatBytes, formatCount } from "../common/format.js";
/** @import { RunView, StepView } from "../common/page.js" */
/** @import { Live } from "../data/stream.js" */

/** @typedef {{step: StepView, first: number, last: number}} Opening positions between which a step is shown */

/**
 * Where the stretch begins that ends a step and has neither forward nor backward: its update, and what comes after it.
 * @param {RunView} run
 * @param {StepView} step
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
 * @param {RunView} run
 * @returns {Opening|null} null where there is no step
 */
export function openingOf(run) {
  const step = (run.out_of_memory ? null : run.steps.findLast((each) => each.finished)) ?? run.steps.at(-1);
  if (!step) return null;
  const update = updateStart(run, step);
  const long = step.last - update > update - step.first;
  return { step, first: step.first, last: long && step.peak <= update ? update : step.last };
}

/**
 * What is in view, and where the run's peak is if it is not.
 * @param {RunView} run
 * @param {number} first position of the first instant in view
 * @param {number} last position of the last one
 */
export function viewInWords(run, first, last) {
  return [stretchInWords(run, first, last), peakElsewhere(run, first, last)].filter(Boolean).join(" ");
}

/**
 * @param {RunView} run
 * @param {number} first
 * @param {number} last
 */
function peakElsewhere({ peak, steps }, first, last) {
  if (!peak || (peak.position >= first && peak.position <= last)) return "";
  const equal = steps.some((step) => step.peak >= first && step.peak <= last && step.peak_bytes === peak.bytes);
  const size = formatBytes(peak.bytes);
  if (equal) return `The run's peak, ${size}, was reached in step ${peak.step} first.`;
  return `The run's peak, ${size} in step ${peak.step}, is not in view.`;
}

/**
 * @param {RunView} run
 * @param {number} first
 * @param {number} last
 */
function stretchInWords(run, first, last) {
  if (first === 0 && last === run.stream.events) return "The whole run.";
  const step = run.steps.find((each) => each.first === first && each.last >= last);
  const ended = step && step === run.steps.findLast((each) => each.finished) && run.steps.length > 1 ? ", the last" : "";
  if (step?.last === last) return `Step ${step.index}${ended}.`;
  const opening = openingOf(run);
  if (step && opening?.step === step && opening.last === last) {
    return `Step ${step.index}${ended}, without its update, which has ${formatCount(step.last - last)} more events.`;
  }
  return `Events ${formatCount(first)} to ${formatCount(last)}.`;
}

/**
 * The peak of `step`, else of the run: its instant, bytes and name, and what a reading of it is called.
 * @param {RunView} run
 * @param {Live} live
 * @param {StepView|null} step
 */
export function peakOf(run, live, step) {
  if (step) {
    const label = `step ${step.index} peak`;
    const title = `At the peak of step ${step.index}`;
    return { index: live.indexOf(step.peak), bytes: step.peak_bytes, label, title };
  }
  const { peak } = run;
  return peak ? { index: live.indexOf(peak.position), bytes: peak.bytes, label: "peak", title: "At the peak" } : null;
}
