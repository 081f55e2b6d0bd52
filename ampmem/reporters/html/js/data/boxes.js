/** Where the boxes of a tree lie. */
/** @import { Drawn } from "./tree.js" */

/** @typedef {{left: number, top: number, width: number, height: number}} Area */

/**
 * Boxes of an icicle: `left` and `width` in the unit interval.
 * @param {Drawn} root
 * @returns {Array<{node: Drawn, left: number, width: number}>}
 */
export function icicleBoxes(root) {
  const boxes = [{ node: root, left: 0, width: 1 }];
  for (let i = 0; i < boxes.length; i += 1) {
    const { node, left, width } = boxes[i];
    let at = left;
    for (const child of node.children) {
      const part = node.branch.bytes ? (width * child.branch.bytes) / node.branch.bytes : 0;
      boxes.push({ node: child, left: at, width: part });
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
 * @param {Drawn[]} nodes
 * @param {Area} area
 */
function squarified(nodes, area) {
  const total = nodes.reduce((sum, node) => sum + node.branch.bytes, 0);
  const scale = (area.width * area.height) / total;
  /** @type {Array<Area & {node: Drawn}>} */
  const boxes = [];
  let { left, top, width, height } = area;
  /** @type {Drawn[]} */
  let row = [];
  let sum = 0;
  const place = () => {
    const upright = width >= height;
    const thick = sum / (upright ? height : width);
    let at = upright ? top : left;
    for (const node of row) {
      const long = (node.branch.bytes * scale) / thick;
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
    const one = node.branch.bytes * scale;
    const side = Math.min(width, height);
    if (row.length) {
      const largest = row[0].branch.bytes * scale;
      const before = worstRatio(largest, row[row.length - 1].branch.bytes * scale, sum, side);
      if (worstRatio(largest, one, sum + one, side) > before) place();
    }
    row.push(node);
    sum += one;
  }
  if (row.length) place();
  return boxes;
}

/**
 * Boxes of a treemap in pixels. Children are drawn where there is room for a line with the name of their parent above
 * them, which is then `open`.
 * @param {Drawn} root
 * @param {number} width
 * @param {number} height
 * @returns {Array<Area & {node: Drawn, open: boolean}>}
 */
export function treemapBoxes(root, width, height, line = 18, gap = 2, narrowest = 44) {
  const boxes = [{ node: root, left: 0, top: 0, width, height, open: false }];
  for (let i = 0; i < boxes.length; i += 1) {
    const box = boxes[i];
    if (!box.node.children.length || box.height <= 2 * line || box.width <= narrowest) continue;
    box.open = true;
    const inner = {
      left: box.left + gap,
      top: box.top + line,
      width: box.width - 2 * gap,
      height: box.height - line - gap,
    };
    const nodes = box.node.children.toSorted((one, two) => two.branch.bytes - one.branch.bytes);
    for (const each of squarified(nodes, inner)) boxes.push({ ...each, open: false });
  }
  return boxes;
}
