import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import {
  cleaned,
  fixed,
  formatBytes,
  formatCount,
  formatDuration,
  formatPerParameter,
  formatShape,
  formatShare,
  formatSigned,
  plotlyText,
  visible,
  worded,
} from "../../../ampmem/reporters/html/js/common/format.js";

// [bytes, text], made with ampmem/units.py; the Python test that calls this one checks that they still are.
const cases = JSON.parse(readFileSync(new URL("format_cases.json", import.meta.url), "utf8"));

test("bytes, counts and durations read as in Python", () => {
  for (const [value, text] of cases.bytes) assert.equal(formatBytes(value), text, `bytes ${value}`);
  for (const [value, text] of cases.counts) assert.equal(formatCount(value), text, `count ${value}`);
  for (const [value, text] of cases.durations) assert.equal(formatDuration(value), text, `duration ${value}`);
});

test("ties go to the even digit", () => {
  assert.deepEqual(
    [0.25, 0.75, 1.25, 2.5, 0.05].map((value) => fixed(value, 1)),
    ["0.2", "0.8", "1.2", "2.5", "0.1"],
  );
  assert.deepEqual(
    [0.5, 1.5, 2.5].map((value) => fixed(value, 0)),
    ["0", "2", "2"],
  );
  assert.equal(fixed(1.125, 2), "1.12");
});

test("a share is never rounded to nothing or to all", () => {
  assert.deepEqual(
    [formatShare(1, 1000), formatShare(999, 1000), formatShare(0, 5), formatShare(5, 5), formatShare(1, 0)],
    ["<1 %", ">99 %", "0 %", "100 %", "0 %"],
  );
});

test("unknown is not nothing", () => {
  assert.equal(formatBytes(null), "?");
  assert.equal(formatCount(null), "?");
  assert.equal(formatPerParameter(null, 3), "");
  assert.equal(formatPerParameter(16, 0), "");
  assert.equal(formatSigned(2048), "+2.0 KiB");
  assert.equal(formatSigned(-5), "-5 B");
  assert.equal(worded("optimizer_state"), "Optimizer state");
});

test("what cannot be seen is spelled out, and no text is endless", () => {
  assert.equal(visible("a\u202eb\u0000\ud800\u2028"), "a\\u202eb\\u0000\\ud800\\u2028");
  assert.equal(visible("\u{e0041}"), "\\U000e0041");
  assert.equal(visible("é 漢 😀"), "é 漢 😀");
  assert.equal(visible("x".repeat(1_000_000)).length, 400);
});

test("a text cut within a pair of surrogates is still well formed", () => {
  const cut = visible("x".repeat(398) + "😀".repeat(5));
  assert.ok(cut.isWellFormed());
});

test("cleaning reaches every text, keeps numbers, and takes any key", () => {
  const hostile = JSON.parse('{"__proto__": "\\u202e", "list": ["\\u0007", 1, null, true], "packed": "\\u0007"}');
  const clean = cleaned(hostile, 400, ["packed"]);
  assert.equal(Object.getPrototypeOf(clean), null);
  assert.equal(Object.entries(clean)[0][1], "\\u202e");
  assert.deepEqual(clean.list, ["\\u0007", 1, null, true]);
  assert.equal(clean.packed, "\u0007");
});

test("plotly gets no markup", () => {
  assert.equal(plotlyText("<a href='x'>&"), "&lt;a href='x'&gt;&amp;");
});

test("shapes read as products", () => {
  const shapes = ["[8, 128, 512]", "[3]", "[]", ""];
  assert.deepEqual(shapes.map(formatShape), ["8×128×512", "3", "scalar", ""]);
});
