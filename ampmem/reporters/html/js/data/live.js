/**
 * Live bytes at every instant of a run. An instant is an index into what the page holds: of an exact stream
 * the position itself (0..events), of a reduced one the number of a kept position.
 *
 * Where the allocator's segments are known there are two more series above the categories: what blocks have beyond
 * what was requested (rounding), and what is reserved and in no block (cached).
 */
/** @import { Block, ExactStream, Live, ReducedStream, SegmentColumns } from "./stream.js" */

const CHECKPOINT = 4096;

/**
 * The largest index in the ascending `values` whose value is at most `value`; 0 when there is none.
 * @param {ArrayLike<number>} values
 * @param {number} value
 */
export function lastAtMost(values, value) {
  let low = 0;
  let high = values.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >>> 1;
    if (values[middle] <= value) low = middle;
    else high = middle - 1;
  }
  return low;
}

/** @implements {Live} */
class ExactLive {
  /** @param {ExactStream} stream */
  constructor(stream) {
    this.exact = true;
    this.codes = stream.codes;
    this.times = stream.times;
    this.kinds = stream.header.kinds;
    this.categories = stream.categories;
    this.length = stream.events + 1;
    this.places = stream.places;
    this.steps = stream.header.addresses ?? [];
    this.segments = stream.header.segments ?? null;
    this.blocks = stream.header.block_bytes ?? null;
    this.layers = this.segments ? 2 : 0;
    this.reserved = new Float64Array(this.length);
    /** @type {number[]} */
    this.changes = [];
    /** How many of each kind live at an instant. */
    this.counted = { index: 0, counts: new Int32Array(this.kinds.bytes.length) };
    this.totals = new Float64Array(this.length);
    this.most = new Float64Array(this.categories + this.layers);
    // At every 4096th instant the bytes of the categories, and behind them those of the blocks.
    this.width = this.categories + (this.blocks ? 1 : 0);
    this.checkpoints = new Float64Array((Math.floor(this.codes.length / CHECKPOINT) + 1) * this.width);
    if (this.segments) this.#reserve(this.segments);
    this.#sum();
  }

  /**
   * What is reserved at every instant, and where that changes.
   * @param {SegmentColumns} segments
   */
  #reserve({ since, bytes }) {
    let now = 0;
    let at = 0;
    for (let row = 0; row < since.length && since[row] < this.length; row += 1) {
      if (since[row] > at) {
        this.reserved.fill(now, at, since[row]);
        at = since[row];
        this.changes.push(at);
      }
      now += bytes[row];
    }
    this.reserved.fill(now, at);
  }

  /** One pass: the total at every instant, and all categories at every 4096th, to start from. */
  #sum() {
    const { codes, categories, blocks, width } = this;
    const { category, bytes } = this.kinds;
    const now = new Float64Array(width);
    let total = 0;
    for (let i = 0; i < codes.length; i += 1) {
      if (i % CHECKPOINT === 0) this.checkpoints.set(now, (i / CHECKPOINT) * width);
      const kind = codes[i] >>> 1;
      const size = codes[i] & 1 ? -bytes[kind] : bytes[kind];
      const here = category[kind];
      now[here] += size;
      if (now[here] > this.most[here]) this.most[here] = now[here];
      total += size;
      this.totals[i + 1] = total;
      if (blocks) {
        now[categories] += codes[i] & 1 ? -blocks[kind] : blocks[kind];
        this.#noteLayers(now[categories] - total, this.reserved[i + 1] - now[categories]);
      }
    }
    // What comes after the last event starts from here, too.
    if (codes.length % CHECKPOINT === 0) this.checkpoints.set(now, (codes.length / CHECKPOINT) * width);
  }

  /**
   * @param {number} rounding
   * @param {number} cached
   */
  #noteLayers(rounding, cached) {
    if (rounding > this.most[this.categories]) this.most[this.categories] = rounding;
    if (cached > this.most[this.categories + 1]) this.most[this.categories + 1] = cached;
  }

  /** @param {number} index */
  position(index) {
    return index;
  }

  /** @param {number} position */
  indexOf(position) {
    return Math.max(0, Math.min(this.length - 1, Math.floor(position)));
  }

  /**
   * Bytes of each category, and of the layers above them, at the ascending `indices`: one array each.
   * @param {ArrayLike<number> & Iterable<number>} indices
   */
  sample(indices) {
    const { categories, codes, blocks, width } = this;
    const { category, bytes } = this.kinds;
    const series = Array.from({ length: categories + this.layers }, () => new Float64Array(indices.length));
    const now = new Float64Array(width);
    let at = -1;
    for (let i = 0; i < indices.length; i += 1) {
      const index = indices[i];
      if (at < 0 || index - at > CHECKPOINT) {
        at = index - (index % CHECKPOINT);
        now.set(this.checkpoints.subarray((at / CHECKPOINT) * width, (at / CHECKPOINT + 1) * width));
      }
      for (; at < index; at += 1) {
        const kind = codes[at] >>> 1;
        now[category[kind]] += codes[at] & 1 ? -bytes[kind] : bytes[kind];
        if (blocks) now[categories] += codes[at] & 1 ? -blocks[kind] : blocks[kind];
      }
      for (let each = 0; each < categories; each += 1) series[each][i] = now[each];
      if (blocks) {
        series[categories][i] = now[categories] - this.totals[index];
        series[categories + 1][i] = this.reserved[index] - now[categories];
      }
    }
    return series;
  }

  /**
   * Totals over the categories that `shown` says 1 for.
   * @param {boolean[]} shown
   */
  totalsOf(shown) {
    if (shown.every(Boolean)) return this.totals;
    const { codes } = this;
    const { category, bytes } = this.kinds;
    const totals = new Float64Array(this.length);
    for (let i = 0, total = 0; i < codes.length; i += 1) {
      const kind = codes[i] >>> 1;
      if (shown[category[kind]]) total += codes[i] & 1 ? -bytes[kind] : bytes[kind];
      totals[i + 1] = total;
    }
    return totals;
  }

  /**
   * How many allocations of each kind live at `index`.
   * @param {number} index
   */
  aliveAt(index) {
    // From where it was asked for last, where that is nearer than the start: a pointer asks for one instant after the other.
    if (Math.abs(index - this.counted.index) > index) this.counted = { index: 0, counts: this.counted.counts.fill(0) };
    const { counts } = this.counted;
    let at = this.counted.index;
    for (; at < index; at += 1) counts[this.codes[at] >>> 1] += this.codes[at] & 1 ? -1 : 1;
    for (; at > index; at -= 1) counts[this.codes[at - 1] >>> 1] -= this.codes[at - 1] & 1 ? -1 : 1;
    this.counted.index = index;
    return counts.slice();
  }

  /**
   * The blocks that live at `index`, by address; null where that is not known.
   * @param {number} index
   */
  blocksAt(index) {
    if (!this.places || !this.blocks) return null;
    const there = new Int32Array(this.steps.length).fill(-1);
    const since = new Int32Array(this.steps.length);
    for (let i = 0; i < index; i += 1) {
      there[this.places[i]] = this.codes[i] & 1 ? -1 : this.codes[i] >>> 1;
      since[this.places[i]] = i;
    }
    /** @type {Block[]} */
    const blocks = [];
    let address = 0;
    for (let place = 0; place < there.length; place += 1) {
      address += this.steps[place];
      const kind = there[place];
      if (kind < 0) continue;
      blocks.push({ address, bytes: this.blocks[kind], category: this.kinds.category[kind], kind, born: since[place] });
    }
    return blocks;
  }

  /** @param {number} index */
  eventBefore(index) {
    return index > 0 ? { kind: this.codes[index - 1] >>> 1, free: Boolean(this.codes[index - 1] & 1) } : null;
  }

  /** How many allocations of each kind were ever made. */
  made() {
    const counts = new Int32Array(this.kinds.bytes.length);
    for (let i = 0; i < this.codes.length; i += 1) if (!(this.codes[i] & 1)) counts[this.codes[i] >>> 1] += 1;
    return counts;
  }
}

/** @implements {Live} */
class ReducedLive {
  /**
   * @param {ReducedStream} stream
   * @param {number|undefined} peakPosition
   */
  constructor(stream, peakPosition) {
    this.exact = false;
    this.positions = stream.positions;
    this.times = stream.times;
    this.series = stream.series;
    this.kinds = stream.header.kinds;
    this.peakKinds = stream.header.peak_kinds ?? [];
    this.categories = stream.categories;
    this.layers = this.series.length - this.categories;
    /** @type {SegmentColumns|null} */
    this.segments = null;
    this.reserved = new Float64Array(0);
    /** @type {number[]} */
    this.changes = [];
    this.length = stream.positions.length;
    this.peakIndex = lastAtMost(this.positions, peakPosition ?? 0);
    this.totals = this.totalsOf(new Array(this.categories).fill(true));
    this.most = this.series.map((values) => values.reduce((most, value) => Math.max(most, value), 0));
  }

  /** @param {number} index */
  position(index) {
    return this.positions[index];
  }

  /** @param {number} position */
  indexOf(position) {
    return lastAtMost(this.positions, position);
  }

  /** @param {ArrayLike<number> & Iterable<number>} indices */
  sample(indices) {
    return this.series.map((values) => Float64Array.from(indices, (index) => values[index]));
  }

  /** @param {boolean[]} shown */
  totalsOf(shown) {
    const totals = new Float64Array(this.length);
    this.series.forEach((values, category) => {
      if (!shown[category]) return;
      for (let i = 0; i < totals.length; i += 1) totals[i] += values[i];
    });
    return totals;
  }

  /**
   * Known at the peak only; null elsewhere.
   * @param {number} index
   */
  aliveAt(index) {
    if (index !== this.peakIndex) return null;
    const counts = new Int32Array(this.kinds.bytes.length);
    for (const [kind, count] of this.peakKinds) counts[kind] = count;
    return counts;
  }

  blocksAt() {
    return null;
  }

  eventBefore() {
    return null;
  }

  made() {
    return null;
  }
}

/**
 * What lives when, from an unpacked stream.
 * @param {ExactStream|ReducedStream} stream
 * @param {number|undefined} peakPosition
 * @returns {Live}
 */
export function liveOf(stream, peakPosition) {
  return stream.mode === "exact" ? new ExactLive(stream) : new ReducedLive(stream, peakPosition);
}
