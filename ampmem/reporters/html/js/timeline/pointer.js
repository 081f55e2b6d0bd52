/** What the mouse says on a chart: where it is, a click, a double click. A drag is none of these. */

const STILL = 4;
const DOUBLE_MS = 350;

/**
 * @param {PointerEvent} one
 * @param {PointerEvent} two
 */
function distance(one, two) {
  return Math.hypot(two.clientX - one.clientX, two.clientY - one.clientY);
}

/**
 * @param {HTMLElement} frame
 * @param {{hover: (clientX: number) => void, leave: () => void, click: (clientY: number) => void, doubleClick: () => void}} does
 */
export function followPointer(frame, does) {
  /** @type {PointerEvent|null} */
  let down = null;
  /** @type {PointerEvent|null} */
  let clicked = null;
  frame.addEventListener("pointermove", (event) => does.hover(event.clientX));
  frame.addEventListener("pointerleave", () => does.leave());
  frame.addEventListener("pointerdown", (event) => (down = event), true);
  const up = (/** @type {PointerEvent} */ event) => {
    const from = down;
    down = null;
    if (!from || distance(from, event) > STILL) return;
    if (clicked && event.timeStamp - clicked.timeStamp < DOUBLE_MS && distance(clicked, event) <= STILL) {
      clicked = null;
      does.doubleClick();
      return;
    }
    clicked = event;
    does.hover(event.clientX);
    does.click(event.clientY);
  };
  // The drawing library covers the page while the button is down, so the frame does not see it go up.
  window.addEventListener("pointerup", up, true);
}
