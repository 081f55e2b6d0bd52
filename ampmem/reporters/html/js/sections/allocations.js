/** The table of the largest allocations. */
import { byId, choices, fill, make, scroller } from "../common/dom.js";
import { formatBytes, formatCount, visible } from "../common/format.js";
import { aliveRows, inLayers, kindMatcher } from "../data/alive.js";
import { Cells, LARGEST_FIRST } from "../data/rows.js";
import { COLUMNS, StackSwitch, headOf, rowOf } from "./allocationrows.js";
/** @import { Kinds, LayerRow } from "../data/alive.js" */
/** @import { Field, Order } from "../data/rows.js" */

const FIRST_ROWS = 25;
const MORE_ROWS = 100;
const MAX_LABEL = 200;

/** @typedef {Record<string, Int32Array|null>} Counts by when it lives: `peak`, `cursor`, `run` */

/**
 * What the event `narrow` on the document asks for: only the kinds of allocations that `keep` admits, which `label`
 * names.
 * @typedef {{label: string, keep: (kind: number) => boolean}} Narrowing
 */

export class AllocationTable {
  /** @type {Kinds|null} */
  #kinds = null;
  /** @type {Cells|null} */
  #cells = null;
  /** @type {Counts} */
  #counts = {};
  #where = "";
  #alive = byId("alive", HTMLSelectElement);
  #category = byId("category", HTMLSelectElement);
  #search = byId("search", HTMLInputElement);
  #limit = FIRST_ROWS;
  /** @type {Order} */
  #order = LARGEST_FIRST;
  /** @type {Narrowing|null} */
  #narrowed = null;
  #stacks = new StackSwitch(byId("allocations-body"));

  #name = "peak";

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
    document.addEventListener("narrow", (event) => {
      this.#narrow(/** @type {CustomEvent<Narrowing>} */ (event).detail);
      // All of what is asked for, at the instant that the charts show.
      this.#search.value = "";
      this.#category.value = "all";
      this.#alive.value = this.#counts.cursor ? "cursor" : this.#counts.peak ? "peak" : "run";
      again();
    });
    byId("narrowed-clear").addEventListener("click", () => {
      this.#narrow(null);
      again();
      byId("allocations-title").focus({ preventScroll: true });
    });
  }

  /**
   * @param {Kinds} kinds
   * @param {{peak: Int32Array|null, run: Int32Array|null}} counts by kind
   * @param {string} name what the instant of `peak` is called: the peak, or the failure
   */
  show(kinds, counts, name) {
    this.#name = name;
    for (const option of this.#alive.options) {
      if (option.value === "peak") option.textContent = `Alive at the ${name}`;
    }
    this.#kinds = kinds;
    this.#cells = new Cells(kinds);
    this.#counts = { ...counts, cursor: null };
    this.#order = LARGEST_FIRST;
    this.#narrow(null);
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

  /** @param {Narrowing|null} narrowing */
  #narrow(narrowing) {
    this.#narrowed = narrowing;
    byId("narrowed").hidden = narrowing === null;
    byId("narrowed-label").textContent = narrowing ? visible(narrowing.label, MAX_LABEL) : "";
  }

  /** @param {Field} field */
  #sort(field) {
    const same = this.#order.field === field;
    this.#order = { field, reversed: same && !this.#order.reversed };
    this.#limit = FIRST_ROWS;
    this.draw();
    byId(`sort-${field}`).focus();
  }

  /**
   * What is to be shown, in order.
   * @param {Kinds} kinds
   * @param {Cells} cells
   */
  #rows(kinds, cells) {
    const counts = this.#counts[this.#alive.value] ?? new Int32Array(0);
    const category = this.#category.value;
    const matches = kindMatcher(kinds, this.#search.value);
    const keep = this.#narrowed?.keep ?? (() => true);
    const rows = aliveRows(kinds, counts).filter(
      ({ kind }) => (category === "all" || kinds.category(kind) === Number(category)) && keep(kind) && matches(kind),
    );
    const groups = inLayers(kinds, rows);
    return this.#order === LARGEST_FIRST ? groups : cells.sorted(groups, this.#order);
  }

  draw() {
    const cells = this.#cells;
    if (!this.#kinds || !cells) return;
    const rows = this.#rows(this.#kinds, cells);
    this.#say(rows);
    const shown = rows.slice(0, this.#limit).map((row) => rowOf(row, cells, this.#stacks));
    const nothing = rows.length
      ? null
      : make("tr", {}, make("td", { colspan: COLUMNS.length + 1, class: "quiet" }, "Nothing matches."));
    const head = headOf(this.#order, (field) => this.#sort(field));
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

  /** @param {LayerRow[]} rows */
  #say(rows) {
    const count = rows.reduce((sum, row) => sum + row.count, 0);
    const bytes = rows.reduce((sum, row) => sum + row.sum, 0);
    /** @type {Record<string, string>} */
    const where = {
      peak: `alive at the ${this.#name}`,
      cursor: `alive at ${this.#where}`,
      run: "made during the run, one after another",
    };
    byId("allocations-note").textContent =
      `${formatCount(count)} allocation${count === 1 ? "" : "s"}, ${formatBytes(bytes)} (${formatCount(bytes)} B), ${where[this.#alive.value]}`;
  }
}
