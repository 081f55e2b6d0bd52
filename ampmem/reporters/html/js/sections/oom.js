/** What a run died of that ran out of memory. */
import { byId, make } from "../common/dom.js";
import { compositionBars } from "../figures/bars.js";
import { showSection } from "./section.js";
import { temporariesOf } from "./tables.js";
/** @import { Attributes } from "../common/dom.js" */
/** @import { OutOfMemoryView, RunView } from "../common/page.js" */
/** @import { CategoryOf } from "../figures/bars.js" */

/** @param {OutOfMemoryView} view */
function facts(view) {
  const rows = view.facts.flatMap(({ label, text }) => [make("dt", {}, label), make("dd", {}, text)]);
  return make("dl", { class: "details-facts" }, ...rows);
}

/**
 * @param {string} title
 * @param {string[]} items
 * @param {Attributes} attributes
 * @param {"ul"|"ol"} tag
 */
function lines(title, items, attributes, tag = "ul") {
  if (!items.length) return null;
  return make("div", {}, make("h3", {}, title), make(tag, attributes, ...items.map((item) => make("li", {}, item))));
}

/**
 * Fills the section, or hides it; `showThere` is called to look at the instant of the failure.
 * @param {RunView} run
 * @param {CategoryOf} categoryOf
 * @param {(position: number) => void} showThere
 */
export function showOutOfMemory(run, categoryOf, showThere) {
  const view = run.out_of_memory;
  if (!view) return showSection("out-of-memory");
  byId("out-of-memory-title").textContent = view.headline.charAt(0).toUpperCase() + view.headline.slice(1);
  const button = make("button", { type: "button", class: "screen" }, "Show this instant in the charts");
  button.addEventListener("click", () => showThere(view.position));
  return showSection(
    "out-of-memory",
    make(
      "div",
      { class: "blocks" },
      make("div", { class: "block" }, facts(view), lines("What to change", view.changes, { class: "remarks" })),
      make("div", { class: "block" }, lines("Where in the script", view.frames, { class: "stack" }, "ol")),
    ),
    make("h3", {}, "What was alive"),
    compositionBars(view.alive, categoryOf, "at the failure"),
    temporariesOf(view.alive),
    button,
  );
}
