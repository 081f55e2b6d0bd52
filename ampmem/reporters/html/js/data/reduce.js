/** Which instants of a view are drawn, so that every extreme of it is there. */
import { lastAtMost } from "./live.js";

const BUCKETS = 1100;

/**
 * The first lowest and the first highest instant of `totals[start, end)`, in order.
 * @param {ArrayLike<number>} totals
 * @param {number} start
 * @param {number} end
 */
function extremes(totals, start, end) {
  let lowest = start;
  let highest = start;
  for (let i = start + 1; i < end; i += 1) {
    if (totals[i] < totals[lowest]) lowest = i;
    if (totals[i] > totals[highest]) highest = i;
  }
  return lowest < highest ? [lowest, highest] : [highest, lowest];
}

/**
 * Where the buckets of instants `[first, last]` begin and end; of equal width in time when `times` is given.
 * @param {number} first
 * @param {number} last
 * @param {number} buckets
 * @param {Float64Array|null} times
 */
function bucketEdges(first, last, buckets, times) {
  const edges = [first];
  const start = times ? times[first] : 0;
  const width = times ? times[last] - start : 0;
  for (let bucket = 1; bucket < buckets; bucket += 1) {
    const part = bucket / buckets;
    const edge = times ? lastAtMost(times, start + width * part) + 1 : first + Math.floor((last + 1 - first) * part);
    edges.push(Math.max(edges[bucket - 1], Math.min(edge, last + 1)));
  }
  edges.push(last + 1);
  return edges;
}

/**
 * The instants to draw of `[first, last]`: all of them when they are few, else both ends and the lowest and
 * highest of every bucket.
 * @param {Float64Array} totals what the extremes are taken of
 * @param {number} first
 * @param {number} last
 * @param {Float64Array|null} times when the buckets are to be of equal width in time
 * @returns {{indices: Uint32Array, every: boolean}}
 */
export function drawnInstants(totals, first, last, times = null, buckets = BUCKETS) {
  const count = last - first + 1;
  if (count <= 2 * buckets) return { indices: Uint32Array.from({ length: count }, (_, i) => first + i), every: true };
  const edges = bucketEdges(first, last, buckets, times);
  const chosen = [first];
  /** @param {number} index */
  const choose = (index) => {
    if (index > chosen[chosen.length - 1]) chosen.push(index);
  };
  for (let bucket = 0; bucket < buckets; bucket += 1) {
    if (edges[bucket] < edges[bucket + 1]) extremes(totals, edges[bucket], edges[bucket + 1]).forEach(choose);
  }
  choose(last);
  return { indices: Uint32Array.from(chosen), every: false };
}

/**
 * `indices` and those of the ascending `changes` that are in `[first, last]`; of very many the first, and the lowest
 * and the highest of `values` in each of some runs of them.
 * @param {Uint32Array} indices
 * @param {number[]} changes
 * @param {Float64Array} values
 * @param {number} first
 * @param {number} last
 */
export function withChanges(indices, changes, values, first, last, runs = BUCKETS / 2) {
  let inside = changes.filter((index) => index >= first && index <= last);
  if (!inside.length) return indices;
  if (inside.length > 2 * runs) {
    const there = Float64Array.from(inside, (index) => values[index]);
    const edges = bucketEdges(0, inside.length - 1, runs, null);
    const chosen = Array.from({ length: runs }, (_, run) => extremes(there, edges[run], edges[run + 1])).flat();
    inside = [0, ...chosen].map((place) => inside[place]);
  }
  return Uint32Array.from(new Set([...indices, ...inside])).sort();
}

/**
 * `values` made strictly ascending by steps too small to see: a stack needs one value for each x.
 * @param {Float64Array} values
 */
export function ascending(values) {
  const span = values[values.length - 1] - values[0] || 1;
  for (let i = 1; i < values.length; i += 1) {
    if (values[i] <= values[i - 1]) values[i] = values[i - 1] + span * 1e-7;
  }
  return values;
}
