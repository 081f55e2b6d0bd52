/** The head of a run: title, facts, headlines, notes and findings. */
import { byId, fill, make } from "../common/dom.js";
import { formatBytes, formatCount } from "../common/format.js";
import { explanations } from "./section.js";
/** @import { Conservation, FindingView, Headline } from "../common/page.js" */
/** @import { Run } from "../data/run.js" */

/** How many notes are shown as they are. */
const NOTES = 3;

/** Sections that not every run has: what would show there is at the peak else. */
const NOT_ALWAYS = ["casts", "static", "activations"];

const NO_EVENTS =
  "This run was given as JSON from ampmem show --json, which does not have events: only the page of the recording has the timeline, modules, stacks, addresses and allocations.";

const INFO = ["i", "Note"];
const SEVERITIES = new Map([
  ["warning", ["!", "Warning"]],
  ["advice", ["→", "Advice"]],
  ["info", INFO],
]);

/** @param {Headline} view */
function headline({ label, value, detail, bytes }) {
  const exact = bytes === null || bytes === undefined ? null : `${formatCount(bytes)} bytes`;
  return make(
    "div",
    { class: "headline" },
    make("dt", {}, label),
    make("dd", { title: exact }, make("b", {}, value), make("small", {}, detail)),
  );
}

/**
 * Whether the categories are all that the allocator counted; nothing where it gave no count.
 * @param {Conservation} conservation
 */
function showAccounted(conservation) {
  const residuals = [conservation.residual_bytes, conservation.reserved_residual_bytes].filter((each) => each !== null);
  const most = Math.max(0, ...residuals.map(Math.abs));
  const badge = byId("accounted");
  badge.hidden = residuals.length === 0;
  badge.className = most ? "chip bad" : "chip good";
  badge.textContent = most ? `${formatBytes(most)} not accounted for` : "every byte accounted for";
  badge.title = `the categories compared with the allocator's own count, at ${formatCount(conservation.events)} events`;
}

/**
 * @param {Run} run
 */
export function showSummary({ title, summary, said, stream }) {
  byId("summary-title").textContent = title;
  fill(byId("facts"), ...said.facts.map((fact) => make("li", {}, fact)));
  const warnings = said.warnings.map((text) =>
    make("p", { class: "note bad", role: "alert" }, make("strong", {}, "Warning: "), text),
  );
  const without = stream ? null : make("p", { class: "note", id: "no-events" }, NO_EVENTS);
  fill(byId("notes"), ...warnings, without, ...notesOf(said.notes));
  fill(byId("headlines"), ...said.headlines.map(headline));
  showAccounted(summary.conservation);
  byId("summary").hidden = false;
}

/**
 * @param {FindingView} item
 * @param {(id: string) => void} jump
 */
function finding(item, jump) {
  const [sign, word] = SEVERITIES.get(item.severity) ?? INFO;
  const elsewhere = NOT_ALWAYS.includes(item.jump) && document.getElementById(item.jump)?.hidden;
  const id = elsewhere ? "peak" : item.jump;
  const target = document.getElementById(id);
  const button = target && !target.hidden ? make("button", { type: "button", class: "jump" }, "Show where") : null;
  button?.addEventListener("click", () => jump(id));
  return make(
    "article",
    { class: `finding ${item.severity}`, "data-code": item.code },
    make(
      "p",
      { class: "finding-message" },
      make("span", { class: "severity" }, make("span", { "aria-hidden": "true", class: "sign" }, sign), word),
      make("strong", {}, item.message),
      item.saves ? make("span", { class: "chip good" }, item.saves) : null,
    ),
    item.change
      ? make("p", { class: "change" }, make("span", { class: "quiet" }, item.saves ? "What to change: " : "Hint: "), item.change)
      : null,
    make(
      "div",
      { class: "finding-foot" },
      ...explanations(item),
      button,
    ),
  );
}

/**
 * The findings; call it when the sections they point to are there.
 * @param {Run} run
 * @param {(id: string) => void} jump
 */
export function showFindings({ said: { findings } }, jump) {
  fill(byId("findings"), ...findings.map((item) => finding(item, jump)));
  const helps = findings.some((item) => item.severity !== "info");
  byId("helps-title").textContent = helps ? "What would help" : "Worth knowing";
  byId("helps").hidden = byId("findings").hidden = findings.length === 0;
}

/**
 * A few notes are shown as they are; more are one line that opens.
 * @param {string[]} notes
 */
function notesOf(notes) {
  if (notes.length <= NOTES) return notes.map((note) => make("p", { class: "note" }, note));
  const items = notes.map((note) => make("li", {}, note));
  return [
    make(
      "details",
      { class: "note" },
      make("summary", {}, `${notes.length} notes on this run: what was assumed, changed or left out`),
      make("ul", {}, ...items),
    ),
  ];
}
