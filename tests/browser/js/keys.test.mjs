import assert from "node:assert/strict";
import { test } from "node:test";
import { actionOf, focusKind } from "../../../ampmem/reporters/html/js/common/keys.js";

test("keys act anywhere on the page", () => {
  const expected = {
    w: "zoom-in",
    s: "zoom-out",
    a: "pan-left",
    d: "pan-right",
    p: "peak",
    Home: "reset",
    ArrowLeft: "previous",
    ArrowRight: "next",
    Escape: "escape",
    "/": "search",
    "?": "help",
    W: "zoom-in",
  };
  for (const [key, action] of Object.entries(expected)) assert.equal(actionOf({ key }, "page"), action, key);
  assert.equal(actionOf({ key: "x" }, "page"), null);
  assert.equal(actionOf({ key: "ArrowRight", shiftKey: true }, "chart"), "next-ten");
});

test("the chart has more of them", () => {
  assert.equal(actionOf({ key: "Enter" }, "chart"), "pin");
  assert.equal(actionOf({ key: " " }, "chart"), "pin");
  assert.equal(actionOf({ key: "ArrowUp" }, "chart"), "zoom-in");
  assert.equal(actionOf({ key: "ArrowUp" }, "page"), null);
  assert.equal(actionOf({ key: "Enter" }, "page"), null);
});

test("who types is left alone, and so are the browser's own shortcuts", () => {
  for (const key of ["w", "p", "/", "Home", "ArrowLeft", "?"]) assert.equal(actionOf({ key }, "typing"), null);
  assert.equal(actionOf({ key: "Escape" }, "typing"), "escape");
  assert.equal(actionOf({ key: "p", ctrlKey: true }, "page"), null);
  assert.equal(actionOf({ key: "d", metaKey: true }, "chart"), null);
  assert.equal(actionOf({ key: "ArrowLeft" }, "widget"), null);
  assert.equal(actionOf({ key: "p" }, "widget"), "peak");
});

test("what has the focus is known by its element", () => {
  const element = (tagName, role = null, id = "") => ({ tagName, id, getAttribute: () => role });
  assert.equal(focusKind(null), "page");
  assert.equal(focusKind(element("DIV", "slider", "chart-frame")), "chart");
  assert.equal(focusKind(element("INPUT")), "typing");
  assert.equal(focusKind(element("SELECT")), "typing");
  assert.equal(focusKind(element("DIV", "treeitem")), "widget");
  assert.equal(focusKind(element("BUTTON")), "page");
});
