/** What every section of the page has: an element of its name, and a body that is filled. */
import { byId, fill, make } from "../common/dom.js";
/** @import { RemedyView } from "../common/page.js" */
/** @import { Child } from "../common/dom.js" */

/**
 * Fills and shows a section, or hides it when there is nothing for it.
 * @param {string} id
 * @param {Child[]} parts
 */
export function showSection(id, ...parts) {
  const there = parts.filter((part) => part !== null && part !== undefined);
  byId(id).hidden = there.length === 0;
  fill(byId(`${id}-body`), ...there);
}

/**
 * What opens below a finding or a change: its evidence, and what the documentation says of it.
 * @param {Pick<RemedyView, "evidence"|"meaning">} of
 * @returns {Array<HTMLElement|null>}
 */
export function explanations({ evidence, meaning }) {
  const lines = evidence.map((line) => make("li", {}, line));
  return [
    lines.length ? folded(`Evidence (${lines.length})`, make("ul", {}, ...lines)) : null,
    meaning.length ? folded("What this means", ...meaning.map((text) => make("p", {}, ...withCode(text)))) : null,
  ];
}

/**
 * @param {string} title
 * @param {HTMLElement[]} parts
 */
function folded(title, ...parts) {
  return make("details", {}, make("summary", {}, title), ...parts);
}

/**
 * A text whose parts in backquotes are code.
 * @param {string} text
 */
function withCode(text) {
  return text.split("`").map((part, i) => (i % 2 ? make("code", {}, part) : part));
}
