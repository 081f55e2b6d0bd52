/** What every section of the page has: an element of its name, and a body that is filled. */
import { byId, fill } from "../common/dom.js";
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
