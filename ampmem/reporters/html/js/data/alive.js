/** Allocations of a run as rows: for the table, the module tree and the stack tree. */
import { formatShape } from "../common/format.js";
import { isLibraryFrame } from "./frames.js";
/** @import { CategoryView } from "../common/page.js" */
/** @import { KindsHeader } from "./stream.js" */
/** @import { PathRow } from "./tree.js" */

/** @typedef {{kind: number, count: number, bytes: number}} AliveRow bytes are those of one */

const TORCH = ["/torch/", "<frozen "];
const LIBRARIES = ["/site-packages/", "/dist-packages/", ...TORCH];

/**
 * The innermost frame outside the libraries, else outside torch, else of all.
 * @param {string[]} frames
 */
export function ownFrame(frames) {
  for (const hidden of [LIBRARIES, TORCH]) {
    const found = frames.findLast((frame) => !hidden.some((part) => frame.includes(part)));
    if (found !== undefined) return found;
  }
  return frames.at(-1) ?? "";
}

/**
 * `function  file.py:12` for `/a/long/path/file.py:12 function`; what is no such frame stays as it is.
 * @param {string} frame
 */
export function shortFrame(frame) {
  const found = /^(.*):(\d+) (.+)$/.exec(frame);
  if (!found) return frame;
  const [, path, line, name] = found;
  return `${name}  ${path.slice(Math.max(path.lastIndexOf("/"), path.lastIndexOf("\\")) + 1)}:${line}`;
}

/** Reads the columns of the container's header by kind. */
export class Kinds {
  /**
   * @param {KindsHeader} header
   * @param {CategoryView[]} categories
   */
  constructor(header, categories) {
    this.header = header;
    this.categories = categories;
    this.count = header.kinds.bytes.length;
    this.shapes = header.shapes.map(formatShape);
  }

  /**
   * @param {"name"|"module"|"op"|"dtype"} column
   * @param {number} kind
   */
  text(column, kind) {
    return this.header.texts[this.header.kinds[column][kind]] ?? "";
  }

  /**
   * `8×128`; empty where it is not known.
   * @param {number} kind
   */
  shape(kind) {
    return this.shapes[this.header.kinds.shape[kind]] ?? "";
  }

  /** @param {number} kind */
  bytes(kind) {
    return this.header.kinds.bytes[kind];
  }

  /** @param {number} kind */
  category(kind) {
    return this.header.kinds.category[kind];
  }

  /**
   * Frames of the stack, outermost first.
   * @param {number} kind
   */
  frames(kind) {
    return (this.header.stacks[this.header.kinds.stack[kind]] ?? []).map((frame) => this.header.frames[frame]);
  }

  hasStacks() {
    return this.header.stacks.some((stack) => stack.length > 0);
  }

  /** @param {number} kind */
  phase(kind) {
    return ["setup", "data", "forward", "backward", "optimizer", "between", "evaluation"][this.header.kinds.phase[kind]] ?? "";
  }
}

/**
 * Kinds with a count, the largest single allocation first.
 * @param {Kinds} kinds
 * @param {Int32Array} counts by kind
 * @returns {AliveRow[]}
 */
export function aliveRows(kinds, counts) {
  /** @type {AliveRow[]} */
  const rows = [];
  for (let kind = 0; kind < counts.length; kind += 1) {
    if (counts[kind] > 0) rows.push({ kind, count: counts[kind], bytes: kinds.bytes(kind) });
  }
  return rows.sort((one, two) => two.bytes - one.bytes || two.count - one.count || one.kind - two.kind);
}

/**
 * Rows for `treeOf`, by the dotted module name.
 * @param {Kinds} kinds
 * @param {Int32Array} counts by kind
 * @returns {Generator<PathRow>}
 */
export function* moduleRows(kinds, counts) {
  for (let kind = 0; kind < counts.length; kind += 1) {
    if (counts[kind] <= 0) continue;
    const module = kinds.text("module", kind);
    const path = module ? module.split(".") : ["(no module)"];
    yield { path, bytes: counts[kind] * kinds.bytes(kind), category: kinds.category(kind), kind };
  }
}

/**
 * Rows for `treeOf`, by the frames of the stack, with those of libraries or without.
 * @param {Kinds} kinds
 * @param {Int32Array} counts by kind
 * @param {boolean} libraries
 * @returns {Generator<PathRow>}
 */
export function* stackRows(kinds, counts, libraries) {
  const { header } = kinds;
  const own = header.frames.map((frame) => libraries || !isLibraryFrame(frame));
  const paths = header.stacks.map((stack) => {
    const shown = stack.filter((frame) => own[frame]).map((frame) => header.frames[frame]);
    if (shown.length) return shown;
    return [stack.length ? "(library frames only)" : "(no stack)"];
  });
  for (let kind = 0; kind < counts.length; kind += 1) {
    if (counts[kind] <= 0) continue;
    const path = paths[header.kinds.stack[kind]] ?? ["(no stack)"];
    yield { path, bytes: counts[kind] * kinds.bytes(kind), category: kinds.category(kind), kind };
  }
}

/**
 * @param {string[]} texts
 * @param {string} word
 */
function hitsOf(texts, word) {
  return texts.map((text) => text.toLowerCase().includes(word));
}

/**
 * Bytes of what lives with a frame that holds `query` in its stack, how many such frames there are, and how many of
 * those are a library's.
 * @param {Kinds} kinds
 * @param {Int32Array} counts by kind
 * @param {string} query
 */
export function matchedStacks(kinds, counts, query) {
  const matches = hitsOf(kinds.header.frames, query.toLowerCase());
  /** @type {Set<number>} */
  const frames = new Set();
  let bytes = 0;
  for (let kind = 0; kind < counts.length; kind += 1) {
    if (counts[kind] <= 0) continue;
    const found = (kinds.header.stacks[kinds.header.kinds.stack[kind]] ?? []).filter((frame) => matches[frame]);
    if (found.length) bytes += counts[kind] * kinds.bytes(kind);
    found.forEach((frame) => frames.add(frame));
  }
  const libraries = [...frames].filter((frame) => isLibraryFrame(kinds.header.frames[frame])).length;
  return { frames: frames.size, libraries, bytes };
}

/**
 * Whether a kind has all words of `query` in its name, module, operator, type, shape, stack, phase or category.
 * @param {Kinds} kinds
 * @param {string} query
 * @returns {(kind: number) => boolean}
 */
export function kindMatcher(kinds, query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  const { header } = kinds;
  const tests = words.map((word) => {
    const texts = hitsOf(header.texts, word);
    const frames = hitsOf(header.frames, word);
    const stacks = header.stacks.map((stack) => stack.some((frame) => frames[frame]));
    const labels = kinds.categories.map((each) => each.label.toLowerCase().includes(word));
    const shapes = hitsOf(kinds.shapes, word.replace(/(?<=\d)x(?=\d)/g, "×"));
    const columns = [header.kinds.name, header.kinds.module, header.kinds.op, header.kinds.dtype];
    return (/** @type {number} */ kind) =>
      columns.some((column) => texts[column[kind]]) ||
      stacks[header.kinds.stack[kind]] ||
      shapes[header.kinds.shape[kind]] ||
      labels[kinds.category(kind)] ||
      kinds.phase(kind).includes(word);
  });
  return (kind) => tests.every((test) => test(kind));
}
