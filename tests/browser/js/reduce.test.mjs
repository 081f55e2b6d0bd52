import assert from "node:assert/strict";
import { test } from "node:test";
import { ascending, drawnInstants } from "../../../ampmem/reporters/html/js/data/reduce.js";
import {
  clampedView,
  convertedView,
  instantsOf,
  viewAround,
  wholeView,
  zoomedView,
} from "../../../ampmem/reporters/html/js/timeline/view.js";
import { byteTicks } from "../../../ampmem/reporters/html/js/figures/ticks.js";
import { phaseBoxes } from "../../../ampmem/reporters/html/js/timeline/phases.js";

const spiky = Float64Array.from({ length: 50_000 }, (_, i) => 1000 + 900 * Math.sin(i / 3000) + ((i * 7919) % 101));
spiky[31_337] = 123_456;
spiky[31_338] = -5;
const uneven = Float64Array.from(spiky, (_, i) => (i < 40_000 ? i : 40_000 + (i - 40_000) * 1e6));
const extremesOf = (values) => [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))];

for (const [name, times] of [
  ["events", null],
  ["time", uneven],
]) {
  test(`every view keeps its extremes and its ends, in ${name}`, () => {
    for (const [first, last] of [
      [0, 49_999],
      [31_000, 39_000],
      [100, 2300],
      [31_337, 49_000],
    ]) {
      const { indices, every } = drawnInstants(spiky, first, last, times);
      assert.equal(indices[0], first);
      assert.equal(indices.at(-1), last);
      assert.ok(indices.length <= 2202);
      for (let i = 1; i < indices.length; i += 1) assert.ok(indices[i] > indices[i - 1]);
      assert.deepEqual(
        extremesOf(Array.from(indices, (index) => spiky[index])),
        extremesOf(spiky.subarray(first, last + 1)),
      );
      assert.equal(every, last - first < 2200);
    }
  });
}

test("few instants are all drawn", () => {
  assert.deepEqual([...drawnInstants(new Float64Array([1, 5, 3]), 0, 2).indices], [0, 1, 2]);
  assert.deepEqual(drawnInstants(spiky, 7, 7), { indices: new Uint32Array([7]), every: true });
});

test("each bucket's own extremes are drawn", () => {
  const { indices } = drawnInstants(spiky, 0, 49_999, null, 100);
  const drawn = new Set(indices);
  for (let bucket = 0; bucket < 100; bucket += 1) {
    const part = spiky.subarray(bucket * 500, (bucket + 1) * 500);
    assert.ok(drawn.has(bucket * 500 + part.indexOf(Math.max(...part))));
    assert.ok(drawn.has(bucket * 500 + part.indexOf(Math.min(...part))));
  }
});

test("equal times are told apart by almost nothing", () => {
  const values = ascending(new Float64Array([0, 5, 5, 5, 10]));
  for (let i = 1; i < 5; i += 1) assert.ok(values[i] > values[i - 1]);
  assert.ok(Math.abs(values[3] - 5) < 1e-5);
});

const live = {
  length: 101,
  times: Float64Array.from({ length: 101 }, (_, i) => i * i * 1e6),
  position: (i) => i,
  indexOf: (p) => Math.max(0, Math.min(100, Math.floor(p))),
};

test("a view stays inside the run and never vanishes", () => {
  assert.deepEqual(clampedView(live, { low: -50, high: 20 }, false), { low: 0, high: 70 });
  assert.deepEqual(clampedView(live, { low: -500, high: 500 }, false), { low: 0, high: 100 });
  const tiny = clampedView(live, { low: 50, high: 50 }, false);
  assert.ok(tiny.high - tiny.low >= 4);
});

test("zooming keeps the centre where it is", () => {
  assert.deepEqual(zoomedView({ low: 0, high: 100 }, 0.5, 20), { low: 10, high: 60 });
  assert.deepEqual(zoomedView({ low: 50, high: 100 }, 0.5, 20), { low: 62.5, high: 87.5 });
});

test("a view in events is the same in time and back", () => {
  const view = { low: 10, high: 20 };
  const inTime = convertedView(live, view, false, true);
  assert.deepEqual(inTime, { low: 0.1, high: 0.4 });
  assert.deepEqual(convertedView(live, inTime, true, false), view);
  assert.deepEqual(instantsOf(live, { low: 10.5, high: 19.5 }, false), { first: 10, last: 20 });
  assert.deepEqual(wholeView(live, true), { low: 0, high: 10 });
  assert.deepEqual(viewAround(live, 5, false), { low: 0, high: 25 });
});

test("ticks are round in binary units", () => {
  assert.deepEqual(byteTicks(10 * 2 ** 30).labels, ["0 GiB", "2 GiB", "4 GiB", "6 GiB", "8 GiB", "10 GiB"]);
  assert.deepEqual(byteTicks(0.9 * 2 ** 20).labels.at(-1), "800 KiB");
  assert.ok(byteTicks(1).values.length >= 2);
});

test("narrow phases join their neighbour, and none reaches out of the view", () => {
  const runs = [
    [0, "setup"],
    [10, "forward"],
    [50, "backward"],
    [51, "optimizer"],
  ];
  const boxes = phaseBoxes(runs, 100, (p) => p, { low: 5, high: 105 }, 100);
  assert.deepEqual(
    boxes.map(({ name, left, right }) => [name, left, right]),
    [
      ["setup", 0, 5],
      ["forward", 5, 45],
      ["backward", 45, 46],
      ["optimizer", 46, 95],
    ],
  );
  assert.equal(phaseBoxes(runs, 100, (p) => p, { low: 0, high: 1000 }, 100).length, 3);
});
