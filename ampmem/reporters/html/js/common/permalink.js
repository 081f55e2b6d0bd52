/**
 * Where a reader is on the page, as the hash of its address: `#stacks&run=amp&from=2603&to=3869&pin=3476&theme=dark`.
 * The first part is a section, as in any page; what is not said is as the page opens. What cannot be read is left out.
 */

/**
 * @typedef {object} Place
 * @property {string} section the id of its element; empty for the top
 * @property {string|null} run its label
 * @property {{low: number, high: number}|null} view on the axis of `byTime`
 * @property {boolean|null} byTime
 * @property {number|null} pin a position
 * @property {"light"|"dark"|null} theme
 */

/**
 * @param {string|null} text
 * @returns {number|null} null for what is no plain number
 */
function numberIn(text) {
  return text !== null && /^\d{1,16}(\.\d{1,12})?$/.test(text) ? Number(text) : null;
}

/**
 * @param {string} hash
 * @returns {Place}
 */
export function placeOfHash(hash) {
  const [first, ...others] = hash.replace(/^#/, "").split("&");
  const named = /^[a-z-]*$/.test(first);
  const said = new URLSearchParams((named ? others : [first, ...others]).join("&"));
  const low = numberIn(said.get("from"));
  const high = numberIn(said.get("to"));
  const theme = said.get("theme");
  const axis = said.get("axis");
  const pin = numberIn(said.get("pin"));
  return {
    section: named ? first : "",
    run: said.get("run"),
    view: low !== null && high !== null && low < high ? { low, high } : null,
    byTime: axis === "time" || (axis === "events" ? false : null),
    pin: Number.isInteger(pin) ? pin : null,
    theme: theme === "light" || theme === "dark" ? theme : null,
  };
}

/**
 * @param {Place} place
 * @returns {string} empty where all is as the page opens
 */
export function hashOfPlace({ section, run, view, byTime, pin, theme }) {
  const said = new URLSearchParams();
  /** @param {number} value */
  const plain = (value) => Math.max(0, value).toFixed(9).replace(/\.?0+$/, "");
  if (run !== null) said.set("run", run);
  if (byTime) said.set("axis", "time");
  if (view) {
    said.set("from", plain(view.low));
    said.set("to", plain(view.high));
  }
  if (pin !== null) said.set("pin", String(pin));
  if (theme) said.set("theme", theme);
  const parts = [section, String(said)].filter(Boolean).join("&");
  return parts ? `#${parts}` : "";
}

/** Whether the page stands in a frame of another, as in a notebook, and has no address of its own. */
export function isFramed() {
  return location.protocol === "about:";
}

/**
 * Puts `hash` into the address without a step in the history.
 * @param {string} hash
 */
export function rememberHash(hash) {
  if (hash === location.hash) return;
  try {
    history.replaceState(null, "", hash || location.pathname + location.search);
  } catch {
    // A page inside of another may not be allowed to; then it has no link.
  }
}

/**
 * Copies the page's address.
 * @returns {Promise<boolean>} whether that was allowed
 */
export async function copyAddress() {
  try {
    await navigator.clipboard.writeText(location.href);
    return true;
  } catch {
    return false;
  }
}
