import assert from "node:assert/strict";
import { test } from "node:test";
import { breakdownOf, compositionOf } from "../../../ampmem/reporters/html/js/data/run.js";

const page = {
  autocast_arms: ["amp"],
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
