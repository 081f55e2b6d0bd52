/** Trees of bytes: built from paths, cut down to what can be drawn, laid out in the unit square. */
import { given } from "../common/given.js";

/** @typedef {{path: string[], bytes: number, category: number}} PathRow */
/**
 * `category` is that of a leaf; `rest` is for what was left out of its parent.
 * @typedef {{name: string|null, bytes: number, category: number|null, rest: boolean}} Sized
 */
/** @typedef {Sized & {parent: Tree|null, children: Map<string|number, Tree>}} Tree */
/** @typedef {Sized & {parent: Pruned|null, children: Pruned[]}} Pruned the largest first */
/** @typedef {{left: number, top: number, width: number, height: number}} Area */

const MAX_NODES = 500;

/**
 * @param {string|null} name
 * @param {Tree|null} parent
 * @returns {Tree}
 */
function newNode(name, parent) {
  return { name, parent, bytes: 0, category: null, rest: false, children: new Map() };
}

/**
 * A tree from rows with a path, bytes and the category of the leaf. Names are keys of maps, so that any name will do.
 * @param {string} rootName
 * @param {Iterable<PathRow>} rows
 */
export function treeOf(rootName, rows) {
  const root = newNode(rootName, null);
  for (const row of rows) {
    let node = root;
    node.bytes += row.bytes;
    for (const name of row.path) {
      let child = node.children.get(name);
      if (!child) {
        child = newNode(name, node);
        node.children.set(name, child);
      }
      child.bytes += row.bytes;
      node = child;
    }
    // A number as the key: no name, which is a string, is the same.
    let leaf = node.children.get(row.category);
    if (!leaf) {
      leaf = newNode(null, node);
      leaf.category = row.category;
      node.children.set(row.category, leaf);
    }
    leaf.bytes += row.bytes;
  }
  return root;
}

/** A heap of nodes, largest first. */
class LargestFirst {
  /** @type {Tree[]} */
  #items = [];

  get size() {
    return this.#items.length;
  }

  /** @param {Tree} node */
  push(node) {
    const items = this.#items;
    let at = items.push(node) - 1;
    while (at > 0) {
      const above = (at - 1) >> 1;
      if (items[above].bytes >= items[at].bytes) break;
      [items[above], items[at]] = [items[at], items[above]];
      at = above;
    }
  }

  /** The largest; there must be one. */
  pop() {
    const items = this.#items;
    const top = items[0];
    const last = items.pop();
    if (last && items.length) {
      items[0] = last;
      let at = 0;
      for (;;) {
        let largest = at;
        for (const below of [2 * at + 1, 2 * at + 2]) {
          if (below < items.length && items[below].bytes > items[largest].bytes) largest = below;
        }
        if (largest === at) break;
        [items[largest], items[at]] = [items[at], items[largest]];
        at = largest;
      }
    }
    return top;
  }
}

/**
 * The `limit` largest nodes of the tree, with what is left out of a node as its child "other".
 * Below a node only what is at most as large can be, so the largest nodes are always a tree.
 * Children are arrays in the result, largest first.
 * @param {Tree} root
 * @returns {Pruned}
 */
export function prunedTree(root, limit = MAX_NODES) {
  const heap = new LargestFirst();
  /** @type {Map<Tree, Pruned>} */
  const kept = new Map();
  heap.push(root);
  while (heap.size && kept.size < limit) {
    const node = heap.pop();
    /** @type {Pruned} */
    const copy = { ...node, children: [], parent: (node.parent && kept.get(node.parent)) ?? null };
    kept.set(node, copy);
    copy.parent?.children.push(copy);
    for (const child of node.children.values()) if (child.bytes > 0) heap.push(child);
  }
  for (const [node, copy] of kept) {
    const shown = copy.children.reduce((sum, child) => sum + child.bytes, 0);
    if (node.children.size && shown < node.bytes) {
      copy.children.push({
        name: "other",
        parent: copy,
        bytes: node.bytes - shown,
        category: null,
        rest: true,
        children: [],
      });
    }
  }
  return given(kept.get(root));
}

/**
 * All nodes below and with `node`, parents first.
 * @param {Pruned} node
 */
export function nodesOf(node) {
  const found = [node];
  for (let i = 0; i < found.length; i += 1) found.push(...found[i].children);
  return found;
}

/**
 * Boxes of an icicle: `left` and `width` in the unit interval, `depth` from 0.
 * @param {Pruned} root
 * @returns {Array<{node: Pruned, left: number, width: number, depth: number}>}
 */
export function icicleBoxes(root) {
  const boxes = [{ node: root, left: 0, width: 1, depth: 0 }];
  for (let i = 0; i < boxes.length; i += 1) {
    const { node, left, width, depth } = boxes[i];
    let at = left;
    for (const child of node.children) {
      const part = node.bytes ? (width * child.bytes) / node.bytes : 0;
      boxes.push({ node: child, left: at, width: part, depth: depth + 1 });
      at += part;
    }
  }
  return boxes;
}

/**
 * The worst ratio of sides when `areas` (with sum `sum`) fill a strip along a side of this length.
 * @param {number} largest
 * @param {number} smallest
 * @param {number} sum
 * @param {number} side
 */
function worstRatio(largest, smallest, sum, side) {
  const square = sum * sum;
  return Math.max((side * side * largest) / square, square / (side * side * smallest));
}

/**
 * Squarified boxes for `nodes` in a rectangle.
 * @param {Pruned[]} nodes
 * @param {Area} area
 */
function squarified(nodes, area) {
  const total = nodes.reduce((sum, node) => sum + node.bytes, 0);
  const scale = (area.width * area.height) / total;
  /** @type {Array<Area & {node: Pruned}>} */
  const boxes = [];
  let { left, top, width, height } = area;
  /** @type {Pruned[]} */
  let row = [];
  let sum = 0;
  const place = () => {
    const upright = width >= height;
    const thick = sum / (upright ? height : width);
    let at = upright ? top : left;
    for (const node of row) {
      const long = (node.bytes * scale) / thick;
      boxes.push(
        upright
          ? { node, left, top: at, width: thick, height: long }
          : { node, left: at, top, width: long, height: thick },
      );
      at += long;
    }
    if (upright) {
      left += thick;
      width -= thick;
    } else {
      top += thick;
      height -= thick;
    }
    row = [];
    sum = 0;
  };
  for (const node of nodes) {
    const one = node.bytes * scale;
    const side = Math.min(width, height);
    if (row.length) {
      const largest = row[0].bytes * scale;
      const before = worstRatio(largest, row[row.length - 1].bytes * scale, sum, side);
      if (worstRatio(largest, one, sum + one, side) > before) place();
    }
    row.push(node);
    sum += one;
  }
  if (row.length) place();
  return boxes;
}

/**
 * Boxes of a treemap in pixels. A box with room for it keeps a line for its own name above its children.
 * @param {Pruned} root
 * @param {number} width
 * @param {number} height
 * @returns {Array<Area & {node: Pruned, depth: number}>}
 */
export function treemapBoxes(root, width, height, line = 18, gap = 2) {
  const boxes = [{ node: root, left: 0, top: 0, width, height, depth: 0 }];
  for (let i = 0; i < boxes.length; i += 1) {
    const box = boxes[i];
    const head = box.height > 2 * line && box.width > 24 ? line : 0;
    const edge = box.width > 12 && box.height > 12 ? gap : 0;
    const inner = {
      left: box.left + edge,
      top: box.top + (head || edge),
      width: box.width - 2 * edge,
      height: box.height - (head || edge) - edge,
    };
    const nodes = box.node.children.filter((child) => child.bytes > 0).sort((one, two) => two.bytes - one.bytes);
    if (!nodes.length || inner.width < 3 || inner.height < 3) continue;
    for (const each of squarified(nodes, inner)) boxes.push({ ...each, depth: box.depth + 1 });
  }
  return boxes;
}

/**
 * The nodes below the root whose name holds `query`.
 * @param {Pruned} root
 * @param {string} query
 */
export function matchedNodes(root, query) {
  const wanted = query.toLowerCase();
  return new Set(
    nodesOf(root).filter((node) => !node.rest && node.parent && node.name?.toLowerCase().includes(wanted)),
  );
}
