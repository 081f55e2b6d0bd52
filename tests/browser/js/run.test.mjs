import assert from "node:assert/strict";
import { test } from "node:test";
import { breakdownOf, compositionOf, comparedAt, waterfallOf } from "../../../ampmem/reporters/html/js/data/run.js";

const page = {
  autocast_precisions: ["amp"],
  categories: ["parameters", "master_copies", "cast_copies", "activations"].map((key) => ({ key })),
  marks: { after_forward: "after forward", after_backward: "after backward", after_optimizer: "after update", peak: "peak" },
  precision_copies: ["master_copies", "cast_copies"],
};
const live = (parameters, master_copies, cast_copies, activations) => ({ parameters, master_copies, cast_copies, activations });
const step = (index, finished, forward, peak) => ({
  index,
  finished,
  marks: { after_forward: forward, after_backward: null, after_optimizer: live(4, 0, 0, 0) },
  peak: { categories: peak },
});

test("the breakdown is of the last step that ended, with the copies together where there are some", () => {
  const steps = [step(0, true, live(4, 2, 1, 3), live(4, 2, 0, 5)), step(1, false, null, live(9, 9, 9, 9))];
  const { step: index, columns, rows } = breakdownOf({ arm: { name: "fp32" }, steps }, page);
  assert.equal(index, 0);
  assert.deepEqual(columns, ["after forward", "after backward", "after update", "peak"]);
  assert.deepEqual(Object.fromEntries(rows.map(({ key, cells }) => [key, cells])), {
    parameters: [4, null, 4, 4],
    precision_copies: [3, null, 0, 2],
    master_copies: [2, null, 0, 2],
    cast_copies: [1, null, 0, 0],
    activations: [3, null, 0, 5],
    total: [10, null, 4, 11],
  });
});

test("without copies only a run under autocast has their row", () => {
  const steps = [step(0, true, live(4, 0, 0, 0), live(4, 0, 0, 0))];
  const keys = (name) => breakdownOf({ arm: { name }, steps }, page).rows.map(({ key }) => key);
  assert.deepEqual(keys("amp"), ["parameters", "precision_copies", "total"]);
  assert.deepEqual(keys("fp32"), ["parameters", "total"]);
});

test("a composition has the largest first and leaves out what is not there", () => {
  const { rows, total } = compositionOf(live(4, 0, 1, 7), {}, {});
  assert.deepEqual(rows, [{ key: "activations", bytes: 7 }, { key: "parameters", bytes: 4 }, { key: "cast_copies", bytes: 1 }]);
  assert.equal(total, 12);
});

test("each instant has the categories of all runs, and totals that are their sums", () => {
  const steps = [step(1, true, live(4, 0, 0, 3), live(4, 0, 0, 5)), null, step(1, true, live(4, 0, 1, 1), live(4, 0, 0, 0))];
  const instants = comparedAt(steps, page.marks, page.categories);
  assert.deepEqual(instants.map(({ name }) => name), Object.values(page.marks));
  assert.deepEqual(instants[0].rows, [
    { key: "parameters", cells: [4, null, 4] },
    { key: "cast_copies", cells: [0, null, 1] },
    { key: "activations", cells: [3, null, 1] },
  ]);
  assert.deepEqual(instants.map(({ totals }) => totals), [[7, null, 6], [null, null, null], [4, null, 4], [9, null, 4]]);
});

test("a waterfall goes through every category that differs, and ends at the other run's bytes", () => {
  const steps = [step(1, true, live(4, 2, 0, 3), null), step(1, true, live(4, 0, 1, 1), null)];
  const [forward] = comparedAt(steps.map((each) => ({ ...each, peak: { categories: live(0, 0, 0, 0) } })), page.marks, page.categories);
  const { start, end, terms, ...words } = waterfallOf(forward, ["fp32", "amp"], 0, 1);
  assert.deepEqual(words, { from: "fp32", to: "amp", instant: "after forward" });
  assert.deepEqual(terms, [{ key: "master_copies", bytes: -2 }, { key: "cast_copies", bytes: 1 }, { key: "activations", bytes: -2 }]);
  assert.equal(start + terms.reduce((sum, { bytes }) => sum + bytes, 0), end);
});
