/** The head of a run: title, facts, headlines, notes and findings. */
import { byId, fill, make } from "../common/dom.js";
import { formatBytes, formatCount } from "../common/format.js";
/** @import { Conservation, FindingView, Headline, RunView } from "../common/page.js" */

/** How many notes are shown as they are. */
const NOTES = 3;

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
  badge.title = `the categories against the allocator's own count, at ${formatCount(conservation.events)} events`;
}

/** @param {RunView} run */
export function showSummary(run) {
  byId("summary-title").textContent = run.title;
  fill(byId("facts"), ...run.facts.map((fact) => make("li", {}, fact)));
  const warnings = run.warnings.map((text) =>
    make("p", { class: "note bad", role: "alert" }, make("strong", {}, "Warning: "), text),
  );
  fill(byId("notes"), ...warnings, ...notesOf(run.notes));
  fill(byId("headlines"), ...run.headlines.map(headline));
  showAccounted(run.conservation);
  byId("summary").hidden = false;
}

/**
 * @param {FindingView} item
 * @param {(id: string) => void} jump
 */
function finding(item, jump) {
  const [sign, word] = SEVERITIES.get(item.severity) ?? INFO;
  const target = document.getElementById(item.jump);
  const button = target && !target.hidden ? make("button", { type: "button", class: "jump" }, "Show where") : null;
  button?.addEventListener("click", () => jump(item.jump));
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
      item.evidence.length
        ? make(
            "details",
            {},
            make("summary", {}, `Evidence (${item.evidence.length})`),
            make("ul", {}, ...item.evidence.map((line) => make("li", {}, line))),
          )
        : null,
      button,
    ),
  );
}

/**
 * The findings; call it when the sections they point to are there.
 * @param {RunView} run
 * @param {(id: string) => void} jump
 */
export function showFindings(run, jump) {
  fill(byId("findings"), ...run.findings.map((item) => finding(item, jump)));
  const helps = run.findings.some((item) => item.severity !== "info");
  byId("helps-title").textContent = helps ? "What would help" : "Worth knowing";
  byId("findings").hidden = run.findings.length === 0;
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
