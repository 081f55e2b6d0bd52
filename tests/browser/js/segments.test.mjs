import assert from "node:assert/strict";
import { test } from "node:test";
import { withChanges } from "../../../ampmem/reporters/html/js/data/reduce.js";
import { filledSegments, segmentsAt } from "../../../ampmem/reporters/html/js/data/segments.js";

const columns = (rows) => {
  const names = ["since", "address", "bytes", "pages"];
  return Object.fromEntries(names.map((name, i) => [name, rows.map((row) => row[i])]));
};

test("segments come, go, and stay apart where they are whole", () => {
  const rows = columns([
    [0, 100, 50, 0],
    [2, 150, 50, 0],
    [3, 100, -50, 0],
  ]);
  const at = (index) => segmentsAt(rows, index).map(({ address, bytes }) => [address, bytes]);
  assert.deepEqual(at(0), [[100, 50]]);
  assert.deepEqual(at(2), [
    [100, 50],
    [150, 50],
  ]);
  assert.deepEqual(at(9), [[150, 50]]);
});

test("pages of an expandable segment are one, and any part of them can go", () => {
  const rows = columns([
    [0, 100, 50, 1],
    [0, 150, 50, 1],
    [0, 200, 50, 2],
    [1, 120, -60, 1],
  ]);
  const at = (index) => segmentsAt(rows, index).map(({ address, bytes }) => [address, bytes]);
  assert.deepEqual(at(0), [
    [100, 100],
    [200, 50],
  ]);
  assert.deepEqual(at(1), [
    [100, 20],
    [180, 20],
    [200, 50],
  ]);
});

test("segments are filled from start to end, whatever the blocks say of their sizes", () => {
  const segments = [
    { address: 100, bytes: 50 },
    { address: 200, bytes: 10 },
  ];
  const blocks = [
    { address: 90, bytes: 5, key: "lost" },
    { address: 110, bytes: 30, key: "a" },
    { address: 120, bytes: 100, key: "b" },
    { address: 200, bytes: 10, key: "c" },
  ];
  assert.deepEqual(filledSegments(segments, blocks), [
    {
      address: 100,
      bytes: 50,
      blocks: [
        [0, 10, "cached"],
        [10, 10, "a", blocks[1]],
        [20, 30, "b", blocks[2]],
      ],
    },
    { address: 200, bytes: 10, blocks: [[0, 10, "c", blocks[3]]] },
  ]);
});

test("every change of what is reserved is drawn, of very many the extremes", () => {
  const drawn = Uint32Array.from([0, 500, 999]);
  assert.equal(withChanges(drawn, [], new Float64Array(1000), 0, 999), drawn);
  assert.deepEqual([...withChanges(drawn, [3, 500, 700], new Float64Array(1000), 0, 600)], [0, 3, 500, 999]);
  const values = Float64Array.from({ length: 1000 }, (_, i) => (i === 613 ? 1e6 : i === 614 ? -1 : i % 7));
  const all = Array.from(values.keys());
  const found = [...withChanges(drawn, all, values, 0, 999, 20)];
  assert.ok(found.includes(613) && found.includes(614));
  assert.ok(found.length <= 44);
  assert.deepEqual(found, [...new Set(found)].sort((a, b) => a - b));
});
