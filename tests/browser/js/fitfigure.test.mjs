import assert from "node:assert/strict";
import { test } from "node:test";
import { countUnder } from "../../../ampmem/reporters/html/js/figures/fitfigure.js";

const MIB = 2 ** 20;

function curve(values, megabytes) {
  return { values, reserved: megabytes.map((each) => each * MIB) };
}

test("a curve lies on those before it that it hardly differs from", () => {
  const line = curve([1, 2, 4], [10, 20, 40]);
  const equal = curve([1, 2, 4], [10, 20, 40]);
  const between = curve([1, 3], [10.5, 30]);
  const crossing = curve([1, 2, 4], [30, 20, 10]);
  const beside = curve([8, 9], [80, 90]);
  const all = [line, equal, between, crossing, beside];
  assert.deepEqual(
    all.map((each) => countUnder(each, all, MIB)),
    [0, 1, 2, 0, 0],
  );
  assert.equal(countUnder(between, all, 0), 0);
});

test("a curve without points lies on nothing", () => {
  const none = curve([], []);
  assert.equal(countUnder(none, [none, none], MIB), 0);
});
