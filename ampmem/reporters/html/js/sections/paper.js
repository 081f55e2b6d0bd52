/** Printing: paper is light and narrow, shows what is folded, and waits until the page is drawn. */
import { byId } from "../common/dom.js";
/** @import { Theme } from "../common/theme.js" */

/** The width of the charts on paper. */
const PRINT_WIDTH = 640;

/**
 * Says on the page what went wrong.
 * @param {unknown} error
 * @returns {never}
 */
export function trouble(error) {
  byId("trouble").hidden = false;
  byId("trouble").textContent = `This page could not be drawn: ${error instanceof Error ? error.message : error}`;
  throw error;
}

/**
 * Draws the page, and lets the browser take it for loaded only then.
 *
 * `chromium --print-to-pdf` prints as soon as the page is loaded, and what is drawn later is missing on the paper. No
 * script can delay that but one that is fetched; a document in a frame that is still being written does.
 * @param {() => Promise<void>} draw
 */
export async function drawBeforeLoaded(draw) {
  const frame = document.createElement("iframe");
  frame.hidden = true;
  document.body.append(frame);
  frame.contentDocument?.open();
  try {
    await draw().catch(trouble);
  } finally {
    frame.contentDocument?.close();
    frame.remove();
  }
}

/** @param {(options?: {theme?: Theme, width?: number}) => void} redraw draws what depends on theme and width */
export function startPrinting(redraw) {
  /** @type {HTMLDetailsElement[]} */
  let opened = [];
  window.addEventListener("beforeprint", () => {
    /** @type {NodeListOf<HTMLDetailsElement>} */
    const closed = document.querySelectorAll("details:not([open])");
    opened = [...closed];
    for (const details of opened) details.open = true;
    /** @type {NodeListOf<HTMLButtonElement>} */
    const more = document.querySelectorAll("button.show-all");
    for (const button of more) button.click();
    redraw({ theme: "light", width: PRINT_WIDTH });
  });
  window.addEventListener("afterprint", () => {
    for (const details of opened) details.open = false;
    redraw();
  });
}
