import assert from "node:assert/strict";
import { test } from "node:test";
import {
  Kinds,
  aliveRows,
  kindMatcher,
  matchedStacks,
  moduleRows,
  ownFrame,
  shortFrame,
  stackRows,
} from "../../../ampmem/reporters/html/js/data/alive.js";
import {
  icicleBoxes,
  matchedNodes,
  nodesOf,
  prunedTree,
  treeOf,
  treemapBoxes,
} from "../../../ampmem/reporters/html/js/data/tree.js";
import { inkOn } from "../../../ampmem/reporters/html/js/figures/treeview.js";
import { cutPieces, heatmapCells, layoutOf, rowBytes } from "../../../ampmem/reporters/html/js/figures/addresses.js";

const wide = Array.from({ length: 3000 }, (_, i) => ({
  path: ["layers", String(i % 300), i % 2 ? "a" : "b", "deep"],
  bytes: 10 + ((i * 37) % 1000),
  category: i % 3,
}));

test("a pruned tree has the largest nodes, and every byte", () => {
  const whole = treeOf("all", wide);
  const pruned = prunedTree(whole, 500);
  const total = wide.reduce((sum, row) => sum + row.bytes, 0);
  assert.equal(pruned.bytes, total);
  const nodes = nodesOf(pruned);
  const named = nodes.filter((node) => !node.rest);
  assert.equal(named.length, 500);
  for (const node of nodes) {
    if (node.children.length)
      assert.equal(
        node.children.reduce((sum, child) => sum + child.bytes, 0),
        node.bytes,
      );
  }
  const all = [];
  const collect = (node) => {
    all.push(node.bytes);
    node.children.forEach(collect);
  };
  collect(whole);
  all.sort((one, two) => two - one);
  assert.equal(
    named.reduce((sum, node) => sum + node.bytes, 0),
    all.slice(0, 500).reduce((sum, bytes) => sum + bytes, 0),
  );
});

test("any name will do", () => {
  const rows = ["__proto__", "constructor", "toString", "0", " 0", ""].map((name) => ({
    path: [name, "__proto__"],
    bytes: 1,
    category: 0,
  }));
  const tree = prunedTree(treeOf("all", rows));
  assert.deepEqual(tree.children.map((child) => child.name).sort(), [
    "",
    " 0",
    "0",
    "__proto__",
    "constructor",
    "toString",
  ]);
  assert.equal({}.bytes, undefined);
});

test("a name that repeats at many depths is many nodes", () => {
  const depth = 3000;
  const tree = prunedTree(treeOf("all", [{ path: Array(depth).fill("f"), bytes: 5, category: 1 }]), 500);
  assert.equal(nodesOf(tree).length, 501);
});

test("an icicle fills the width of every parent", () => {
  const boxes = icicleBoxes(prunedTree(treeOf("all", wide)));
  const byNode = new Map(boxes.map((box) => [box.node, box]));
  for (const { node, left, width } of boxes) {
    if (!node.children.length) continue;
    const children = node.children.map((child) => byNode.get(child));
    assert.ok(Math.abs(children.reduce((sum, child) => sum + child.width, 0) - width) < 1e-9);
    assert.ok(Math.abs(children[0].left - left) < 1e-9);
  }
});

test("a treemap's areas are in proportion, inside their parents, and do not overlap", () => {
  const rows = [
    ["a", 60],
    ["b", 30],
    ["c", 10],
  ].map(([name, bytes]) => ({ path: [name], bytes, category: 0 }));
  const boxes = treemapBoxes(prunedTree(treeOf("all", rows)), 600, 400, 0, 0);
  const top = boxes.filter((box) => box.depth === 1);
  for (const box of top) {
    assert.ok(Math.abs(box.width * box.height - (240_000 * box.node.bytes) / 100) < 1e-6);
    assert.ok(box.left >= 0 && box.top >= 0 && box.left + box.width <= 600.001 && box.top + box.height <= 400.001);
  }
  for (const one of top) {
    for (const two of top) {
      if (one === two) continue;
      const apart =
        one.left + one.width <= two.left + 1e-6 ||
        two.left + two.width <= one.left + 1e-6 ||
        one.top + one.height <= two.top + 1e-6 ||
        two.top + two.height <= one.top + 1e-6;
      assert.ok(apart);
    }
  }
});

test("matched nodes are named like that, and never the root", () => {
  const rows = [
    { path: ["f", "g", "f"], bytes: 5, category: 0 },
    { path: ["g"], bytes: 2, category: 0 },
    { path: ["h"], bytes: 1, category: 0 },
  ];
  const tree = prunedTree(treeOf("fgh", rows));
  assert.equal(matchedNodes(tree, "F").size, 2);
  assert.equal(matchedNodes(tree, "g").size, 2);
  assert.equal(matchedNodes(tree, "fgh").size, 0);
});

const header = {
  texts: ["", "h.0.weight", "h.0", "aten::mm", "__proto__", "bfloat16"],
  frames: ["/x/train.py:9 main", "/site-packages/torch/nn/linear.py:1 forward"],
  stacks: [[], [0, 1]],
  shapes: ["", "[8, 128]", "[]"],
  kinds: {
    category: [0, 1, 1],
    bytes: [100, 400, 8],
    name: [1, 0, 4],
    module: [2, 2, 0],
    op: [0, 3, 0],
    stack: [1, 0, 1],
    phase: [0, 2, 3],
    dtype: [5, 0, 0],
    shape: [1, 2, 0],
  },
};
const kinds = new Kinds(header, [{ label: "Parameters" }, { label: "Activations" }]);

test("rows are the largest first, without the dead", () => {
  assert.deepEqual(aliveRows(kinds, Int32Array.of(2, 1, 0)), [
    { kind: 1, count: 1, bytes: 400 },
    { kind: 0, count: 2, bytes: 100 },
  ]);
  assert.deepEqual(
    [...moduleRows(kinds, Int32Array.of(2, 0, 1))],
    [
      { path: ["h", "0"], bytes: 200, category: 0 },
      { path: ["(no module)"], bytes: 8, category: 1 },
    ],
  );
  assert.deepEqual(
    [...stackRows(kinds, Int32Array.of(0, 1, 1))].map((row) => row.path),
    [["(no stack)"], header.frames],
  );
});

test("a search looks at every field, and all its words must be there", () => {
  const found = (query) => [0, 1, 2].filter(kindMatcher(kinds, query));
  assert.deepEqual(found(""), [0, 1, 2]);
  assert.deepEqual(found("MM"), [1]);
  assert.deepEqual(found("train.py"), [0, 2]);
  assert.deepEqual(found("activ backward"), [2]);
  assert.deepEqual(found("h.0 weight"), [0]);
  assert.deepEqual(found("__proto__"), [2]);
  assert.deepEqual(found("bfloat16"), [0]);
  assert.deepEqual(found("8×128"), [0]);
  assert.deepEqual(found("8x128"), [0]);
  assert.deepEqual(found("nothing"), []);
});

test("matched bytes are those of the whole stack, counted once", () => {
  const counts = Int32Array.of(2, 1, 1);
  assert.deepEqual(matchedStacks(kinds, counts, "Main"), { frames: 1, bytes: 208 });
  assert.deepEqual(matchedStacks(kinds, counts, "a"), { frames: 2, bytes: 208 });
  assert.deepEqual(matchedStacks(kinds, Int32Array.of(0, 1, 0), "main"), { frames: 0, bytes: 0 });
});

test("one's own frame is the innermost that is not a library's", () => {
  assert.equal(ownFrame(header.frames), header.frames[0]);
  assert.equal(ownFrame([header.frames[1]]), header.frames[1]);
  assert.equal(ownFrame([]), "");
  assert.equal(shortFrame("/a/b/train.py:9 main"), "main  train.py:9");
  assert.equal(shortFrame("C:\\x\\y.py:3 f g"), "f g  y.py:3");
  assert.equal(shortFrame("nothing like it"), "nothing like it");
});

test("ink can be read on any fill", () => {
  assert.equal(inkOn("#f2e67e"), "#0b0f16");
  assert.equal(inkOn("#532d74"), "#ffffff");
});

test("blocks of the address map are cut at the ends of rows, and no byte is lost", () => {
  const { pieces, starts, total } = layoutOf([
    {
      address: 1,
      bytes: 1000,
      blocks: [
        [0, 600, "a"],
        [600, 400, "cached"],
      ],
    },
    { address: 9, bytes: 500, blocks: [[0, 500, "b"]] },
  ]);
  assert.deepEqual(starts, [0, 1000]);
  assert.equal(total, 1500);
  const cut = cutPieces(pieces, 512);
  assert.equal(Math.round(cut.reduce((sum, piece) => sum + piece.width * 512, 0)), 1500);
  assert.ok(cut.every((piece) => piece.left + piece.width <= 1.0000001));
  assert.deepEqual(
    heatmapCells(cut, 3, 2).map((cell) => cell.key),
    ["a", "a", "cached", "cached", "b", "b"],
  );
  assert.equal(rowBytes(1), 512);
  assert.ok(rowBytes(80 * 2 ** 30) * 40 >= 80 * 2 ** 30);
});
