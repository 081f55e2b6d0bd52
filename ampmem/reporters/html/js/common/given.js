/** What a type says may be missing, and the page says is there. */

/**
 * `value`, where it must be there by now.
 * @template T
 * @param {T|null|undefined} value
 * @returns {T}
 */
export function given(value) {
  if (value === null || value === undefined) throw new Error("internal error: a value is missing");
  return value;
}
