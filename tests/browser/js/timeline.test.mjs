import assert from "node:assert/strict";
import { test } from "node:test";
import { hashOfPlace, placeOfHash } from "../../../ampmem/reporters/html/js/common/permalink.js";
import { timeTicks } from "../../../ampmem/reporters/html/js/figures/ticks.js";
import { bandAt } from "../../../ampmem/reporters/html/js/timeline/chart.js";
import { openingOf, viewInWords } from "../../../ampmem/reporters/html/js/timeline/opening.js";
import { draggedView } from "../../../ampmem/reporters/html/js/timeline/overview.js";
import { timelineFigure } from "../../../ampmem/reporters/html/js/timeline/figure.js";
import { labelFor } from "../../../ampmem/reporters/html/js/timeline/phases.js";

const step = (index, first, last, peak, finished = true) => ({ index, finished, first, last, peak });
const run = (changes = {}) => ({
  failure: null,
  steps: [step(0, 10, 100, 30), step(1, 100, 200, 130)],
  phase_runs: [[0, "setup"], [10, "forward"], [20, "backward"], [40, "optimizer"], [100, "forward"], [110, "backward"]],
  peak: { position: 130, bytes: 2048, step: 1, said: "2.0 KiB" },
  stream: { events: 220 },
  ...changes,
});
const withUpdate = (start, between = 190) => [...run().phase_runs, [start, "optimizer"], [between, "between"]];
const shown = ({ step: each, first, last }) => [each.index, first, last];

const times = Float64Array.from({ length: 221 }, (_, i) => 1e9 + 1e6 * Math.floor(i / 5));
const live = { length: 221, times, position: (index) => index, indexOf: (position) => position };

test("a run opens on its last finished step", () => {
  assert.deepEqual(shown(openingOf(run())), [1, 100, 200]);
  const steps = [...run().steps, step(2, 200, 220, 210, false)];
  assert.deepEqual(shown(openingOf(run({ steps }))), [1, 100, 200]);
  assert.deepEqual(shown(openingOf(run({ steps, failure: { position: 210 } }))), [2, 200, 220]);
  assert.deepEqual(shown(openingOf(run({ steps: steps.slice(2) }))), [2, 200, 220]);
  assert.equal(openingOf(run({ steps: [] })), null);
});

test("an update that is longer than all before it is left out, unless the peak is in it", () => {
  assert.deepEqual(shown(openingOf(run({ phase_runs: withUpdate(140) }))), [1, 100, 140]);
  assert.deepEqual(shown(openingOf(run({ phase_runs: withUpdate(160) }))), [1, 100, 200]);
  assert.deepEqual(shown(openingOf(run({ phase_runs: withUpdate(120) }))), [1, 100, 200], "the peak is in it");
  // The update of a model that is trained between two others is not the end of the step.
  const runs = [...withUpdate(112, 113), [150, "forward"], [170, "backward"], [190, "optimizer"]];
  assert.deepEqual(shown(openingOf(run({ phase_runs: runs }))), [1, 100, 200]);
});

test("what is in view is said, and where the peak is if it is not", () => {
  const long = run({ phase_runs: withUpdate(140) });
  const said = (low, high) => viewInWords(long, live, { low, high }, false);
  assert.equal(said(0, 220), "The whole run.");
  assert.equal(said(100, 200), "Step 1, the last.");
  assert.equal(said(100, 140), "Step 1, the last, without its update, which has 60 more events.");
  assert.equal(said(105, 131), "Events 105 to 131.");
  assert.equal(said(10, 100), "Step 0. The run's peak, 2.0 KiB in step 1, is not in view.");
  const inTime = (low, high) => viewInWords(long, live, { low, high }, true);
  assert.equal(inTime(1.02, 1.04), "Step 1, the last.", "several events have one time");
  assert.equal(inTime(1.02, 1.028), "Step 1, the last, without its update, which has 60 more events.");
  long.steps[0].peak_bytes = long.peak.bytes;
  assert.equal(said(10, 100), "Step 0. The run's peak, 2.0 KiB, was first reached in step 1.");
});

test("ticks of time are round, in one unit that fits what is in view", () => {
  assert.deepEqual(timeTicks({ low: 0, high: 4.2 }, 5).labels, ["0 s", "1 s", "2 s", "3 s", "4 s"]);
  assert.deepEqual(timeTicks({ low: 0.1, high: 0.4 }, 4).labels, ["100 ms", "200 ms", "300 ms", "400 ms"]);
  assert.deepEqual(timeTicks({ low: 3.9, high: 3.901 }, 3).labels, ["3.9000 s", "3.9005 s", "3.9010 s"]);
  assert.deepEqual(timeTicks({ low: 0, high: 2e-6 }, 2).labels, ["0 µs", "1 µs", "2 µs"]);
  const { values, labels } = timeTicks({ low: 1.23456, high: 77.7 }, 6);
  assert.equal(values.length, labels.length);
  assert.ok(values.every((value) => value >= 1.23456 && value <= 77.7));
});

test("a phase that is too narrow for its name has a letter, and no two have the same", () => {
  assert.equal(labelFor("backward", 100), "backward");
  assert.equal(labelFor("between", 20), "");
  const letters = ["data", "forward", "backward", "optimizer", "evaluation"].map((name) => labelFor(name, 20));
  assert.equal(new Set(letters).size, 5);
  assert.equal(labelFor("backward", 10), "");
});

test("the window is moved, resized and chosen, and does not leave the run", () => {
  const whole = { low: 0, high: 100 };
  const view = { low: 20, high: 40 };
  assert.deepEqual(draggedView("move", view, 30, 50, whole), { low: 40, high: 60 });
  assert.deepEqual(draggedView("move", view, 30, 99, whole), { low: 80, high: 100 });
  assert.deepEqual(draggedView("start", view, 20, 0, whole), { low: 0, high: 40 });
  assert.deepEqual(draggedView("start", view, 20, 70, whole), { low: 40, high: 70 }, "past the other edge");
  assert.deepEqual(draggedView("end", view, 40, 90, whole), { low: 20, high: 90 });
  assert.deepEqual(draggedView("choose", view, 70, 60, whole), { low: 60, high: 70 });
});

test("a point is in the band of the series that is drawn there", () => {
  const values = [10, 5, 20];
  const all = [true, true, true];
  assert.deepEqual([5, 12, 15, 34, 36].map((bytes) => bandAt(values, all, bytes)), [0, 1, 1, 2, null]);
  assert.equal(bandAt(values, [true, false, true], 12), 2);
});

const nowhere = { section: "", run: null, view: null, byTime: null, pin: null, theme: null };

test("a place is the same after it was in an address", () => {
  const places = [
    nowhere,
    { ...nowhere, section: "stacks" },
    { ...nowhere, run: "amp & more = 100 % #1", pin: 12 },
    { section: "timeline", run: "fp32", view: { low: 0.000000001, high: 3.25 }, byTime: true, pin: 0, theme: "dark" },
    { ...nowhere, view: { low: 100, high: 2000 } },
  ];
  for (const place of places) assert.deepEqual(placeOfHash(hashOfPlace(place)), place);
  assert.equal(hashOfPlace(nowhere), "");
  assert.equal(hashOfPlace({ ...nowhere, section: "stacks", pin: 3 }), "#stacks&pin=3");
});

test("what an address says wrongly is left out", () => {
  const bad = ["#%E0%A4%A", "#&&&=", "#from=1", "#from=5&to=5", "#from=a&to=1e9", "#pin=-1", "#pin=1.5", "#theme=<b>", "#axis=x"];
  for (const hash of bad) assert.deepEqual(placeOfHash(hash), nowhere, hash);
  assert.equal(placeOfHash("#no-such-section").section, "no-such-section", "the page knows its sections");
});

test("all of the peak's label is in the picture, wherever the peak is", () => {
  for (const width of [300, 700, 1200]) {
    for (const x of [0, 30, 50, 70, 100]) {
      const peak = { x, bytes: 90, label: "step 12 peak 74.2 MiB, 74.2 MiB of it requested" };
      const drawing = {
        x: Float64Array.of(0, 100),
        series: [Float64Array.of(10, 90)],
        shown: [true],
        present: [true],
        live: 1,
        view: { low: 0, high: 100 },
        byTime: false,
        width,
        height: 300,
        draggable: false,
        steps: [],
        failure: null,
        peak,
      };
      const category = { key: "parameters", label: "Parameters", light: "#000", dark: "#fff", pattern: "" };
      const [label] = timelineFigure(drawing, [category], "light").layout.annotations;
      const lines = label.text.split("<br>");
      const half = (7 * Math.max(...lines.map((line) => line.length))) / 2;
      const middle = ((width - 76) * x) / 100 + label.ax;
      assert.ok(middle - half >= 0 && middle + half <= width - 76, `${width} ${x}`);
    }
  }
});
