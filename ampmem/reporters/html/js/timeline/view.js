/** The part of the run that is in view: a stretch of the horizontal axis, in events or in seconds. */
import { formatCount } from "../common/format.js";
import { lastAtMost } from "../data/live.js";
/** @import { Run } from "../data/run.js" */
/** @import { Live } from "../data/stream.js" */
/** @import { View } from "../figures/figures.js" */

/**
 * Horizontal place of an instant.
 * @param {Live} live
 * @param {number} index
 * @param {boolean} byTime
 */
export function placeOf(live, index, byTime) {
  return byTime ? live.times[index] / 1e9 : live.position(index);
}

/**
 * The instant that holds at a horizontal place.
 * @param {Live} live
 * @param {number} place
 * @param {boolean} byTime
 */
function instantAt(live, place, byTime) {
  return byTime ? lastAtMost(live.times, place * 1e9) : live.indexOf(place);
}

/**
 * @param {Live} live
 * @param {boolean} byTime
 * @returns {View}
 */
export function wholeView(live, byTime) {
  return { low: placeOf(live, 0, byTime), high: placeOf(live, live.length - 1, byTime) || 1 };
}

/**
 * `view` moved into the whole and at least so wide that something can be seen.
 * @param {Live} live
 * @param {View} view
 * @param {boolean} byTime
 * @returns {View}
 */
export function clampedView(live, view, byTime) {
  const whole = wholeView(live, byTime);
  const extent = whole.high - whole.low;
  const least = byTime ? Math.min(extent, 1e-6) : Math.min(extent, 4);
  const width = Math.min(extent, Math.max(least, view.high - view.low));
  const middle = (view.low + view.high) / 2;
  const low = Math.max(whole.low, Math.min(whole.high - width, middle - width / 2));
  return { low, high: low + width };
}

/**
 * `view` by `factor` around `center`, which stays where it is on the screen.
 * @param {View} view
 * @param {number} factor
 * @param {number} center
 * @returns {View}
 */
export function zoomedView(view, factor, center) {
  const around = center >= view.low && center <= view.high ? center : (view.low + view.high) / 2;
  return { low: around - (around - view.low) * factor, high: around + (view.high - around) * factor };
}

/**
 * @param {View} view
 * @param {number} part
 * @returns {View}
 */
export function pannedView(view, part) {
  const by = (view.high - view.low) * part;
  return { low: view.low + by, high: view.high + by };
}

/**
 * From the last instant before the view to the first after it: what has to be drawn to fill it.
 * @param {Live} live
 * @param {View} view
 * @param {boolean} byTime
 */
export function instantsOf(live, view, byTime) {
  // Several instants may have the same time; all of them are at the start.
  const first = view.low <= placeOf(live, 0, byTime) ? 0 : instantAt(live, view.low, byTime);
  let last = instantAt(live, view.high, byTime);
  if (last < live.length - 1 && placeOf(live, last, byTime) < view.high) last += 1;
  return { first, last: Math.max(first, last) };
}

/**
 * A stretch of instants around `index`: a fiftieth of the run, but wide enough to see and so narrow that all are drawn.
 * @param {Live} live
 * @param {number} index
 * @param {boolean} byTime
 * @returns {View}
 */
export function viewAround(live, index, byTime) {
  const half = Math.min(1000, Math.max(20, Math.round(live.length / 100)));
  const first = Math.max(0, index - half);
  const last = Math.min(live.length - 1, index + half);
  return { low: placeOf(live, first, byTime), high: placeOf(live, last, byTime) };
}

/**
 * `view` of one axis as a view of the other.
 * @param {Live} live
 * @param {View} view
 * @param {boolean} fromTime
 * @param {boolean} toTime
 * @returns {View}
 */
export function convertedView(live, view, fromTime, toTime) {
  if (fromTime === toTime) return view;
  const { first, last } = instantsOf(live, view, fromTime);
  return { low: placeOf(live, first, toTime), high: placeOf(live, last, toTime) };
}

/**
 * How many events are in view, and which of them are drawn.
 * @param {Run} run
 * @param {Live} live
 * @param {{first: number, last: number}} instants those in view
 * @param {{indices: Uint32Array, every: boolean}} drawn
 */
export function viewNote(run, live, { first, last }, { indices, every }) {
  const events = formatCount(live.position(last) - live.position(first));
  const drawn = `${events} events in view, drawn from ${formatCount(indices.length)}`;
  if (!live.exact) return [run.stream?.note, `${drawn} kept instants.`].filter(Boolean).join(" ");
  if (every) return `Every event is shown: ${events} in view.`;
  return `${drawn} exact instants: the lowest and the highest of every stretch.`;
}
