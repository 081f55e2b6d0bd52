import assert from "node:assert/strict";
import { test } from "node:test";
import {
  Kinds,
  aliveRows,
  inLayers,
  kindMatcher,
  matchedStacks,
  moduleRows,
  ownFrame,
  shortFrame,
  stackRows,
} from "../../../ampmem/reporters/html/js/data/alive.js";
import { Cells } from "../../../ampmem/reporters/html/js/data/rows.js";
import { icicleBoxes, treemapBoxes } from "../../../ampmem/reporters/html/js/data/boxes.js";
import { moduleBranch, numbered, stackBranch } from "../../../ampmem/reporters/html/js/data/fold.js";
import { matchedNodes, nodesOf, prunedTree, treeOf } from "../../../ampmem/reporters/html/js/data/tree.js";
import { cutInMiddle, fittingText } from "../../../ampmem/reporters/html/js/figures/labels.js";
import { inkOn, stripes } from "../../../ampmem/reporters/html/js/figures/treebox.js";
import { cutPieces, heatmapCells, layoutOf, rowBytes } from "../../../ampmem/reporters/html/js/figures/addresses.js";

const wide = Array.from({ length: 3000 }, (_, i) => ({
  path: ["layers", `m${"abcdefghij"[i % 10]}${"abcdefghij"[Math.floor(i / 10) % 10]}`, i % 2 ? "a" : "b", "deep"],
  bytes: 10 + ((i * 37) % 1000),
  category: i % 3,
  kind: i,
}));

/** @param {Iterable<[path: string, bytes: number, category?: number]>} rows */
function modules(rows) {
  const paths = Array.from(rows, ([path, bytes, category = 0], kind) => ({
    path: path.split("."),
    bytes,
    category,
    kind,
  }));
  return moduleBranch(treeOf("all", paths));
}

const names = (branches) => branches.map(({ name }) => name);

const sum = (values) => values.reduce((all, value) => all + value, 0);

/** Every byte of a branch is in what is drawn of it. */
function assertWhole(drawn) {
  for (const { branch, children } of nodesOf(drawn)) {
    if (children.length) assert.equal(sum(children.map((child) => child.branch.bytes)), branch.bytes);
    assert.equal(sum(branch.mix), branch.bytes);
  }
}

test("a pruned tree has the largest nodes, and every byte", () => {
  for (const branch of [moduleBranch(treeOf("all", wide)), stackBranch(treeOf("all", wide))]) {
    const pruned = prunedTree(branch, 100);
    assert.equal(pruned.branch.bytes, sum(wide.map((row) => row.bytes)));
    assertWhole(pruned);
    const named = nodesOf(pruned).filter((node) => node.branch.meaning !== "rest");
    assert.ok(named.length > 90 && named.length <= 101, named.length);
    const all = nodesOf(prunedTree(branch, 1e6)).map((node) => node.branch.bytes);
    all.sort((one, two) => two - one);
    assert.equal(sum(named.map((node) => node.branch.bytes)), sum(all.slice(0, named.length)));
  }
});

test("what is left out can be opened, and is what it stands for", () => {
  const pruned = prunedTree(moduleBranch(treeOf("all", wide)), 100);
  const [rest] = nodesOf(pruned).filter((node) => node.branch.meaning === "rest");
  const opened = prunedTree(rest.branch, 1e6);
  assert.equal(opened.branch.bytes, rest.branch.bytes);
  assert.equal(opened.children.length, rest.branch.members.length);
  assertWhole(opened);
  const left = wide.filter((row) => rest.branch.kinds.has(row.kind));
  assert.equal(sum(left.map((row) => row.bytes)), rest.branch.bytes);
});

test("of branches that are equal all are drawn or none", () => {
  const rows = Array.from({ length: 200 }, (_, i) => [0, 1, 2].map((part) => [`h.${i}.part${"abc"[part]}`, 10]));
  const fold = modules(rows.flat()).children[0].children[0];
  const drawn = prunedTree(fold, 500);
  assert.deepEqual(new Set(drawn.children.map((child) => child.children.length)), new Set([0]));
  assert.equal(drawn.children.length, 200);
  assert.equal(prunedTree(fold, 100).children.length, 100, "what is opened shows something");
});

test("repeated siblings that are alike are one, in natural order, and open", () => {
  const layers = Array.from({ length: 200 }, (_, i) => [
    [`net.layers.${i}.norm`, 2, 0],
    [`net.layers.${i}.fc`, i === 7 ? 900 : 100 + (i % 20), 1],
  ]);
  const root = modules([["net.head", 50], ...layers.reverse().flat(), ["net.embed", 1000]]);
  const net = root.children[0];
  assert.deepEqual(names(net.children), ["head", "layers", "embed"]);
  const [fold, odd] = net.children[1].children;
  assert.deepEqual([fold.name, fold.meaning, fold.members.length], ["0 … 199", "alike", 199]);
  assert.deepEqual([odd.name, odd.meaning, odd.bytes], ["7", "one", 902]);
  assert.deepEqual(names(fold.members).slice(0, 4), ["0", "1", "2", "3"]);
  assert.deepEqual(names(fold.members).slice(6, 11), ["6", "8", "9", "10", "11"]);
  assert.deepEqual(names(fold.inside), names(fold.members));
  assert.deepEqual(names(fold.children).sort(), ["fc", "norm"], "unopened it shows its members put together");
  assert.equal(sum(fold.members.map((member) => member.bytes)), fold.bytes);
  assert.deepEqual(fold.mix, [398, fold.bytes - 398]);
  assert.equal(fold.kinds.size, 398);
  assertWhole(prunedTree(root));
  assertWhole(prunedTree(fold));
});

test("few siblings, other sizes and other names stay apart", () => {
  const apart = (rows) => names(modules(rows).children);
  assert.deepEqual(apart(["10", "2", "1"].map((name) => [name, 5])), ["1", "2", "10"]);
  assert.deepEqual(apart(["0", "1", "2", "3"].map((name) => [name, 5])), ["0–3"]);
  assert.deepEqual(apart(["a0", "b1", "a2", "b3"].map((name) => [name, 5])), ["a0", "a2", "b1", "b3"]);
  assert.deepEqual(
    apart([80, 81, 99, 100, 101].map((bytes, i) => [`layer${i}`, bytes])),
    ["layer0", "layer1–4"],
    "the largest is at most a quarter larger than the smallest",
  );
  const alternating = Array.from({ length: 8 }, (_, i) => [String(i), i % 2 ? 10 : 100]);
  assert.deepEqual(apart(alternating), ["0 … 6", "1 … 7"]);
  assert.deepEqual(apart([["0", 5, 1], ["(no module)", 5, 2]]), ["0", "(no module)"]);
});

test("the number of a name is its last", () => {
  assert.deepEqual(numbered("block2_conv10x"), { head: "block2_conv", digits: "10", tail: "x" });
  assert.deepEqual(numbered("7"), { head: "", digits: "7", tail: "" });
  assert.equal(numbered("(no module)"), null);
  assert.equal(numbered("9".repeat(20)), null);
});

const frame = (path, bytes, kind) => ({ path: path.split(" "), bytes, category: kind % 2, kind });

test("frames at the root that only call one another are one line", () => {
  const rows = [frame("a b c d x", 5, 0), frame("a b c d y", 3, 1), frame("(no stack)", 2, 2), frame("a b c d x", 4, 3)];
  const root = stackBranch(treeOf("all", rows));
  const [run, none] = root.inside;
  assert.deepEqual([run.name, run.meaning, run.bytes], ["d", "run", 12]);
  assert.deepEqual(names(run.members), ["a", "b", "c", "d"]);
  assert.deepEqual(names(run.children), ["x", "y"]);
  assert.deepEqual(names(run.inside), ["a"]);
  assert.deepEqual([...run.kinds].sort(), [0, 1, 3]);
  assert.equal(none.meaning, "one");
  assertWhole(prunedTree(root));
  assert.equal(nodesOf(prunedTree(run)).length, 10);
  // Two frames are as short as one line that says so; what has bytes of its own ends a run.
  const short = stackBranch(treeOf("all", [frame("a b x", 5, 0), frame("a b y", 3, 1)]));
  assert.deepEqual(names(short.inside), ["a"]);
  const own = stackBranch(treeOf("all", [frame("a b c d", 5, 0), frame("a b", 3, 1)]));
  assert.deepEqual(names(own.inside), ["a"]);
});

test("any name will do", () => {
  const rows = ["__proto__", "constructor", "toString", "0", " 0", ""].map((name) => ({
    path: [name, "__proto__"],
    bytes: 1,
    category: 0,
    kind: 0,
  }));
  const expected = ["", " 0", "0", "__proto__", "constructor", "toString"];
  for (const branch of [moduleBranch(treeOf("all", rows)), stackBranch(treeOf("all", rows))]) {
    assert.deepEqual(names(prunedTree(branch).children.map((child) => child.branch)).sort(), expected);
  }
  assert.equal({}.bytes, undefined);
});

test("a name that repeats at many depths is many nodes", () => {
  const depth = 3000;
  const tree = moduleBranch(treeOf("all", [{ path: Array(depth).fill("f"), bytes: 5, category: 1, kind: 0 }]));
  assert.equal(nodesOf(prunedTree(tree, 500)).length, 500);
});

test("an icicle fills the width of every parent", () => {
  const boxes = icicleBoxes(prunedTree(moduleBranch(treeOf("all", wide))));
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
  ].map(([name, bytes]) => ({ path: [name], bytes, category: 0, kind: 0 }));
  const boxes = treemapBoxes(prunedTree(moduleBranch(treeOf("all", rows))), 600, 400, 0, 0);
  const top = boxes.filter((box) => box.node.depth === 1);
  for (const box of top) {
    assert.ok(Math.abs(box.width * box.height - (240_000 * box.node.branch.bytes) / 100) < 1e-6);
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
  const rows = [frame("f g f", 5, 0), frame("f g k", 5, 0), frame("g", 2, 0), frame("h", 1, 0)];
  const tree = prunedTree(stackBranch(treeOf("fgh", rows)));
  assert.equal(matchedNodes(tree, "F").size, 2);
  assert.equal(matchedNodes(tree, "g").size, 2);
  assert.equal(matchedNodes(tree, "fgh").size, 0);
  const run = prunedTree(stackBranch(treeOf("all", [frame("a b c d", 5, 0), frame("a b c e", 5, 0)])));
  assert.deepEqual(names([...matchedNodes(run, "b")].map((node) => node.branch)), ["c"], "in a run its line is marked");
});

test("labels are whole where they fit, else shorter, else cut in the middle or left out", () => {
  const widthOf = (text) => 10 * text.length;
  assert.equal(fittingText(["a name · 5 B", "a name"], 120, widthOf, true), "a name · 5 B");
  assert.equal(fittingText(["a name · 5 B", "a name"], 119, widthOf, true), "a name");
  assert.equal(fittingText(["transformer_encoder"], 120, widthOf, true), "transf…coder");
  assert.equal(fittingText(["transformer_encoder"], 120, widthOf, false), "");
  assert.equal(fittingText(["transformer_encoder"], 60, widthOf, true), "");
  assert.equal(cutInMiddle("abcdef", 6), "abcdef");
  assert.equal(cutInMiddle("😀😀😀😀😀", 3), "😀…😀");
});

test("stripes have the categories in proportion", () => {
  const looks = ["#000000", "#111111", "#222222"].map((light) => ({ light, dark: "#ffffff" }));
  const mix = [30];
  mix[2] = 10;
  assert.equal(
    stripes(mix, looks, "to top"),
    "linear-gradient(to top, light-dark(#000000, #ffffff) 0.00% 75.00%, light-dark(#222222, #ffffff) 75.00% 100.00%)",
  );
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
    what: [0, 0, 0],
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
      { path: ["h", "0"], bytes: 200, category: 0, kind: 0 },
      { path: ["(no module)"], bytes: 8, category: 1, kind: 2 },
    ],
  );
  const paths = (libraries) => [...stackRows(kinds, Int32Array.of(0, 1, 1), libraries)].map((row) => row.path);
  assert.deepEqual(paths(true), [["(no stack)"], header.frames]);
  assert.deepEqual(paths(false), [["(no stack)"], header.frames.slice(0, 1)]);
});

test("equal layers are one row, which stands where its largest stood", () => {
  const texts = ["", "h.0.weight", "h.1.weight", "h.10.weight", "head.weight", "h.0", "h.1", "h.10", "head"];
  const column = { op: [0, 0, 0, 0], what: [0, 0, 0, 0], stack: [0, 0, 0, 0], phase: [0, 0, 0, 0] };
  const names = { name: [1, 2, 3, 4], module: [5, 6, 7, 8], dtype: [0, 0, 0, 0], shape: [0, 0, 0, 0] };
  const sizes = { category: [0, 0, 0, 0], bytes: [1000, 995, 700, 998] };
  const layered = new Kinds({ ...header, texts, kinds: { ...column, ...names, ...sizes } }, kinds.categories);
  const groups = inLayers(layered, aliveRows(layered, Int32Array.of(1, 2, 1, 1)));
  assert.deepEqual(
    groups.map(({ rows, count, bytes, sum }) => [rows.map((row) => row.kind), count, bytes, sum]),
    [
      [[0, 1], 3, 1000, 2990],
      [[3], 1, 998, 998],
      [[2], 1, 700, 700],
    ],
  );
  const cells = new Cells(layered);
  assert.deepEqual(
    groups.map((group) => [cells.value("what", group), cells.value("module", group)]),
    [
      ["h.*.weight", "h.*"],
      ["head.weight", "head"],
      ["h.10.weight", "h.10"],
    ],
  );
});

test("a stack of library frames only is not one without frames", () => {
  const hidden = new Kinds({ ...header, stacks: [[], [1]] }, kinds.categories);
  const rows = [...stackRows(hidden, Int32Array.of(2, 1, 1), false)];
  assert.deepEqual(
    rows.map((row) => row.path[0]),
    ["(library frames only)", "(no stack)", "(library frames only)"],
  );
  assert.equal(sum(rows.map((row) => row.bytes)), 608);
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
  assert.deepEqual(matchedStacks(kinds, counts, "Main"), { frames: 1, libraries: 0, bytes: 208 });
  assert.deepEqual(matchedStacks(kinds, counts, "a"), { frames: 2, libraries: 1, bytes: 208 });
  assert.deepEqual(matchedStacks(kinds, Int32Array.of(0, 1, 0), "main"), { frames: 0, libraries: 0, bytes: 0 });
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
