/** What a run died of that ran out of memory. */
import { byId, make, tableOf } from "../common/dom.js";
import { formatBytes } from "../common/format.js";
import { compositionOf } from "../data/run.js";
import { compositionBars } from "../figures/bars.js";
import { explanations, showSection } from "./section.js";
import { temporariesOf } from "./tables.js";
/** @import { RemedyView, ShortageWords } from "../common/page.js" */
/** @import { Run } from "../data/run.js" */
/** @import { CategoryOf } from "../figures/bars.js" */

/** @param {ShortageWords} view */
function facts(view) {
  const rows = view.facts.flatMap(([label, text]) => [make("dt", {}, label), make("dd", {}, text)]);
  return make("dl", { class: "details-facts" }, ...rows);
}

/** @param {string[]} frames */
function where(frames) {
  if (!frames.length) return null;
  return make(
    "div",
    {},
    make("h3", {}, "Where in the script"),
    make("ol", { class: "stack" }, ...frames.map((frame) => make("li", {}, frame))),
  );
}

/**
 * @param {string} title
 * @param {HTMLElement[]} items
 */
function listOf(title, items) {
  return items.length ? [make("h3", {}, title), make("ol", { class: "remedies" }, ...items)] : [];
}

/**
 * All that may be changed: first what saves the most at the failure, then what has no number; call it when the sections that it points to are there.
 * @param {RemedyView[]} remedies
 * @param {(id: string) => void} jump
 */
function changes(remedies, jump) {
  const items = remedies.map((remedy) => {
    const target = remedy.jump ? document.getElementById(remedy.jump) : null;
    const button = target && !target.hidden ? make("button", { type: "button", class: "jump" }, "Show where") : null;
    button?.addEventListener("click", () => jump(remedy.jump));
    return make(
      "li",
      { "data-code": remedy.code || null },
      make("b", { class: "remedy-bytes" }, remedy.bytes === null ? "" : `−${formatBytes(remedy.bytes)}`),
      make(
        "div",
        {},
        make("p", {}, remedy.change),
        remedy.why ? make("p", { class: "quiet" }, remedy.why) : null,
        ...explanations(remedy),
        button,
      ),
    );
  });
  const known = remedies.filter((remedy) => remedy.bytes !== null).length;
  return make(
    "div",
    {},
    ...listOf("What to change, and what it saves at the failure", items.slice(0, known)),
    ...listOf("What may help", items.slice(known)),
  );
}

/**
 * @param {ShortageWords} view
 * @param {CategoryOf} categoryOf
 */
function largestThen({ largest }, categoryOf) {
  if (!largest.length) return null;
  const rows = largest.map(({ bytes, count, kind, category, name }) => [
    name || "-",
    formatBytes(bytes),
    count,
    kind || "-",
    categoryOf(category)?.label ?? category,
  ]);
  const columns = [
    { head: "Name" },
    { head: "Bytes each", number: true },
    { head: "Tensors", number: true },
    { head: "Type and shape" },
    { head: "Category" },
  ];
  return tableOf({ caption: "The largest tensors at that instant", columns, rows, stacked: true });
}

/** @param {ShortageWords} view */
function runNext({ commands, hint }) {
  if (!commands.length) return null;
  return make(
    "div",
    { class: "run-next" },
    make("h3", {}, "To run next"),
    ...commands.map((line) => make("pre", {}, make("code", {}, line))),
    hint ? make("p", { class: "quiet" }, hint) : null,
  );
}

/**
 * Fills the section, or hides it; `showThere` is called to look at the instant of the failure.
 * @param {Run} run
 * @param {CategoryOf} categoryOf
 * @param {(position: number) => void} showThere
 * @param {(id: string) => void} jump
 */
export function showOutOfMemory(run, categoryOf, showThere, jump) {
  const view = run.said.out_of_memory;
  const { failure } = run;
  const oom = run.summary.out_of_memory;
  if (!view || !failure || !oom) return showSection("out-of-memory");
  const alive = compositionOf(oom.alive, oom.temporaries_by_phase, {});
  byId("out-of-memory-title").textContent = view.headline.charAt(0).toUpperCase() + view.headline.slice(1);
  const button = make("button", { type: "button", class: "screen" }, "Show this instant in the charts");
  button.addEventListener("click", () => showThere(failure.position));
  return showSection(
    "out-of-memory",
    make(
      "div",
      { class: "blocks" },
      make("div", { class: "block" }, changes(view.remedies, jump)),
      make("div", { class: "block" }, facts(view), where(view.frames)),
    ),
    make("h3", {}, "What was alive"),
    compositionBars(alive, categoryOf, "at the failure"),
    temporariesOf(alive),
    largestThen(view, categoryOf),
    runNext(view),
    // The charts end with the recorded steps.
    failure.later || !run.stream ? null : button,
  );
}
