/** The allocator's segments and blocks at an instant, from the packed events of a run. */
/** @import { Block, Live, SegmentColumns } from "./stream.js" */

/** @typedef {{address: number, bytes: number, pages: number}} Held a segment, or pages of one */
/** @typedef {Block & {key: string}} Keyed a block with the key of its category */
/** @typedef {[offset: number, bytes: number, key: string, block?: Keyed]} Part of a segment: a block, or what is cached */
/** @typedef {{address: number, bytes: number, blocks: Part[]}} Filled a segment from its start to its end */

/**
 * How many of `held` begin before `address`.
 * @param {Held[]} held
 * @param {number} address
 */
function countBefore(held, address) {
  let low = 0;
  let high = held.length;
  while (low < high) {
    const middle = (low + high) >>> 1;
    if (held[middle].address < address) low = middle + 1;
    else high = middle;
  }
  return low;
}

/**
 * Takes `[address, address + bytes)` out of `held`, pieces that ascend and do not overlap.
 * @param {Held[]} held
 * @param {number} address
 * @param {number} bytes
 */
function cutOut(held, address, bytes) {
  const end = address + bytes;
  const first = Math.max(0, countBefore(held, address) - 1);
  /** @type {Held[]} */
  const kept = [];
  let last = first;
  for (; last < held.length && held[last].address < end; last += 1) {
    const piece = held[last];
    const after = piece.address + piece.bytes;
    if (piece.address < address) kept.push({ ...piece, bytes: Math.min(after, address) - piece.address });
    if (after > end) kept.push({ ...piece, address: end, bytes: after - end });
  }
  held.splice(first, last - first, ...kept);
}

/**
 * The segments at the instant `index` as `{address, bytes}`, by address; neighbouring pages are one segment.
 * @param {SegmentColumns} columns
 * @param {number} index
 */
export function segmentsAt({ since, bytes, address, pages }, index) {
  /** @type {Held[]} */
  const held = [];
  for (let row = 0; row < since.length && since[row] <= index; row += 1) {
    cutOut(held, address[row], Math.abs(bytes[row]));
    if (bytes[row] < 0) continue;
    const piece = { address: address[row], bytes: bytes[row], pages: pages[row] };
    held.splice(countBefore(held, piece.address), 0, piece);
  }
  /** @type {Held[]} */
  const joined = [];
  for (const piece of held) {
    const before = joined[joined.length - 1];
    const continues = before && piece.pages > 0 && before.pages === piece.pages;
    if (continues && before.address + before.bytes === piece.address) before.bytes += piece.bytes;
    else joined.push({ ...piece });
  }
  return joined;
}

/**
 * What fills each segment, from its start to its end, as the address map has it.
 * @param {Array<{address: number, bytes: number}>} segments by address
 * @param {Keyed[]} blocks by address
 * @returns {Filled[]}
 */
export function filledSegments(segments, blocks) {
  let next = 0;
  return segments.map(({ address, bytes }) => {
    /** @type {Part[]} */
    const pieces = [];
    const end = address + bytes;
    let at = address;
    while (next < blocks.length && blocks[next].address < address) next += 1;
    for (; next < blocks.length && blocks[next].address < end; next += 1) {
      const block = blocks[next];
      const limit = Math.min(end, blocks[next + 1]?.address ?? end);
      if (block.address > at) pieces.push([at - address, block.address - at, "cached"]);
      at = Math.min(block.address + block.bytes, limit);
      if (at > block.address) pieces.push([block.address - address, at - block.address, block.key, block]);
    }
    if (at < end) pieces.push([at - address, end - at, "cached"]);
    return { address, bytes, blocks: pieces };
  });
}

/**
 * The segments and what is in them at `index`; `keys` are those of the categories. Null where the events have no
 * addresses.
 * @param {Live} live
 * @param {number} index
 * @param {string[]} keys
 * @returns {Filled[]|null}
 */
export function segmentsFilledAt(live, index, keys) {
  const blocks = live.blocksAt(index);
  if (!blocks || !live.segments) return null;
  const named = blocks.map((block) => ({ ...block, key: keys[block.category] }));
  return filledSegments(segmentsAt(live.segments, index), named);
}
