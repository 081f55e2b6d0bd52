import assert from "node:assert/strict";
import { test } from "node:test";
import { adviceFigure, adviceLimitShown } from "../../../ampmem/reporters/html/js/figures/advicefigure.js";

const MIB = 2 ** 20;

function view(limit, points) {
  const series = [{ name: "runs", joined: true, light: "#000", dark: "#fff", symbol: "circle", points }];
  return { limit, limit_text: "the budget", axis: "cost", series };
}

function point(cost, size, meets = true) {
  return { cost, most: size * MIB, allocated: size * MIB, meets, text: ["a run"] };
}

test("a limit far above all runs is not in the picture, nor one that is not known", () => {
  const points = [point(0, 100), point(10, 80)];
  assert.equal(adviceLimitShown(view(150 * MIB, points)), true);
  assert.equal(adviceLimitShown(view(201 * MIB, points)), false);
  assert.equal(adviceLimitShown(view(null, points)), false);
  assert.equal(adviceFigure(view(null, points), "light", 800, 400).layout.shapes.length, 0);
});

test("all runs and the limit are within the axes, also where all cost the same", () => {
  for (const points of [[point(0, 100, false), point(10, 80)], [point(5, 100)]]) {
    const { layout } = adviceFigure(view(60 * MIB, points), "light", 800, 400);
    for (const { cost, most } of points) {
      assert.ok(layout.xaxis.range[0] < cost && cost < layout.xaxis.range[1]);
      assert.ok(layout.yaxis.range[0] < most && most < layout.yaxis.range[1]);
    }
    assert.ok(layout.yaxis.range[0] < 60 * MIB);
  }
});
