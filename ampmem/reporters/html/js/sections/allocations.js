/** The table of the largest allocations. */
import { byId, choices, fill, make, named, scroller } from "../common/dom.js";
import { formatBytes, formatCount } from "../common/format.js";
import { aliveRows, kindMatcher, ownFrame, shortFrame } from "../data/alive.js";
/** @import { AliveRow, Kinds } from "../data/alive.js" */

const FIRST_ROWS = 25;
const MORE_ROWS = 100;
const COLUMNS = [
  ["", ""],
  ["Size", "number"],
  ["Count", "number"],
  ["Category", ""],
  ["Module", ""],
  ["Name or operator", ""],
  ["Your code", ""],
  ["Made in", ""],
];

/** @typedef {Record<string, Int32Array|null>} Counts by when it lives: `peak`, `cursor`, `run` */

export class AllocationTable {
  /** @type {Kinds|null} */
  #kinds = null;
  /** @type {Counts} */
  #counts = {};
  #where = "";
  #alive = byId("alive", HTMLSelectElement);
  #category = byId("category", HTMLSelectElement);
  #search = byId("search", HTMLInputElement);
  #limit = FIRST_ROWS;

  constructor() {
    const again = () => {
      this.#limit = FIRST_ROWS;
      this.draw();
    };
    this.#search.addEventListener("input", again);
    this.#category.addEventListener("change", again);
    this.#alive.addEventListener("change", again);
    byId("more").addEventListener("click", () => {
      this.#limit += MORE_ROWS;
      this.draw();
    });
  }

  /**
   * @param {Kinds} kinds
   * @param {{peak: Int32Array|null, run: Int32Array|null}} counts by kind
   */
  show(kinds, counts) {
    this.#kinds = kinds;
    this.#counts = { ...counts, cursor: null };
    this.#search.value = "";
    const seen = new Set(Array.from({ length: kinds.count }, (_, kind) => kinds.category(kind)));
    /** @type {Array<[string, string]>} */
    const options = [["all", "All categories"]];
    for (const [i, { label }] of kinds.categories.entries()) if (seen.has(i)) options.push([String(i), label]);
    choices(this.#category, options, "all");
    this.#alive.value = "peak";
    this.#allow("run", counts.run !== null);
    this.pin(null, "");
  }

  /**
   * Shows what is alive at the cursor, or again what is alive at the peak.
   * @param {Int32Array|null} counts by kind
   * @param {string} where
   */
  pin(counts, where) {
    this.#counts.cursor = counts;
    this.#where = where;
    this.#allow("cursor", counts !== null);
    const select = this.#alive;
    if (counts) select.value = "cursor";
    else if (select.value === "cursor" || !this.#counts[select.value]) select.value = this.#counts.peak ? "peak" : "run";
    this.#limit = FIRST_ROWS;
    this.draw();
  }

  /**
   * Lets `when` be chosen, or not.
   * @param {string} when
   * @param {boolean} there
   */
  #allow(when, there) {
    for (const option of this.#alive.options) if (option.value === when) option.disabled = !there;
  }

  draw() {
    const kinds = this.#kinds;
    if (!kinds) return;
    const alive = this.#alive.value;
    const counts = this.#counts[alive] ?? new Int32Array(0);
    const category = this.#category.value;
    const matches = kindMatcher(kinds, this.#search.value);
    const rows = aliveRows(kinds, counts).filter(
      ({ kind }) => (category === "all" || kinds.category(kind) === Number(category)) && matches(kind),
    );
    this.#say(rows, alive);
    const head = make(
      "tr",
      {},
      ...COLUMNS.map(([text, kind]) =>
        text ? make("th", { scope: "col", class: kind || null }, text) : make("td", {}),
      ),
    );
    const shown = rows.slice(0, this.#limit).map((row) => this.#row(row, kinds));
    const nothing = rows.length
      ? null
      : make("tr", {}, make("td", { colspan: COLUMNS.length, class: "quiet" }, "Nothing matches."));
    fill(
      byId("allocations-body"),
      scroller(
        "Largest allocations",
        make("table", { class: "allocations" }, make("thead", {}, head), make("tbody", {}, ...shown, nothing)),
      ),
    );
    byId("more").hidden = rows.length <= this.#limit;
    byId("more").textContent = `Show more (${formatCount(rows.length - this.#limit)} left)`;
  }

  /**
   * @param {AliveRow[]} rows
   * @param {string} alive
   */
  #say(rows, alive) {
    const count = rows.reduce((sum, row) => sum + row.count, 0);
    const bytes = rows.reduce((sum, row) => sum + row.count * row.bytes, 0);
    /** @type {Record<string, string>} */
    const where = {
      peak: "alive at the peak",
      cursor: `alive at ${this.#where}`,
      run: "made during the run, one after another",
    };
    byId("allocations-note").textContent =
      `${formatCount(count)} allocation${count === 1 ? "" : "s"}, ${formatBytes(bytes)} (${formatCount(bytes)} B), ${where[alive]}`;
  }

  /**
   * @param {AliveRow} each
   * @param {Kinds} kinds
   */
  #row(each, kinds) {
    const { kind, count, bytes } = each;
    const frames = kinds.frames(kind);
    const name = kinds.text("name", kind);
    const op = kinds.text("op", kind);
    const what = name && op ? `${name} (${op})` : name || op || "-";
    const category = kinds.categories[kinds.category(kind)];
    const open = make(
      "button",
      {
        type: "button",
        class: "expand",
        "aria-expanded": "false",
        "aria-label": `Details of ${formatBytes(bytes)} ${category?.label ?? ""}`,
      },
      "▸",
    );
    const cells = [
      make("td", {}, open),
      make("th", { scope: "row", class: "number" }, formatBytes(bytes)),
      make("td", { class: "number quiet" }, count > 1 ? `× ${formatCount(count)}` : ""),
      make("td", {}, named(category)),
      make("td", { class: "clip" }, kinds.text("module", kind) || "-"),
      make("td", { class: "clip code" }, what),
      make("td", { class: "clip code", title: ownFrame(frames) || null }, shortFrame(ownFrame(frames)) || "-"),
      make("td", { class: "quiet" }, kinds.phase(kind)),
    ];
    const row = make("tr", { class: "allocation" }, ...cells);
    /** @type {HTMLElement|null} */
    let details = null;
    const toggle = () => {
      const opened = open.getAttribute("aria-expanded") !== "true";
      open.setAttribute("aria-expanded", String(opened));
      open.textContent = opened ? "▾" : "▸";
      if (opened && !details) {
        details = this.#details(each, kinds);
        row.after(details);
      }
      if (details) details.hidden = !opened;
    };
    open.addEventListener("click", (event) => {
      event.stopPropagation();
      toggle();
    });
    row.addEventListener("click", toggle);
    return row;
  }

  /**
   * @param {AliveRow} row
   * @param {Kinds} kinds
   */
  #details({ kind, count, bytes }, kinds) {
    const frames = kinds.frames(kind);
    const facts = [
      ["Bytes", count > 1 ? `${formatCount(bytes)} each, ${formatCount(bytes * count)} together` : formatCount(bytes)],
      ["Name", kinds.text("name", kind)],
      ["Module", kinds.text("module", kind)],
      ["Operator", kinds.text("op", kind)],
    ].filter(([, text]) => text);
    const list = make(
      "dl",
      { class: "details-facts" },
      ...facts.flatMap(([label, text]) => [make("dt", {}, label), make("dd", {}, text)]),
    );
    const stack = frames.length
      ? make("ol", { class: "stack" }, ...frames.map((frame) => make("li", {}, frame)))
      : make("p", { class: "quiet" }, "No Python stack was recorded for it.");
    return make("tr", { class: "details" }, make("td", { colspan: COLUMNS.length }, list, stack));
  }
}
