/** Elements made from text. Nothing here, or anywhere on the page, takes markup. */
/** @import { CategoryView } from "./page.js" */

/** @typedef {Node|string|null|undefined} Child what stands in an element; null and undefined are left out */
/** @typedef {Record<string, string|number|boolean|null>} Attributes null and false are left out */
/** @typedef {{head: string, number?: boolean, wide?: boolean}} Column */
/** @typedef {Array<string|Node>} Row its first cell is its head */
/**
 * A table that is `stacked` has a line for each cell where the screen is narrow.
 * @typedef {{caption?: string|null, columns: Column[], rows: Row[], foot?: boolean, class?: string, stacked?: boolean}} Table
 */

const LONG_NAME = /\S{12}/;
/** A number and its unit, or an option of a command. */
const AMOUNT = /([-+−<>]?\d[\d,.]*\s(?:[KMGTP]i?B|B|%|n?s|ms|µs|min|h)(?![\w-])|(?<![\w-])--[a-z][\w-]*)/;
const JOINT = /(?<=[\w)>\]][./\\:_=(×])(?=[\w<])/;

const HATCHES = new Map([
  ["/", "slashes"],
  [".", "dots"],
]);

/**
 * @template {HTMLElement} T
 * @overload
 * @param {string} id
 * @param {new () => T} kind
 * @returns {T}
 */
/**
 * @overload
 * @param {string} id
 * @returns {HTMLElement}
 */
/**
 * The element of the template with this `id`, and of this kind.
 * @param {string} id
 * @param {new () => Element} kind
 */
export function byId(id, kind = Element) {
  const found = document.getElementById(id);
  if (!(found instanceof kind)) throw new Error(`the page has no ${kind.name} ${id}`);
  return found;
}

/**
 * An element. `attributes` are set as attributes (`class`, `title`, `aria-…`), children are elements or texts.
 * @template {keyof HTMLElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {Attributes} attributes
 * @param {Child[]} children
 */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : String(value));
  }
  fill(element, ...children);
  return element;
}

/**
 * @param {string} tag
 * @param {Record<string, string|number>} attributes
 * @param {string|null} text
 */
export function svgElement(tag, attributes = {}, text = null) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  if (text !== null) element.textContent = text;
  return element;
}

/**
 * `text` as it may be broken into lines: numbers stay with their units, options are whole, and a long name may go on in
 * the next line behind its dots, slashes and such, in no word.
 * @param {string} text
 * @returns {Array<string|Node>}
 */
function breakable(text) {
  const parts = text.split(AMOUNT);
  if (parts.length > 1) {
    return parts.flatMap((part, i) => (i % 2 ? [make("span", { class: "amount" }, document.createTextNode(part))] : breakable(part)));
  }
  if (!LONG_NAME.test(text)) return [text];
  return text.split(JOINT).flatMap((part, i) => (i ? [document.createElement("wbr"), part] : [part]));
}

/**
 * @param {Element} element
 * @param {Child[]} children
 */
export function fill(element, ...children) {
  const there = children.filter((child) => child !== null && child !== undefined);
  const whole = element instanceof HTMLOptionElement;
  element.replaceChildren(
    ...there.flatMap((child) => (typeof child === "string" && !whole ? breakable(child) : [child])),
  );
}

/**
 * Gives an element the colour and the hatching of a category; without one it stays grey.
 * @template {HTMLElement} T
 * @param {T} element
 * @param {CategoryView|null|undefined} category
 * @returns {T}
 */
export function paint(element, category) {
  if (!category) return element;
  element.classList.add("fill");
  element.style.setProperty("--fill", `light-dark(${category.light}, ${category.dark})`);
  const hatch = HATCHES.get(category.pattern);
  if (hatch) element.classList.add(hatch);
  return element;
}

/** @param {CategoryView|null|undefined} category */
export function swatch(category) {
  return paint(make("span", { class: "swatch", "aria-hidden": "true" }), category);
}

/**
 * The name of a category behind its colour.
 * @param {CategoryView|null|undefined} category
 */
export function named(category, fallback = "") {
  return make("span", { class: "named" }, swatch(category), category ? category.label : fallback);
}

/**
 * A box that scrolls sideways, and can then be reached with the keyboard to do it.
 * @param {string} label
 * @param {Node} content
 */
export function scroller(label, content) {
  const box = make("div", { class: "scroll", role: "group", "aria-label": label }, content);
  new ResizeObserver(() => {
    if (box.scrollWidth > box.clientWidth) box.setAttribute("tabindex", "0");
    else box.removeAttribute("tabindex");
  }).observe(box);
  return box;
}

/**
 * A table. A column is `{head, number?, code?}`; a cell is a text or an element.
 * @param {Table} table
 */
export function tableOf({ caption = null, columns, rows, foot = false, class: name = "", stacked = false }) {
  /** @param {Column} column */
  const kind = (column) => [column.number ? "number" : "", column.wide ? "wide" : ""].join(" ").trim() || null;
  const head = make(
    "tr",
    {},
    ...columns.map((column) => make("th", { scope: "col", class: kind(column) }, column.head)),
  );
  /** @param {Row} cells */
  const line = (cells) =>
    make(
      "tr",
      {},
      ...cells.map((cell, i) =>
        i
          ? make("td", { class: kind(columns[i]), "data-head": stacked ? columns[i].head : null }, stacked && cell ? make("span", {}, cell) : cell)
          : make("th", { scope: "row", class: kind(columns[i]) }, cell),
      ),
    );
  const body = foot ? rows.slice(0, -1) : rows;
  return scroller(
    caption ?? "Table",
    make(
      "table",
      { class: [name, stacked ? "stacked" : ""].join(" ").trim() || null },
      caption ? make("caption", {}, caption) : null,
      make("thead", {}, head),
      make("tbody", {}, ...body.map(line)),
      foot ? make("tfoot", {}, line(rows[rows.length - 1])) : null,
    ),
  );
}

/**
 * Marks one button of a group as pressed.
 * @param {Element} chosen
 * @param {Element[]} others
 */
export function press(chosen, ...others) {
  chosen.setAttribute("aria-pressed", "true");
  for (const other of others) other.setAttribute("aria-pressed", "false");
}

/**
 * Fills a select; `options` are `[value, text]`.
 * @param {HTMLSelectElement} select
 * @param {Array<[value: string, text: string]>} options
 * @param {string|null} chosen
 */
export function choices(select, options, chosen = null) {
  fill(select, ...options.map(([value, text]) => make("option", { value, selected: value === chosen }, text)));
}
