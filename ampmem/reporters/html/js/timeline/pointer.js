/** What the mouse says on a chart: where it is, a click, a double click. A drag is none of these. */

const STILL = 4;
const DOUBLE_MS = 350;

/**
 * @param {HTMLElement} frame
 * @param {{hover: (clientX: number) => void, leave: () => void, click: (clientY: number) => void, doubleClick: () => void}} does
 */
export function followPointer(frame, does) {
  /** @type {PointerEvent|null} */
  let down = null;
  let clicked = 0;
  frame.addEventListener("pointermove", (event) => does.hover(event.clientX));
  frame.addEventListener("pointerleave", () => does.leave());
  frame.addEventListener("pointerdown", (event) => (down = event), true);
  const up = (/** @type {PointerEvent} */ event) => {
    const from = down;
    down = null;
    if (!from || Math.hypot(event.clientX - from.clientX, event.clientY - from.clientY) > STILL) return;
    if (event.timeStamp - clicked < DOUBLE_MS) {
      clicked = 0;
      does.doubleClick();
      return;
    }
    clicked = event.timeStamp;
    does.hover(event.clientX);
    does.click(event.clientY);
  };
  // The drawing library covers the page while the button is down, so the frame does not see it go up.
  window.addEventListener("pointerup", up, true);
}
