/** The whole run, small, under the timeline; and in it the window that the timeline shows. */
import { byId, fill, svgElement } from "../common/dom.js";
import { formatCount } from "../common/format.js";
import { drawnInstants } from "../data/reduce.js";
import { MARGIN } from "./figure.js";
import { instantsOf, placeOf, wholeView } from "./view.js";
/** @import { Live } from "../data/stream.js" */
/** @import { View } from "../figures/figures.js" */

/** @typedef {"move"|"start"|"end"|"choose"} Grip what a drag does to the window */

const HEIGHT = 46;
const NARROWEST_WINDOW = 6;
/** How wide the handles at the ends of the window are, as in page.css. */
const EDGE = 9;
const STILL_DRAG = 4;
const BUCKETS_WIDE = 500;

export class Overview {
  #moved;
  #box = byId("overview");
  #window = byId("window");
  /** @type {Record<"start"|"end", HTMLElement>} */
  #edges = { start: byId("window-start"), end: byId("window-end") };
  /** @type {Live|null} */
  #live = null;
  #byTime = false;
  #inner = 1;
  /** @type {View} */
  #whole = { low: 0, high: 1 };
  /** @type {View} */
  #view = { low: 0, high: 1 };
  /** @type {View|null} */
  #asked = null;

  /** @param {(view: View) => void} moved called at most once a frame, with what is to be in view */
  constructor(moved) {
    this.#moved = moved;
    this.#listen();
  }

  /**
   * Draws the run; `peak` is the place of its peak.
   * @param {Live} live
   * @param {boolean} byTime
   * @param {number} width
   * @param {number|null} peak
   */
  draw(live, byTime, width, peak) {
    const inner = Math.max(1, width - MARGIN.left - MARGIN.right);
    // Another view is another window only: of a million events, that is a picture less.
    if (live === this.#live && byTime === this.#byTime && inner === this.#inner) return;
    this.#live = live;
    this.#byTime = byTime;
    this.#whole = wholeView(live, byTime);
    this.#inner = inner;
    const { indices } = drawnInstants(live.totals, 0, live.length - 1, byTime ? live.times : null, BUCKETS_WIDE);
    const most = indices.reduce((highest, index) => Math.max(highest, live.totals[index]), 1);
    let path = `M0 ${HEIGHT}`;
    for (const index of indices) {
      path += `H${this.#x(placeOf(live, index, byTime)).toFixed(1)}V${(HEIGHT * (1 - live.totals[index] / most)).toFixed(1)}`;
    }
    const svg = byId("overview-all");
    svg.setAttribute("width", String(this.#inner));
    svg.setAttribute("height", String(HEIGHT));
    const mark = peak === null ? null : svgElement("circle", { cx: this.#x(peak), cy: 3, r: 3, class: "overview-peak" });
    fill(svg, svgElement("path", { d: `${path}H${this.#inner}V${HEIGHT}Z`, class: "overview-live" }), mark);
    this.#box.style.marginLeft = `${MARGIN.left}px`;
    this.#box.style.width = `${this.#inner}px`;
  }

  /**
   * Draws the window.
   * @param {View} view
   */
  place(view) {
    this.#view = view;
    const live = this.#live;
    if (!live) return;
    const middle = this.#x((view.low + view.high) / 2);
    const wide = Math.max(NARROWEST_WINDOW, this.#x(view.high) - this.#x(view.low));
    const left = Math.max(0, Math.min(this.#inner - wide, middle - wide / 2));
    this.#window.style.left = `${left}px`;
    this.#window.style.width = `${wide}px`;
    // Within the window, so that they end where the chart ends; beside one that is too narrow for both.
    const beside = wide < 2 * EDGE ? EDGE : 0;
    this.#edges.start.style.left = `${Math.max(0, left - beside)}px`;
    this.#edges.end.style.left = `${Math.min(this.#inner, left + wide + beside) - EDGE}px`;
    const { first, last } = instantsOf(live, view, this.#byTime);
    const ends = [live.position(first), live.position(last)];
    this.#say(this.#window, ends[0], `events ${formatCount(ends[0])} to ${formatCount(ends[1])}`);
    this.#say(this.#edges.start, ends[0], `from event ${formatCount(ends[0])}`);
    this.#say(this.#edges.end, ends[1], `to event ${formatCount(ends[1])}`);
  }

  /**
   * @param {HTMLElement} slider
   * @param {number} now
   * @param {string} text
   */
  #say(slider, now, text) {
    const live = this.#live;
    if (live) slider.setAttribute("aria-valuemax", String(live.position(live.length - 1)));
    slider.setAttribute("aria-valuenow", String(now));
    slider.setAttribute("aria-valuetext", text);
  }

  /** @param {number} place */
  #x(place) {
    const { low, high } = this.#whole;
    return high > low ? ((place - low) / (high - low)) * this.#inner : 0;
  }

  /** @param {number} clientX */
  #placeAt(clientX) {
    const { low, high } = this.#whole;
    const part = (clientX - this.#box.getBoundingClientRect().left) / this.#inner;
    return low + (high - low) * Math.max(0, Math.min(1, part));
  }

  /** @param {View} view */
  #ask(view) {
    const before = this.#asked;
    this.#asked = view;
    if (before) return;
    // To draw the timeline takes longer than the pointer's next move.
    requestAnimationFrame(() => {
      const asked = this.#asked;
      this.#asked = null;
      if (asked) this.#moved(asked);
    });
  }

  #listen() {
    /** @type {{grip: Grip, x: number, place: number, view: View}|null} */
    let drag = null;
    this.#box.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      drag = { grip: this.#gripOf(event.target), x: event.clientX, place: this.#placeAt(event.clientX), view: this.#view };
      this.#box.setPointerCapture(event.pointerId);
    });
    this.#box.addEventListener("pointermove", (event) => {
      if (!drag || (drag.grip === "choose" && Math.abs(event.clientX - drag.x) < STILL_DRAG)) return;
      this.#ask(draggedView(drag.grip, drag.view, drag.place, this.#placeAt(event.clientX), this.#whole));
    });
    this.#box.addEventListener("pointerup", (event) => {
      const from = drag;
      drag = null;
      if (from?.grip !== "choose" || Math.abs(event.clientX - from.x) >= STILL_DRAG) return;
      const half = (from.view.high - from.view.low) / 2;
      this.#ask({ low: from.place - half, high: from.place + half });
    });
    this.#box.addEventListener("pointercancel", () => (drag = null));
    this.#keys(this.#window, "move");
    this.#keys(this.#edges.start, "start");
    this.#keys(this.#edges.end, "end");
  }

  /**
   * A window over the whole run cannot be moved: a drag in it chooses a new one.
   * @param {EventTarget|null} target
   * @returns {Grip}
   */
  #gripOf(target) {
    if (target === this.#edges.start) return "start";
    if (target === this.#edges.end) return "end";
    const all = this.#view.low <= this.#whole.low && this.#view.high >= this.#whole.high;
    return target === this.#window && !all ? "move" : "choose";
  }

  /**
   * @param {HTMLElement} slider
   * @param {Grip} grip
   */
  #keys(slider, grip) {
    slider.addEventListener("keydown", (event) => {
      const width = this.#view.high - this.#view.low;
      /** @type {Record<string, number>} */
      const steps = { ArrowLeft: -0.1, ArrowDown: -0.1, ArrowRight: 0.1, ArrowUp: 0.1, PageDown: -1, PageUp: 1 };
      const ends = { Home: this.#whole.low - this.#whole.high, End: this.#whole.high - this.#whole.low };
      const by = event.key in steps ? steps[event.key] * width : ends[/** @type {"Home"|"End"} */ (event.key)];
      if (by === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      this.#moved(draggedView(grip, this.#view, 0, by, this.#whole));
    });
  }
}

/**
 * The window after a drag of its `grip` between two places. What is dragged does not leave the whole.
 * @param {Grip} grip
 * @param {View} view
 * @param {number} from
 * @param {number} to
 * @param {View} whole
 * @returns {View}
 */
export function draggedView(grip, view, from, to, whole) {
  if (grip === "choose") return { low: Math.min(from, to), high: Math.max(from, to) };
  const by = Math.max(whole.low - view.low, Math.min(whole.high - view.high, to - from));
  if (grip === "move") return { low: view.low + by, high: view.high + by };
  const [fixed, edge] = grip === "start" ? [view.high, view.low] : [view.low, view.high];
  const moved = Math.max(whole.low, Math.min(whole.high, edge + to - from));
  return { low: Math.min(fixed, moved), high: Math.max(fixed, moved) };
}
