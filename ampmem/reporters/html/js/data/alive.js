/** Allocations of a run as rows: for the table, the module tree and the stack tree. */
import { formatShape } from "../common/format.js";
import { isLibraryFrame } from "./frames.js";
/** @import { CategoryView } from "../common/page.js" */
/** @import { KindsHeader } from "./stream.js" */
/** @import { PathRow } from "./tree.js" */

/**
 * @typedef {{kind: number, count: number, bytes: number}} AliveRow bytes are those of one
 * @typedef {{rows: AliveRow[], count: number, bytes: number, sum: number}} LayerRow what is alike in several layers:
 *   `bytes` are those of the largest, `sum` those of all
 */

/** A number that is a part of a name by itself, as of the modules in a list. */
const LAYER = /(?<![^.\s])\d+(?![^.\s])/g;
/** Sizes that differ by no more than this share are those of equal layers. */
const NEAR = 0.01;

/**
 * `name` with `*` for each number of a layer: `blocks.*.mlp.up`.
 * @param {string} name
 */
export function ofAllLayers(name) {
  return name.replace(LAYER, "*");
}

/**
 * What several names are called together.
 * @param {string[]} names
 */
export function together(names) {
  const first = names[0] ?? "";
  return names.every((name) => name === first) ? first : ofAllLayers(first);
}

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
    /** @type {string[]} */
    this.patterns = [];
  }

  /**
   * What the kinds of equal layers have in common, their sizes apart.
   * @param {number} kind
   */
  pattern(kind) {
    const known = this.patterns[kind];
    if (known !== undefined) return known;
    const texts = ["name", "module", "op", "what", "dtype"].map((column) =>
      ofAllLayers(this.text(/** @type {"name"} */ (column), kind)),
    );
    const found = JSON.stringify([this.category(kind), this.phase(kind), ownFrame(this.frames(kind)), ...texts]);
    this.patterns[kind] = found;
    return found;
  }

  /**
   * @param {"name"|"module"|"op"|"dtype"|"what"} column
   * @param {number} kind
   */
  text(column, kind) {
    return this.header.texts[this.header.kinds[column][kind]] ?? "";
  }

  /**
   * What an allocation is: of a tensor without a name of its own what was computed, else its name with the operator.
   * @param {number} kind
   */
  what(kind) {
    const name = this.text("name", kind);
    const op = this.text("op", kind);
    return this.text("what", kind) || (name && op ? `${name} (${op})` : name || op);
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
 * `rows`, the largest first, in groups of equal layers, as the tables of the terminal have them: what is alike but for
 * the numbers of layers in its names, and as large. A group stands where the first of it stood.
 * @param {Kinds} kinds
 * @param {AliveRow[]} rows
 * @returns {LayerRow[]}
 */
export function inLayers(kinds, rows) {
  /** @type {Map<string, LayerRow[]>} */
  const known = new Map();
  /** @type {LayerRow[]} */
  const groups = [];
  for (const row of rows) {
    const alike = known.get(kinds.pattern(row.kind)) ?? [];
    let group = alike.find((each) => Math.abs(each.bytes - row.bytes) <= NEAR * Math.max(each.bytes, row.bytes));
    if (!group) {
      group = { rows: [], count: 0, bytes: row.bytes, sum: 0 };
      known.set(kinds.pattern(row.kind), [...alike, group]);
      groups.push(group);
    }
    group.rows.push(row);
    group.count += row.count;
    group.sum += row.count * row.bytes;
    group.bytes = Math.max(group.bytes, row.bytes);
  }
  return groups;
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
    const columns = [header.kinds.name, header.kinds.module, header.kinds.op, header.kinds.what, header.kinds.dtype];
    return (/** @type {number} */ kind) =>
      columns.some((column) => texts[column[kind]]) ||
      stacks[header.kinds.stack[kind]] ||
      shapes[header.kinds.shape[kind]] ||
      labels[kinds.category(kind)] ||
      kinds.phase(kind).includes(word);
  });
  return (kind) => tests.every((test) => test(kind));
}
