/** Numbers and user text as the page shows them. The number formats give the same texts as `ampmem/units.py`. */

const BINARY_UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const MAX_TEXT = 400;
export const MAX_SENTENCE = 2000;
const INVISIBLE = /[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu;

/**
 * `toFixed`, but exact ties go to the even digit, as in Python.
 * @param {number} value
 * @param {number} digits
 */
export function fixed(value, digits) {
  const ties = value * 2 ** (digits + 1);
  if (!Number.isInteger(ties) || ties % 2 === 0) return value.toFixed(digits);
  const tenths = Math.floor(value * 10 ** digits);
  return ((tenths % 2 === 0 ? tenths : tenths + 1) / 10 ** digits).toFixed(digits);
}

/**
 * Bytes in binary units; `?` for unknown.
 * @param {number|null|undefined} count
 */
export function formatBytes(count) {
  if (count === null || count === undefined) return "?";
  let size = Math.abs(count);
  let unit = 0;
  while (size >= 1023.95 && unit < BINARY_UNITS.length - 1) {
    size /= 1024;
    unit += 1;
  }
  const sign = count < 0 ? "-" : "";
  return sign + (unit === 0 ? `${Math.abs(count)} B` : `${fixed(size, 1)} ${BINARY_UNITS[unit]}`);
}

/**
 * A difference in bytes, with its sign.
 * @param {number} count
 */
export function formatSigned(count) {
  return (count > 0 ? "+" : "") + formatBytes(count);
}

/**
 * A count with thousands separators; `?` for unknown.
 * @param {number|null|undefined} count
 */
export function formatCount(count) {
  if (count === null || count === undefined) return "?";
  return String(count).replace(/\B(?=(\d{3})+$)/g, ",");
}

/**
 * A duration in the largest unit that keeps it at or above one.
 * @param {number} nanoseconds
 */
export function formatDuration(nanoseconds) {
  if (nanoseconds >= 1e9) return `${fixed(nanoseconds / 1e9, 2)} s`;
  if (nanoseconds >= 1e6) return `${fixed(nanoseconds / 1e6, 1)} ms`;
  return `${fixed(nanoseconds / 1e3, 0)} µs`;
}

/**
 * `part` of `whole` in percent; something is never 0 %, not everything never 100 %.
 * @param {number} part
 * @param {number} whole
 */
export function formatShare(part, whole) {
  const percent = whole ? (100 * part) / whole : 0;
  if (percent > 0 && percent < 1) return "<1 %";
  if (percent > 99 && percent < 100) return ">99 %";
  return `${fixed(percent, 0)} %`;
}

/**
 * `bytes` per parameter with two digits; empty when there is nothing to divide by.
 * @param {number|null} bytes
 * @param {number} parameters
 */
export function formatPerParameter(bytes, parameters) {
  if (bytes === null || !parameters) return "";
  return fixed(bytes / parameters, 2);
}

/**
 * A shape as the recording has it, `[8, 128]`, as `8×128`; `[]` is a scalar, and an empty text stays empty.
 * @param {string} shape
 */
export function formatShape(shape) {
  return shape === "[]" ? "scalar" : shape.replace(/[[\]]/g, "").replaceAll(", ", "×");
}

/** @param {string} character one code point */
function spelled(character) {
  const code = character.codePointAt(0) ?? 0;
  return code <= 0xffff ? `\\u${code.toString(16).padStart(4, "0")}` : `\\U${code.toString(16).padStart(8, "0")}`;
}

/**
 * `text` in one bounded line, with every invisible character spelled out.
 * @param {string} text
 */
export function visible(text, limit = MAX_TEXT) {
  const bounded = text.length <= limit ? text : `${text.slice(0, limit - 1)}…`;
  return bounded.replace(INVISIBLE, spelled);
}

/**
 * `value` with every text in it made visible; `except` names the properties that are left as they are.
 * @param {unknown} value what JSON can hold
 * @param {string[]} except
 * @returns {unknown}
 */
export function cleaned(value, limit = MAX_TEXT, except = []) {
  if (typeof value === "string") return visible(value, limit);
  if (Array.isArray(value)) {
    return value.map((item) => (typeof item === "number" ? item : cleaned(item, limit, except)));
  }
  if (value === null || typeof value !== "object") return value;
  // Without a prototype, so that a key can have any name.
  /** @type {Record<string, unknown>} */
  const copy = Object.create(null);
  for (const [key, item] of Object.entries(value)) {
    copy[visible(key)] = except.includes(key) ? item : cleaned(item, limit, except);
  }
  return copy;
}

/**
 * A key as words: `Optimizer state` for `optimizer_state`.
 * @param {string} key
 */
export function worded(key) {
  const words = key.replaceAll("_", " ");
  return words.charAt(0).toUpperCase() + words.slice(1);
}

/**
 * `text` for plotly, which takes some markup in its strings.
 * @param {string} text
 */
export function plotlyText(text) {
  return visible(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}
