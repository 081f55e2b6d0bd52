/** What changed from one run to another of changed code: a table to sort and to search. */
import { byId, choices, fill, make, named, scroller } from "../common/dom.js";
import { formatBytes, formatCount, formatSigned } from "../common/format.js";
import { shortFrame } from "../data/alive.js";
import { StackSwitch } from "./allocationrows.js";
/** @import { ChangeView, ChangesView } from "../common/page.js" */
/** @import { CategoryOf } from "../figures/bars.js" */

const FIRST_CHANGES = 15;
const MORE_CHANGES = 100;
const ALL_OF_THEM = "all";

/**
 * @typedef {object} ChangeColumn
 * @property {string} head
 * @property {string} class
 * @property {(row: ChangeView) => string|number} value what it is sorted by
 * @property {(row: ChangeView) => string|Node} show
 * @property {string} [label] said before a value where a row is a few lines
 */

/** @param {ChangeView} row */
const grown = ({ before, after }) => after - before;

/**
 * @param {CategoryOf} categoryOf
 * @returns {ChangeColumn[]}
 */
function changeColumns(categoryOf) {
  const text = (/** @type {string} */ value) => value || "-";
  return [
    { head: "Change", class: "number", value: grown, show: (row) => formatSigned(grown(row)) },
    { head: "What became", class: "", value: (row) => row.kind, show: (row) => row.kind },
    { head: "Before", class: "number", value: (row) => row.before, show: (row) => formatBytes(row.before), label: "from" },
    { head: "After", class: "number", value: (row) => row.after, show: (row) => formatBytes(row.after), label: "to" },
    {
      head: "Category",
      class: "",
      value: ({ largest: { category } }) => categoryOf(category)?.label ?? category,
      show: ({ largest: { category } }) => named(categoryOf(category), category),
    },
    { head: "What", class: "clip code field-what", value: (row) => row.what, show: (row) => text(row.what) },
    {
      head: "Your code",
      class: "clip code field-code",
      value: ({ largest }) => shortFrame(largest.source_line ?? ""),
      show: ({ largest: { lines_of: run, source_line: line } }) =>
        text(line ? `${run === "before" ? "was " : ""}${shortFrame(line)}` : ""),
      label: "at",
    },
  ];
}

class ChangeTable {
  #limit = FIRST_CHANGES;
  #column = 0;
  /** Against the way that is natural for the column. */
  #reversed = false;
  #search = byId("changes-search", HTMLInputElement);
  #kind = byId("changes-kind", HTMLSelectElement);
  #category = byId("changes-category", HTMLSelectElement);
  #stacks = new StackSwitch(byId("changes-body"));

  /**
   * @param {ChangeView[]} rows the largest change first
   * @param {CategoryOf} categoryOf
   */
  constructor(rows, categoryOf) {
    this.rows = rows;
    this.columns = changeColumns(categoryOf);
    const kinds = [...new Set(rows.map((row) => row.kind))];
    const categories = [...new Set(rows.map((row) => row.largest.category))];
    choices(this.#kind, [[ALL_OF_THEM, "All changes"], ...kinds.map(twice)], ALL_OF_THEM);
    /** @type {Array<[string, string]>} */
    const labelled = categories.map((key) => [key, categoryOf(key)?.label ?? key]);
    choices(this.#category, [[ALL_OF_THEM, "All categories"], ...labelled], ALL_OF_THEM);
    const again = () => {
      this.#limit = FIRST_CHANGES;
      this.draw();
    };
    this.#search.addEventListener("input", again);
    this.#kind.addEventListener("change", again);
    this.#category.addEventListener("change", again);
    byId("changes-more").addEventListener("click", () => {
      this.#limit += MORE_CHANGES;
      this.draw();
    });
  }

  draw() {
    const rows = this.#sorted(this.#matching());
    const shown = rows.slice(0, this.#limit).map((row) => this.#row(row));
    const nothing = rows.length
      ? null
      : make("tr", {}, make("td", { colspan: this.columns.length + 1, class: "quiet" }, "Nothing matches."));
    const table = make("table", { class: "allocations changes" }, make("thead", {}, this.#head()), make("tbody", {}, ...shown, nothing));
    fill(byId("changes-body"), scroller("What changed", table));
    const sum = rows.reduce((all, row) => all + grown(row), 0);
    byId("changes-shown").textContent =
      rows.length === this.rows.length ? "" : `${formatCount(rows.length)} of ${formatCount(this.rows.length)} rows, ${formatSigned(sum)}`;
    byId("changes-more").hidden = rows.length <= this.#limit;
    byId("changes-more").textContent = `Show more (${formatCount(rows.length - this.#limit)} left)`;
  }

  #matching() {
    const words = this.#search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const [kind, category] = [this.#kind.value, this.#category.value];
    return this.rows.filter((row) => {
      if ((kind !== ALL_OF_THEM && row.kind !== kind) || (category !== ALL_OF_THEM && row.largest.category !== category)) return false;
      if (!words.length) return true;
      const text = [row.what, row.module, row.name, row.largest.op, row.tensors, ...row.largest.stack].join("\n").toLowerCase();
      return words.every((word) => text.includes(word));
    });
  }

  /** @param {ChangeView[]} rows */
  #sorted(rows) {
    // As they come: what grew and what shrank by as much are equally worth a look.
    if (this.#column === 0 && !this.#reversed) return rows;
    const { value } = this.columns[this.#column];
    const order = new Intl.Collator("en", { numeric: true }).compare;
    const sign = this.#reversed ? -1 : 1;
    return [...rows].sort((one, two) => {
      const [first, second] = [value(one), value(two)];
      if (typeof first === "number" && typeof second === "number") return sign * (second - first);
      return sign * order(String(first), String(second));
    });
  }

  #head() {
    const cells = this.columns.map(({ head, class: kind }, i) => {
      const button = make("button", { type: "button", class: "sort", id: `changes-sort-${i}` }, head);
      button.addEventListener("click", () => {
        this.#reversed = this.#column === i && !this.#reversed;
        this.#column = i;
        this.draw();
        byId(`changes-sort-${i}`).focus();
      });
      const down = (kind === "number") !== this.#reversed;
      const sorted = i === this.#column ? (down ? "descending" : "ascending") : null;
      return make("th", { scope: "col", role: "columnheader", class: kind === "number" ? kind : null, "aria-sort": sorted }, button);
    });
    return make("tr", { role: "row" }, make("td", { role: "cell", class: "field-open" }), ...cells);
  }

  /** @param {ChangeView} change */
  #row(change) {
    const label = `Details of ${formatSigned(grown(change))} ${change.what}`;
    const open = make("button", { type: "button", class: "expand", "aria-expanded": "false", "aria-label": label }, "▸");
    const [first, ...others] = this.columns;
    const row = make(
      "tr",
      { class: "allocation", role: "row" },
      make("td", { role: "cell", class: "field-open" }, open),
      make("th", { scope: "row", role: "rowheader", class: first.class }, first.show(change)),
      ...others.map((column) =>
        make("td", { role: "cell", class: column.class || null, "data-label": column.label ?? null }, column.show(change)),
      ),
    );
    /** @type {HTMLElement|null} */
    let details = null;
    row.addEventListener("click", () => {
      const opened = open.getAttribute("aria-expanded") !== "true";
      open.setAttribute("aria-expanded", String(opened));
      open.textContent = opened ? "▾" : "▸";
      if (opened && !details) row.after((details = this.#details(change)));
      if (details) details.hidden = !opened;
    });
    return row;
  }

  /** @param {ChangeView} change */
  #details(change) {
    const { lines_of: run, op, stack: frames } = change.largest;
    const facts = [
      ["Bytes", `${formatCount(change.before)} before, ${formatCount(change.after)} after`],
      ["Alike", change.changes > 1 ? `${formatCount(change.changes)} changes; what follows is of the largest` : ""],
      ["Tensors", change.tensors],
      ["Name", change.name],
      ["Module", change.module],
      ["Operator", op],
    ].filter(([, text]) => text);
    const list = make(
      "dl",
      { class: "details-facts" },
      ...facts.flatMap(([label, text]) => [make("dt", {}, label), make("dd", {}, text)]),
    );
    const stack = frames.length
      ? this.#stacks.list(frames)
      : make("p", { class: "quiet" }, "No Python stack was recorded for it.");
    const whose = run === "before" ? make("p", { class: "quiet" }, "The stack is that of the run before.") : null;
    const inside = make("td", { colspan: this.columns.length + 1, role: "cell" }, list, whose, stack);
    return make("tr", { class: "details", role: "row" }, inside);
  }
}

/**
 * @param {string} text
 * @returns {[string, string]}
 */
function twice(text) {
  return [text, text];
}

/**
 * @param {ChangesView|null} changes
 * @param {CategoryOf} categoryOf
 */
export function showChanges(changes, categoryOf) {
  byId("changes").hidden = !changes?.rows.length;
  if (!changes?.rows.length) return;
  byId("changes-note").textContent = changes.note;
  new ChangeTable(changes.rows, categoryOf).draw();
}
