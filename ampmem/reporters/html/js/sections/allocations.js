/** The table of the largest allocations. */
import { aliveRows, kindMatcher, ownFrame, shortFrame } from "../data/alive.js";
import { byId, choices, fill, make, named, scroller } from "../common/dom.js";
import { formatBytes, formatCount } from "../common/format.js";

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

export class AllocationTable {
  #limit = FIRST_ROWS;

  constructor() {
    const again = () => {
      this.#limit = FIRST_ROWS;
      this.draw();
    };
    byId("search").addEventListener("input", again);
    byId("category").addEventListener("change", again);
    byId("alive").addEventListener("change", again);
    byId("more").addEventListener("click", () => {
      this.#limit += MORE_ROWS;
      this.draw();
    });
  }

  /**
   * @param {object} kinds a `Kinds`
   * @param {{peak: Int32Array|null, run: Int32Array|null}} counts by kind
   */
  show(kinds, counts) {
    this.kinds = kinds;
    this.counts = { ...counts, cursor: null };
    this.where = "";
    byId("search").value = "";
    const seen = new Set(Array.from({ length: kinds.count }, (_, kind) => kinds.category(kind)));
    const options = kinds.categories.flatMap((category, i) => (seen.has(i) ? [[String(i), category.label]] : []));
    choices(byId("category"), [["all", "All categories"], ...options], "all");
    byId("alive").value = "peak";
    byId("alive").querySelector("[value=run]").disabled = !counts.run;
    this.pin(null, "");
  }

  /** Shows what is alive at the cursor, or again what is alive at the peak. */
  pin(counts, where) {
    this.counts.cursor = counts;
    this.where = where;
    const select = byId("alive");
    select.querySelector("[value=cursor]").disabled = !counts;
    if (counts) select.value = "cursor";
    else if (select.value === "cursor" || !this.counts[select.value]) select.value = this.counts.peak ? "peak" : "run";
    this.#limit = FIRST_ROWS;
    this.draw();
  }

  draw() {
    const alive = byId("alive").value;
    const counts = this.counts[alive] ?? new Int32Array(0);
    const category = byId("category").value;
    const matches = kindMatcher(this.kinds, byId("search").value);
    const rows = aliveRows(this.kinds, counts).filter(
      ({ kind }) => (category === "all" || this.kinds.category(kind) === Number(category)) && matches(kind),
    );
    this.#say(rows, alive);
    const head = make(
      "tr",
      {},
      ...COLUMNS.map(([text, kind]) =>
        text ? make("th", { scope: "col", class: kind || null }, text) : make("td", {}),
      ),
    );
    const shown = rows.slice(0, this.#limit).flatMap((row) => this.#row(row));
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

  #say(rows, alive) {
    const count = rows.reduce((sum, row) => sum + row.count, 0);
    const bytes = rows.reduce((sum, row) => sum + row.count * row.bytes, 0);
    const where = {
      peak: "alive at the peak",
      cursor: `alive at ${this.where}`,
      run: "made during the run, one after another",
    }[alive];
    byId("allocations-note").textContent =
      `${formatCount(count)} allocation${count === 1 ? "" : "s"}, ${formatBytes(bytes)} (${formatCount(bytes)} B), ${where}`;
  }

  #row({ kind, count, bytes }) {
    const { kinds } = this;
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
    let details = null;
    const toggle = () => {
      const opened = open.getAttribute("aria-expanded") !== "true";
      open.setAttribute("aria-expanded", String(opened));
      open.textContent = opened ? "▾" : "▸";
      if (opened && !details) {
        details = this.#details(kind, count, bytes, frames);
        row.after(details);
      }
      if (details) details.hidden = !opened;
    };
    open.addEventListener("click", (event) => {
      event.stopPropagation();
      toggle();
    });
    row.addEventListener("click", toggle);
    return [row];
  }

  #details(kind, count, bytes, frames) {
    const { kinds } = this;
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
