/** Texts in boxes: the longest that fits, whole or cut in the middle. */

const FEWEST_LETTERS = 10;

/**
 * `text` in at most `length` letters, without its middle.
 * @param {string} text
 * @param {number} length
 */
export function cutInMiddle(text, length) {
  const letters = [...text];
  if (letters.length <= length) return text;
  const head = Math.ceil((length - 1) / 2);
  return `${letters.slice(0, head).join("")}…${letters.slice(letters.length - (length - 1 - head)).join("")}`;
}

/**
 * The first of `texts`, which get shorter, that is at most `room` wide; else the last one cut in the middle, if that may
 * be and enough of it is left; else nothing.
 * @param {string[]} texts
 * @param {number} room
 * @param {(text: string) => number} widthOf
 * @param {boolean} cuts
 */
export function fittingText(texts, room, widthOf, cuts) {
  const found = texts.find((text) => widthOf(text) <= room);
  if (found !== undefined) return found;
  if (!cuts) return "";
  const last = texts[texts.length - 1];
  const letters = [...last].length;
  for (let length = Math.floor((letters * room) / widthOf(last)); length >= FEWEST_LETTERS; length -= 1) {
    const cut = cutInMiddle(last, length);
    if (widthOf(cut) <= room) return cut;
  }
  return "";
}

/**
 * How wide a text is in pixels, in the font of an element.
 * @param {string} font
 * @returns {(text: string) => number}
 */
export function ruler(font) {
  const context = document.createElement("canvas").getContext("2d");
  if (!context) return (text) => 7 * text.length;
  context.font = font;
  return (text) => context.measureText(text).width;
}
