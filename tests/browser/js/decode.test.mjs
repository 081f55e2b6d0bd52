import assert from "node:assert/strict";
import { test } from "node:test";
import { gzipSync } from "node:zlib";
import { joinPlanes, unpackStream } from "../../../ampmem/reporters/html/js/data/decode.js";
import { liveOf } from "../../../ampmem/reporters/html/js/data/live.js";

/** Packs events `[kind, isFree, delta]` as the contract of the container says. */
export function packExact(kinds, events, { codeBytes = 1, timeBytes = 1, unit = 1 } = {}) {
  const header = {
    texts: ["", "a"],
    frames: ["f.py:1 g"],
    stacks: [[], [0]],
    kinds,
    code_bytes: codeBytes,
    time_bytes: timeBytes,
    time_unit_ns: unit,
    start_ns: 0,
  };
  const planes = (values, count) =>
    Array.from({ length: count }, (_, plane) =>
      Buffer.from(values.map((value) => Math.floor(value / 256 ** plane) % 256)),
    );
  return pack(header, [
    ...planes(
      events.map(([kind, free]) => 2 * kind + free),
      codeBytes,
    ),
    ...planes(
      events.map((event) => event[2]),
      timeBytes,
    ),
  ]);
}

function pack(header, parts) {
  let text = JSON.stringify(header);
  text += " ".repeat((8 - ((4 + text.length) % 8)) % 8);
  const length = Buffer.alloc(4);
  length.writeUInt32LE(text.length);
  return gzipSync(Buffer.concat([length, Buffer.from(text), ...parts])).toString("base64");
}

const kinds = {
  category: [0, 1],
  bytes: [100, 2 ** 40],
  name: [1, 0],
  module: [0, 0],
  op: [0, 0],
  stack: [1, 0],
  phase: [0, 2],
};

function random(seed) {
  let state = seed;
  return () => {
    state = (state * 1103515245 + 12345) % 2147483648;
    return state / 2147483648;
  };
}

test("planes are joined from the least significant", () => {
  assert.deepEqual([...joinPlanes(new Uint8Array([1, 2, 3, 4]), 0, 2, 2)], [1 + 3 * 256, 2 + 4 * 256]);
  assert.equal(joinPlanes(new Uint8Array([0, 0, 0, 0, 0, 1]), 0, 6, 1)[0], 256 ** 5);
});

test("an exact stream gives exact bytes at every position", async () => {
  const events = [
    [0, 0, 0],
    [1, 0, 300],
    [0, 0, 5],
    [0, 1, 7],
    [1, 1, 65536],
  ];
  const packed = packExact(kinds, events, { codeBytes: 2, timeBytes: 3, unit: 1000 });
  const live = liveOf(await unpackStream({ mode: "exact", events: 5, packed }, 3), null);
  assert.deepEqual([...live.totals], [0, 100, 2 ** 40 + 100, 2 ** 40 + 200, 2 ** 40 + 100, 100]);
  assert.deepEqual([...live.times], [0, 0, 300_000, 305_000, 312_000, 65_848_000]);
  assert.deepEqual([...live.aliveAt(3)], [2, 1]);
  assert.deepEqual([...live.made()], [2, 1]);
  assert.deepEqual(
    live.sample([1, 4]).map((each) => [...each]),
    [
      [100, 100],
      [0, 2 ** 40],
      [0, 0],
    ],
  );
  assert.deepEqual([...live.most], [200, 2 ** 40, 0]);
  assert.deepEqual([...live.totalsOf([true, false, true])], [0, 100, 100, 200, 100, 100]);
});

test("samples far apart are those of a walk over all events", async () => {
  const next = random(7);
  const many = { ...kinds, category: [0, 1, 1], bytes: [3, 1000, 7] };
  const events = [];
  const counts = [0, 0, 0];
  const expected = [[0, 0]];
  for (let i = 0; i < 30_000; i += 1) {
    const kind = Math.floor(next() * 3);
    const free = counts[kind] > 0 && next() < 0.5 ? 1 : 0;
    counts[kind] += free ? -1 : 1;
    events.push([kind, free, 1]);
    expected.push([counts[0] * 3, counts[1] * 1000 + counts[2] * 7]);
  }
  const live = liveOf(
    await unpackStream({ mode: "exact", events: events.length, packed: packExact(many, events) }, 2),
    null,
  );
  const indices = [0, 1, 4095, 4096, 4097, 8192, 20_000, 20_001, 29_999, 30_000];
  const series = live.sample(indices);
  indices.forEach((index, i) => assert.deepEqual([series[0][i], series[1][i]], expected[index], `at ${index}`));
  // Forwards, backwards, and from the start again: each time what lives there, and no count that was given before changes.
  const kept = live.aliveAt(20_000);
  for (const index of [20_000, 20_001, 29_999, 4097, 4095, 0, 30_000, 19_999]) {
    const [one, two, three] = live.aliveAt(index);
    assert.deepEqual([one * 3, two * 1000 + three * 7], expected[index], `alive at ${index}`);
  }
  assert.deepEqual([kept[0] * 3, kept[1] * 1000 + kept[2] * 7], expected[20_000]);
});

test("no event at all is a run with one instant", async () => {
  const packed = packExact({ category: [], bytes: [], name: [], module: [], op: [], stack: [], phase: [] }, []);
  const live = liveOf(await unpackStream({ mode: "exact", events: 0, packed }, 2), null);
  assert.equal(live.length, 1);
  assert.deepEqual([...live.totals], [0]);
});

test("a reduced stream has its instants, and single allocations at the peak only", async () => {
  const floats = (...values) => Buffer.from(new Float64Array(values).buffer);
  const header = { texts: [""], frames: [], stacks: [[]], kinds, count: 3, peak_kinds: [[1, 2]] };
  const packed = pack(header, [floats(0, 500, 1000), floats(0, 7, 9), floats(1, 2, 3), floats(0, 2 ** 41, 4)]);
  const live = liveOf(await unpackStream({ mode: "reduced", events: 1000, packed }, 2), 500);
  assert.deepEqual([...live.totals], [1, 2 + 2 ** 41, 7]);
  assert.equal(live.indexOf(999), 1);
  assert.equal(live.position(2), 1000);
  assert.deepEqual([...live.aliveAt(1)], [0, 2]);
  assert.equal(live.aliveAt(0), null);
  assert.equal(live.made(), null);
});
