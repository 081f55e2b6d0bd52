/** Printing: paper is light, narrow, and opens nothing. */
/** @import { Theme } from "../common/theme.js" */

const PRINT_WIDTH = 640;

/** @param {(options?: {theme?: Theme, width?: number}) => void} redraw draws what depends on theme and width */
export function startPrinting(redraw) {
  /** @type {HTMLDetailsElement[]} */
  let opened = [];
  window.addEventListener("beforeprint", () => {
    /** @type {NodeListOf<HTMLDetailsElement>} */
    const closed = document.querySelectorAll("details:not([open])");
    opened = [...closed];
    for (const details of opened) details.open = true;
    redraw({ theme: "light", width: PRINT_WIDTH });
  });
  window.addEventListener("afterprint", () => {
    for (const details of opened) details.open = false;
    redraw();
  });
}
