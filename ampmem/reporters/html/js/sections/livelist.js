/** What one instant of the timeline is: the event that led to it, and every allocation that lives then. */
import { byId, choices, fill, make, swatch } from "../common/dom.js";
import { formatBytes, formatCount } from "../common/format.js";
import { inLayers, together } from "../data/alive.js";
import { StackSwitch } from "./allocationrows.js";
/** @import { AliveRow, Kinds, LayerRow } from "../data/alive.js" */
/** @import { Live, LiveEvent } from "../data/stream.js" */

/** Rows of the list while the cursor moves, which are as many as can be seen, and at rest; more come when asked for. */
const LISTED_MOVING = 15;
const LISTED = 200;

/**
 * `alloc 2.0 MiB, activations, output of addmm in h.3.mlp`
 * @param {Kinds} kinds
 * @param {LiveEvent} event
 */
export function eventInWords(kinds, { kind, free }) {
  const module = kinds.text("module", kind);
  const name = kinds.what(kind) || "nothing known about it";
  const category = kinds.categories[kinds.category(kind)]?.label.toLowerCase() ?? "";
  const what = `${free ? "free" : "alloc"} ${formatBytes(kinds.bytes(kind))}`;
  return [what, category, module ? `${name} in ${module}` : name].filter(Boolean).join(", ");
}

export class LiveList {
  #pin;
  #show;
  /** @type {Kinds|null} */
  #kinds = null;
  /** @type {Live|null} */
  #live = null;
  /**
   * The kinds, the largest first.
   * @type {number[]}
   */
  #order = [];
  #index = 0;
  #where = "";
  #limit = LISTED;
  #name = "peak";
  #category = byId("live-category", HTMLSelectElement);
  #stacks = new StackSwitch(byId("live-rows"));

  /**
   * @param {(index: number) => void} pin makes the rest of the page show an instant
   * @param {() => void} show brings the table of allocations into view
   */
  constructor(pin, show) {
    this.#pin = pin;
    this.#show = show;
    this.#category.addEventListener("change", () => this.#draw(LISTED));
    byId("live-more").addEventListener("click", () => this.#draw(this.#limit + LISTED));
  }

  /**
   * Shows another run; `at` says which instant of it.
   * @param {Kinds} kinds
   * @param {Live} live
   * @param {string} name what the instant is called that a page without all events has: the peak, or the failure
   */
  show(kinds, live, name) {
    this.#name = name;
    this.#kinds = kinds;
    this.#live = live;
    this.#order = Array.from({ length: kinds.count }, (_, kind) => kind);
    this.#order.sort((one, two) => kinds.bytes(two) - kinds.bytes(one) || one - two);
    const seen = new Set(this.#order.map((kind) => kinds.category(kind)));
    /** @type {Array<[string, string]>} */
    const options = [["all", "All categories"]];
    for (const [i, { label }] of kinds.categories.entries()) if (seen.has(i)) options.push([String(i), label]);
    choices(this.#category, options, "all");
    this.#where = "";
    byId("live").hidden = kinds.count === 0;
    byId("event-controls").hidden = !live.exact;
  }

  /**
   * Lists what lives at an instant.
   * @param {number} index
   * @param {string} where the instant in words
   * @param {boolean} moving whether the next instant is to come soon
   */
  at(index, where, moving) {
    const most = moving ? LISTED_MOVING : LISTED;
    if (index === this.#index && where === this.#where && most <= this.#limit) return;
    this.#index = index;
    this.#where = where;
    this.#draw(most);
  }

  /**
   * Says what the event was that led to an instant.
   * @param {number} index
   */
  event(index) {
    const event = this.#live?.eventBefore(index);
    const text = event && this.#kinds ? eventInWords(this.#kinds, event) : "before the first event";
    byId("event").textContent = this.#live?.exact ? text : "";
  }

  /**
   * Lists one category only; `null` for all.
   * @param {number|null} category
   */
  choose(category) {
    const value = category === null ? "all" : String(category);
    this.#category.value = [...this.#category.options].some((option) => option.value === value) ? value : "all";
    this.#draw(LISTED);
  }

  /** @param {number} limit how many rows at most */
  #draw(limit) {
    const kinds = this.#kinds;
    if (!kinds) return;
    this.#limit = limit;
    const counts = this.#live?.aliveAt(this.#index) ?? null;
    byId("live-title").textContent = `Alive ${this.#where.charAt(0).toLowerCase()}${this.#where.slice(1)}`;
    const chosen = this.#category.value;
    const there = counts
      ? this.#order.filter((kind) => counts[kind] > 0 && (chosen === "all" || kinds.category(kind) === Number(chosen)))
      : [];
    byId("live-note").textContent = counts
      ? sumInWords(kinds, counts, there)
      : `This page has single allocations only at the ${this.#name}.`;
    /** @type {AliveRow[]} */
    const rows = there.map((kind) => ({ kind, count: counts?.[kind] ?? 0, bytes: kinds.bytes(kind) }));
    const groups = inLayers(kinds, rows);
    fill(byId("live-rows"), ...groups.slice(0, limit).map((group) => this.#row(kinds, group)));
    byId("live-more").hidden = groups.length <= limit;
    byId("live-more").textContent = `List more (${formatCount(groups.length - limit)} left)`;
  }

  /**
   * @param {Kinds} kinds
   * @param {LayerRow} group
   */
  #row(kinds, group) {
    const { rows, count, bytes } = group;
    const category = kinds.categories[kinds.category(rows[0].kind)];
    /** @param {"name"|"module"} column */
    const all = (column) => together(rows.map(({ kind }) => kinds.text(column, kind)));
    const { kind } = rows[0];
    const name = kinds.text("what", kind) || all("name") || kinds.text("op", kind);
    const module = all("module");
    const times = count > 1 ? make("span", { class: "quiet" }, ` × ${formatCount(count)}`) : null;
    const row = make(
      "button",
      { type: "button", class: "live-row", "aria-expanded": "false" },
      swatch(category),
      make("b", {}, formatBytes(bytes)),
      make("span", { class: "live-name" }, name || "-", times),
      make("span", { class: "live-module" }, name.includes(module) ? "" : module),
    );
    const item = make("li", {}, row);
    /** @type {HTMLElement|null} */
    let details = null;
    row.addEventListener("click", () => {
      const open = row.getAttribute("aria-expanded") !== "true";
      row.setAttribute("aria-expanded", String(open));
      if (!details) item.append((details = this.#details(kinds, group)));
      details.hidden = !open;
    });
    return item;
  }

  /**
   * @param {Kinds} kinds
   * @param {LayerRow} group
   */
  #details(kinds, { rows, count, bytes, sum }) {
    const { kind } = rows[0];
    const each = count * bytes === sum ? "each" : "the largest";
    const category = kinds.categories[kinds.category(kind)]?.label ?? "";
    const op = kinds.text("op", kind);
    const facts = [
      `${formatCount(bytes)} bytes${count > 1 ? ` ${each}, ${formatCount(sum)} together` : ""}`,
      category,
      [kinds.text("dtype", kind), kinds.shape(kind)].filter(Boolean).join(" "),
      `made in ${[kinds.phase(kind), op].filter(Boolean).join(" by ")}`,
    ];
    const frames = kinds.frames(kind);
    const stack = frames.length
      ? this.#stacks.list(frames)
      : make("p", { class: "quiet" }, "No Python stack was recorded for it.");
    const lead = make("button", { type: "button" }, "Show in the table");
    lead.addEventListener("click", () => {
      const named = together(rows.map((row) => kinds.what(row.kind)));
      const label = `${named || category}${count > 1 ? ` × ${formatCount(count)}` : ""}, ${formatBytes(bytes)}`;
      const mine = new Set(rows.map((row) => row.kind));
      const keep = (/** @type {number} */ other) => mine.has(other);
      this.#pin(this.#index);
      document.dispatchEvent(new CustomEvent("narrow", { detail: { label, keep } }));
      this.#show();
    });
    return make("div", { class: "live-details" }, make("p", { class: "quiet" }, facts.filter(Boolean).join(" · ")), stack, lead);
  }
}

/**
 * @param {Kinds} kinds
 * @param {Int32Array} counts by kind
 * @param {number[]} listed kinds
 */
function sumInWords(kinds, counts, listed) {
  let count = 0;
  let bytes = 0;
  for (const kind of listed) {
    count += counts[kind];
    bytes += counts[kind] * kinds.bytes(kind);
  }
  return `${formatCount(count)} allocation${count === 1 ? "" : "s"}, ${formatBytes(bytes)}`;
}
