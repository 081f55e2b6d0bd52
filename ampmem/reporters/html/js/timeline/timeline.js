/** The timeline: state of the view and the cursor, and what draws them. */
import { byId, choices, press } from "../common/dom.js";
import { given } from "../common/given.js";
import { shownTheme } from "../common/theme.js";
import { lastAtMost } from "../data/live.js";
import { TimelineChart, bandAt } from "./chart.js";
import { stackedTotals } from "./figure.js";
import { openingOf, peakOf, viewInWords } from "./opening.js";
import { Overview } from "./overview.js";
import { describedInstant, drawPhases } from "./phases.js";
import { followPointer } from "./pointer.js";
import { buildReadout, placeCursor, showReading } from "./readout.js";
import { clampedView, convertedView, pannedView, placeOf, viewAround, viewNote, wholeView, zoomedView } from "./view.js";
/** @import { CategoryView, PageView } from "../common/page.js" */
/** @import { Run, RunStep } from "../data/run.js" */
/** @import { Live } from "../data/stream.js" */
/** @import { Plotly, View } from "../figures/figures.js" */
/** @import { ReadoutRow } from "./readout.js" */

/**
 * @typedef {object} Heard what the timeline tells
 * @property {(index: number|null) => void} pinned another instant is pinned, or none
 * @property {(index: number, title: string) => void} read another instant is shown in the readout
 * @property {(category: number|null) => void} picked a click was in the band of this category, or in none
 * @property {() => void} viewed another part of the run is in view
 */

export class Timeline {
  #chart;
  #page;
  #heard;
  #overview = new Overview((view) => this.setView(view));
  /** @type {Run|null} */
  #run = null;
  /** @type {Live|null} */
  #live = null;
  /**
   * What is stacked: the categories, and above them the allocator's layers where they are known.
   * @type {CategoryView[]}
   */
  #stack = [];
  /** @type {boolean[]} */
  #shown = [];
  /** @type {boolean[]} */
  #present = [];
  /** @type {Map<number, ReadoutRow>} */
  #rows = new Map();
  /** @type {RunStep|null} */
  #step = null;
  /** @type {number|null} */
  #cursor = null;
  /** @type {number|null} */
  #pinned = null;
  /** @type {View} */
  #view = { low: 0, high: 1 };
  #byTime = false;
  /** @type {Float64Array} */
  #totals = new Float64Array(0);
  /**
   * @param {Plotly} plotly
   * @param {PageView} page
   * @param {Heard} heard
   */
  constructor(plotly, page, heard) {
    this.#chart = new TimelineChart(plotly, page.config, (view) => this.setView(view));
    this.#page = page;
    this.#heard = heard;
    this.#listen();
  }

  /** When the chart is there to be seen. */
  get painted() {
    return this.#chart.painted;
  }

  /** The run that is shown. */
  get run() {
    return given(this.#run);
  }

  /** The pinned instant. */
  get pinned() {
    return this.#pinned;
  }

  /** Whether there is a cursor, which may go on. */
  get moving() {
    return this.#cursor !== null;
  }

  /** What lives in it when. */
  get live() {
    return given(this.#live);
  }

  /** What is in view, and the pinned instant, for a link to it; a view that is null is the one that the run opens on. */
  get place() {
    const { low, high } = this.#view;
    const opening = this.#openingView();
    const view = !this.#byTime && low === opening.low && high === opening.high ? null : this.#view;
    return { view, byTime: this.#byTime, pin: this.#pinned === null ? null : this.live.position(this.#pinned) };
  }

  /**
   * Goes where a link leads to.
   * @param {{view: View|null, byTime: boolean|null, pin: number|null}} place
   */
  restore({ view, byTime, pin }) {
    if (byTime !== null) this.useTime(byTime);
    if (view) this.setView(view);
    if (pin !== null) this.pin(this.live.indexOf(pin));
  }

  /**
   * Shows another run, as `openingOf` says.
   * @param {Run} run
   * @param {Live} live
   */
  show(run, live) {
    this.#run = run;
    this.#live = live;
    this.#cursor = null;
    this.#pinned = null;
    this.#stack = [...this.#page.categories, ...(live.layers ? this.#page.layers : [])];
    this.#shown = this.#stack.map(() => true);
    this.#present = Array.from(live.most, (most) => most > 0);
    this.#totals = live.totals;
    this.#rows = buildReadout(this.#stack, this.#present, (category) => this.toggle(category));
    /** @type {Array<[string, string]>} */
    const steps = run.steps.map((step, i) => [String(i), `Step ${step.index}`]);
    choices(byId("step", HTMLSelectElement), [["all", "All steps"], ...steps], "all");
    byId("to-peak", HTMLButtonElement).disabled = !run.peak;
    byId("axis").hidden = !run.timed;
    this.#useAxis(false);
    this.#step = openingOf(run)?.step ?? null;
    byId("step", HTMLSelectElement).value = this.#step ? String(run.steps.indexOf(this.#step)) : "all";
    this.setView(this.#openingView());
  }

  #openingView() {
    const opening = openingOf(this.run);
    return opening ? this.#between(opening.first, opening.last) : wholeView(this.live, false);
  }

  /**
   * The view between two positions.
   * @param {number} first
   * @param {number} last
   * @returns {View}
   */
  #between(first, last) {
    const [low, high] = [first, last].map((each) => placeOf(this.live, this.live.indexOf(each), this.#byTime));
    return { low, high };
  }

  #listen() {
    byId("by-events").addEventListener("click", () => this.useTime(false));
    byId("by-time").addEventListener("click", () => this.useTime(true));
    byId("to-peak").addEventListener("click", () => this.toPeak());
    byId("reset").addEventListener("click", () => this.reset());
    byId("zoom-in").addEventListener("click", () => this.zoom(0.5));
    byId("zoom-out").addEventListener("click", () => this.zoom(2));
    byId("step").addEventListener("change", () => this.toStep(byId("step", HTMLSelectElement).value));
    byId("event-back").addEventListener("click", () => this.stepBy(-1));
    byId("event-on").addEventListener("click", () => this.stepBy(1));
    followPointer(byId("chart-frame"), {
      hover: (clientX) => this.moveCursor(this.#chart.instantAt(clientX)),
      leave: () => this.moveCursor(null),
      click: (clientY) => this.#click(clientY),
      doubleClick: () => {
        this.pin(null);
        this.reset();
      },
    });
    new ResizeObserver(() => {
      if (this.#live && Math.abs(this.#chart.room - this.#chart.width) > 1) this.draw();
    }).observe(byId("chart-frame"));
  }

  /** @param {number} clientY */
  #click(clientY) {
    const index = this.#cursor;
    this.pin(index);
    if (index === null) return;
    const values = this.live.sample([index]).map((each) => each[0]);
    const band = bandAt(values, this.#shown, this.#chart.bytesAt(clientY));
    this.#heard.picked(band !== null && band < this.live.categories ? band : null);
  }

  /** @param {boolean} byTime */
  useTime(byTime) {
    if (byTime === this.#byTime || !this.run.timed) return;
    const view = convertedView(this.live, this.#view, this.#byTime, byTime);
    this.#useAxis(byTime);
    this.setView(view);
  }

  /** @param {boolean} byTime */
  #useAxis(byTime) {
    this.#byTime = byTime;
    if (byTime) press(byId("by-time"), byId("by-events"));
    else press(byId("by-events"), byId("by-time"));
  }

  /** @param {View} view */
  setView(view) {
    this.#view = clampedView(this.live, view, this.#byTime);
    this.draw();
  }

  reset() {
    this.#step = null;
    byId("step", HTMLSelectElement).value = "all";
    this.setView(wholeView(this.live, this.#byTime));
  }

  /** @param {string} value the number of a step, or `all` */
  toStep(value) {
    if (value === "all") return this.reset();
    this.#step = this.run.steps[Number(value)];
    byId("step", HTMLSelectElement).value = value;
    return this.setView(this.#between(this.#step.first, this.#step.last));
  }

  peakShown() {
    return peakOf(this.run, this.live, this.#step);
  }

  toPeak() {
    const peak = this.peakShown();
    if (!peak) return;
    this.#cursor = null;
    this.setView(viewAround(this.live, peak.index, this.#byTime));
  }

  /** @param {number} factor */
  zoom(factor) {
    const index = this.#from();
    this.setView(zoomedView(this.#view, factor, placeOf(this.live, index, this.#byTime)));
  }

  /** @param {number} part */
  pan(part) {
    this.setView(pannedView(this.#view, part));
  }

  /**
   * Moves the cursor by `count` drawn instants; the view follows.
   * @param {number} count
   */
  walk(count) {
    const from = this.#from();
    const { indices, every } = this.#chart;
    const at = Math.max(0, Math.min(indices.length - 1, lastAtMost(indices, from) + count));
    let to = indices[at];
    if (every) to = Math.max(0, Math.min(this.live.length - 1, from + count));
    this.#bring(to);
    this.moveCursor(to);
  }

  /**
   * Goes on by `count` allocator events, drawn or not: with the cursor where there is one, else with what is pinned.
   * @param {number} count
   */
  stepBy(count) {
    const to = Math.max(0, Math.min(this.live.length - 1, this.#from() + count));
    const pinned = this.#pinned !== null && (this.#cursor === null || this.#cursor === this.#pinned);
    this.#bring(to);
    this.moveCursor(pinned ? null : to);
    if (pinned) this.pin(to);
  }

  /** The instant from which a step is taken. */
  #from() {
    return this.#cursor ?? this.#pinned ?? this.peakShown()?.index ?? 0;
  }

  /**
   * Brings an instant into view.
   * @param {number} index
   */
  #bring(index) {
    const place = placeOf(this.live, index, this.#byTime);
    if (place >= this.#view.low && place <= this.#view.high) return;
    const half = (this.#view.high - this.#view.low) / 2;
    this.setView({ low: place - half, high: place + half });
  }

  /** @param {number} category */
  toggle(category) {
    this.#shown[category] = !this.#shown[category];
    this.#totals = this.live.totalsOf(this.#shownCategories());
    this.draw();
  }

  #shownCategories() {
    return this.#shown.slice(0, this.live.categories);
  }

  /** @param {number|null} index */
  moveCursor(index) {
    if (index === this.#cursor) return;
    this.#cursor = index;
    this.#read();
  }

  /** @param {number|null} index */
  pin(index) {
    if (index === this.#pinned) return;
    this.#pinned = index;
    this.#read();
    this.#heard.pinned(index);
  }

  /** Pins the keyboard's cursor; a second time unpins. */
  pinHere() {
    const index = this.#cursor ?? this.peakShown()?.index ?? null;
    this.pin(index === this.#pinned ? null : index);
  }

  /** Draws the view anew; `theme` and `width` are given for print. */
  draw({ theme = shownTheme(), width = this.#chart.room } = {}) {
    const { run, live } = this;
    const view = this.#view;
    const byTime = this.#byTime;
    const whole = this.#shownCategories().every((shown, i) => shown || !this.#present[i]);
    const { first, last } = this.#chart.draw({
      run,
      live,
      view,
      byTime,
      totals: this.#totals,
      stack: this.#stack,
      shown: this.#shown,
      present: this.#present,
      peak: whole ? this.peakShown() : null,
      theme,
      width,
    });
    drawPhases(byId("phases"), run, live, view, byTime, width);
    this.#overview.draw(live, byTime, width, run.peak && placeOf(live, live.indexOf(run.peak.position), byTime));
    this.#overview.place(view);
    byId("in-view").textContent = viewInWords(run, live, view, byTime);
    byId("shown").textContent = viewNote(run, live, { first, last }, this.#chart);
    this.#read();
    this.#heard.viewed();
    return this.painted;
  }

  #read() {
    const peak = this.peakShown();
    const index = this.#cursor ?? this.#pinned ?? peak?.index ?? this.live.length - 1;
    const values = Float64Array.from(this.live.sample([index]), (each) => each[0]);
    const where = describedInstant(this.run, this.live, index);
    const pinned = this.#pinned !== null && (this.#cursor ?? this.#pinned) === this.#pinned;
    const title = pinned ? "At the pinned event" : this.#cursor !== null ? "At the cursor" : (peak?.title ?? "At the end");
    showReading(this.#rows, { title, where, values, live: this.live.categories }, this.#shown);
    const shown = this.#shownCategories();
    const total = stackedTotals(Array.from(values, (value) => [value]), shown)[0];
    const part = (/** @type {number|null|undefined} */ at) =>
      at === null || at === undefined ? NaN : this.#partOf(at);
    placeCursor(
      { live: this.live, index, where, total },
      { part: part(this.#cursor ?? this.#pinned), peak: part(peak?.index), pinned, width: this.#chart.width },
    );
    this.#heard.read(index, title);
  }

  /**
   * Where an instant is, as a part of the view.
   * @param {number} index
   */
  #partOf(index) {
    return (placeOf(this.live, index, this.#byTime) - this.#view.low) / (this.#view.high - this.#view.low);
  }
}
