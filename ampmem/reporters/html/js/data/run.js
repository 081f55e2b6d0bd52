/** A run of the page as its sections take it: the summary, what is said of it, and its events joined to its steps. */
import { MAX_SENTENCE, cleaned } from "../common/format.js";
import { bytesOfBase64, inflated } from "./decode.js";
/** @import { PageView, RunView, RunWords, Said, SegmentView, ShownAtView, StaticComponent, StepWords } from "../common/page.js" */
/** @import { CategoryView, Step, StreamView, Summary } from "../common/page.js" */

/**
 * One step: the positions of its start, end and peak. `peak_bytes` is what was requested at its peak, as the timeline
 * draws it; `said` is the peak in words, with the rounding of blocks where it is `rounded`.
 * @typedef {object} RunStep
 * @property {number} index
 * @property {boolean} finished
 * @property {number} first
 * @property {number} last
 * @property {number} peak
 * @property {number} peak_bytes
 * @property {number|null} peak_reserved
 * @property {string} phase
 * @property {string} said
 * @property {boolean} rounded
 * @property {StepWords} words
 */

/** @typedef {{position: number, bytes: number, said: string, rounded: boolean, step: number, phase: string}} RunTop */

/**
 * What some bytes are made of, largest first.
 * @typedef {object} Composition
 * @property {Array<{key: string, bytes: number}>} rows
 * @property {Record<string, number>} temporaries_by_phase
 * @property {Record<string, number>} communication_by_part
 * @property {number} total
 */

/** @typedef {{key: string, cells: Array<number|null>}} CellRow the bytes of one category, a cell for each column */

/** @typedef {{step: number, columns: string[], rows: CellRow[]}} Marked */

/** @typedef {{key: string, name: string, rows: CellRow[], totals: Array<number|null>}} Instant runs at one mark */

/** @typedef {{name: string, rows: StaticComponent[]}} MarkRows the static model at one mark */

/**
 * The request that failed, for the timeline.
 * @typedef {object} Failure
 * @property {number} position
 * @property {boolean} later whether it came after the recorded steps: the charts do not have that instant
 * @property {number|null} available
 * @property {number} used
 * @property {number} segment
 * @property {string} block
 */

/**
 * @typedef {object} Run
 * @property {string} label
 * @property {string} title
 * @property {Summary} summary
 * @property {Said} said
 * @property {StreamView|null} stream null where the run was given as JSON, which has no events
 * @property {RunStep[]} steps
 * @property {RunTop|null} peak the largest of the steps' peaks
 * @property {ShownAtView|null} instant
 * @property {Failure|null} failure
 * @property {boolean} timed
 * @property {Array<[number, string]>} phase_runs
 * @property {number} activations the position of those of the summary
 * @property {SegmentView[]} address_map
 * @property {Composition|null} composition of the peak
 * @property {Marked} breakdown
 * @property {MarkRows[]} static_model
 */

/**
 * @param {Record<string, number>} sizes by category
 * @param {Record<string, number>} temporaries by phase
 * @param {Record<string, number>} parts of the communication
 * @returns {Composition}
 */
export function compositionOf(sizes, temporaries, parts) {
  const rows = Object.entries(sizes)
    .filter(([, bytes]) => bytes)
    .map(([key, bytes]) => ({ key, bytes }))
    .sort((one, other) => other.bytes - one.bytes);
  const total = rows.reduce((sum, { bytes }) => sum + bytes, 0);
  return { rows, temporaries_by_phase: temporaries, communication_by_part: parts, total };
}

/**
 * The bytes of each category at the marks of a step and at its peak, in the order of the page's `marks`.
 * @param {Step} step
 * @returns {Array<Record<string, number>|null>}
 */
function liveAtMarks({ marks, peak }) {
  return [marks.after_forward, marks.after_backward, marks.after_optimizer, peak.categories];
}

/** @param {{cells: Array<number|null>}} row */
const hasBytes = ({ cells }) => cells.some(Boolean);

/**
 * The compared steps of several runs at each mark; a run without such a step has `null`.
 * @param {Array<Step|null>} steps
 * @param {Record<string, string>} marks
 * @param {CategoryView[]} categories
 * @returns {Instant[]}
 */
export function comparedAt(steps, marks, categories) {
  const each = steps.map((step) => step && liveAtMarks(step));
  return Object.entries(marks).map(([key, name], at) => {
    const lives = each.map((step) => step && step[at]);
    const rows = categories.map((category) => ({ key: category.key, cells: lives.map((live) => live && live[category.key]) }));
    const totals = lives.map((live) => live && Object.values(live).reduce((sum, bytes) => sum + bytes, 0));
    return { key, name, rows: rows.filter(hasBytes), totals };
  });
}

/**
 * The way from the run at `from` to the one at `to`, which both have that instant: `start` plus all terms is `end`.
 * @param {Instant} instant
 * @param {string[]} labels
 * @param {number} from
 * @param {number} to
 */
export function waterfallOf({ name, rows, totals }, labels, from, to) {
  const terms = rows.map(({ key, cells }) => ({ key, bytes: (cells[to] ?? 0) - (cells[from] ?? 0) })).filter(({ bytes }) => bytes);
  return { from: labels[from], to: labels[to], instant: name, start: totals[from] ?? 0, end: totals[to] ?? 0, terms };
}

/** @typedef {ReturnType<typeof waterfallOf>} Fall */

/**
 * Live bytes at the marks of the last step that ended and at its peak: the rows of `ampmem show --each`.
 * @param {Summary} summary
 * @param {PageView} page
 * @returns {Marked}
 */
export function breakdownOf({ arm, steps }, { autocast_precisions: autocast, categories, marks, precision_copies: copies }) {
  const step = steps.findLast(({ finished }) => finished) ?? steps[steps.length - 1];
  const instants = liveAtMarks(step);
  /**
   * @param {string} key
   * @param {string[]} parts
   */
  const row = (key, parts) => ({
    key,
    cells: instants.map((live) => live && parts.reduce((sum, part) => sum + live[part], 0)),
  });
  const keys = categories.map(({ key }) => key);
  const rows = keys.flatMap((key) => {
    const together = key === copies[0] ? [row("precision_copies", copies)] : [];
    return [
      ...together.filter((each) => autocast.includes(arm.name) || hasBytes(each)),
      ...[row(key, [key])].filter(hasBytes),
    ];
  });
  return { step: step.index, columns: Object.values(marks), rows: [...rows, row("total", keys)] };
}

/**
 * The rows of the static model with bytes in them, by mark.
 * @param {Summary} summary
 * @param {PageView} page
 * @returns {MarkRows[]}
 */
function markRows({ static_model: rows }, { marks }) {
  const found = Object.entries(marks).map(([key, name]) => ({
    name,
    rows: rows.filter((row) => row.mark === key && (row.model_bytes || row.measured_bytes)),
  }));
  return found.filter((mark) => mark.rows.length);
}

/**
 * A run, unpacked and put together.
 * @param {RunView} view
 * @param {PageView} page
 * @returns {Promise<Run>}
 */
export async function runOf({ label, title, packed, events }, page) {
  const text = new TextDecoder().decode(await inflated(bytesOfBase64(packed)));
  const { summary, said } = /** @type {RunWords} */ (cleaned(JSON.parse(text), MAX_SENTENCE));
  const { out_of_memory: oom, peak } = summary;
  const shortage = said.out_of_memory;
  const toldByFailure = oom?.ended_the_run && !oom.later;
  return {
    label,
    title,
    summary,
    said,
    stream: events?.stream ?? null,
    steps: summary.steps.map((step, i) => ({
      ...(events?.steps[i] ?? { first: 0, last: 0, peak: 0 }),
      index: step.index,
      finished: step.finished,
      peak_bytes: step.peak.bytes,
      peak_reserved: step.peak_reserved,
      phase: step.peak.phase,
      said: said.steps[i].peak,
      rounded: (step.peak.allocated ?? step.peak.bytes) !== step.peak.bytes,
      words: said.steps[i],
    })),
    peak: peak.bytes
      ? {
          position: events?.peak ?? 0,
          bytes: peak.bytes,
          said: said.peak,
          rounded: (peak.allocated ?? peak.bytes) !== peak.bytes,
          step: peak.step,
          phase: peak.phase,
        }
      : null,
    instant: events?.instant ?? null,
    failure:
      oom && shortage
        ? {
            position: events?.failure ?? 0,
            later: oom.later,
            available: shortage.available,
            used: shortage.used,
            segment: oom.segment,
            block: shortage.block,
          }
        : null,
    timed: events?.timed ?? false,
    phase_runs: events?.phase_runs ?? [],
    activations: events?.activations ?? 0,
    address_map: events?.address_map ?? [],
    composition:
      peak.bytes && !toldByFailure
        ? compositionOf(peak.categories, peak.temporaries_by_phase, peak.communication_by_part)
        : null,
    breakdown: breakdownOf(summary, page),
    static_model: markRows(summary, page),
  };
}
