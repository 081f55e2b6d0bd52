/** The timeline: state of the view and the cursor, and what draws them. */
import { byId, choices, press } from "../common/dom.js";
import { formatBytes } from "../common/format.js";
import { given } from "../common/given.js";
import { shownTheme } from "../common/theme.js";
import { lastAtMost } from "../data/live.js";
import { ascending, drawnInstants, withChanges } from "../data/reduce.js";
import { describedInstant, drawPhases } from "./phases.js";
import { followPointer } from "./pointer.js";
import { buildReadout, showReading } from "./readout.js";
import { MARGIN, timelineFigure, stackedTotals } from "./timelinefigure.js";
import { clampedView, convertedView, instantsOf, pannedView, placeOf, viewAround, viewNote, wholeView, zoomedView } from "./view.js";
/** @import { CategoryView, PageView, RunView, StepView } from "../common/page.js" */
/** @import { Live } from "../data/stream.js" */
/** @import { Chart, Plotly } from "./figures.js" */
/** @import { ReadoutRow } from "./readout.js" */
/** @import { View } from "./view.js" */

export class Timeline {
  #plotly;
  #page;
  #pinChanged;
  #width = 0;
  #bound = false;
  /** @type {RunView|null} */
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
  /** @type {StepView|null} */
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
  /** @type {{indices: Uint32Array, x: Float64Array, every: boolean}} */
  #drawn = { indices: new Uint32Array(0), x: new Float64Array(0), every: true };
  /** @type {Promise<unknown>} */
  painted = Promise.resolve();

  /**
   * @param {Plotly} plotly
   * @param {PageView} page
   * @param {(index: number|null) => void} pinChanged called with the pinned instant
   */
  constructor(plotly, page, pinChanged) {
    this.#plotly = plotly;
    this.#page = page;
    this.#pinChanged = pinChanged;
    this.#listen();
  }

  /** The run that is shown. */
  get run() {
    return given(this.#run);
  }

  /** What lives in it when. */
  get live() {
    return given(this.#live);
  }

  /**
   * Shows another run from its start.
   * @param {RunView} run
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
    this.reset();
  }

  #listen() {
    byId("by-events").addEventListener("click", () => this.useTime(false));
    byId("by-time").addEventListener("click", () => this.useTime(true));
    byId("to-peak").addEventListener("click", () => this.toPeak());
    byId("reset").addEventListener("click", () => this.reset());
    byId("zoom-in").addEventListener("click", () => this.zoom(0.5));
    byId("zoom-out").addEventListener("click", () => this.zoom(2));
    byId("step").addEventListener("change", () => this.toStep(byId("step", HTMLSelectElement).value));
    followPointer(byId("chart-frame"), {
      hover: (clientX) => this.#hover(clientX),
      leave: () => this.moveCursor(null),
      click: () => this.pin(this.#cursor),
      doubleClick: () => {
        this.pin(null);
        this.reset();
      },
    });
    new ResizeObserver(() => {
      if (this.#live && Math.abs(this.#frameWidth() - this.#width) > 1) this.draw();
    }).observe(byId("chart-frame"));
  }

  #frameWidth() {
    return byId("chart-frame").clientWidth;
  }

  /** @param {number} clientX */
  #hover(clientX) {
    const box = byId("chart-frame").getBoundingClientRect();
    const at = clientX - box.left - MARGIN.left;
    const inner = this.#width - MARGIN.left - MARGIN.right;
    if (at < -4 || at > inner + 4) return this.moveCursor(null);
    const place = this.#view.low + ((this.#view.high - this.#view.low) * at) / inner;
    return this.moveCursor(this.#nearestDrawn(place));
  }

  /** @param {number} place */
  #nearestDrawn(place) {
    const { x, indices } = this.#drawn;
    const before = lastAtMost(x, place);
    const after = Math.min(before + 1, x.length - 1);
    return indices[place - x[before] <= x[after] - place ? before : after];
  }

  /** @param {boolean} byTime */
  useTime(byTime) {
    if (byTime === this.#byTime) return;
    this.#view = convertedView(this.live, this.#view, this.#byTime, byTime);
    this.#byTime = byTime;
    if (byTime) press(byId("by-time"), byId("by-events"));
    else press(byId("by-events"), byId("by-time"));
    this.setView(this.#view);
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
    const [low, high] = [this.#step.first, this.#step.last].map((position) =>
      placeOf(this.live, this.live.indexOf(position), this.#byTime),
    );
    return this.setView({ low, high });
  }

  /** The peak of the chosen step, else of the run: its instant, bytes and name. */
  peakShown() {
    if (this.#step) {
      return {
        index: this.live.indexOf(this.#step.peak),
        bytes: this.#step.peak_bytes,
        label: `step ${this.#step.index} peak`,
      };
    }
    const { peak } = this.run;
    return peak ? { index: this.live.indexOf(peak.position), bytes: peak.bytes, label: "peak" } : null;
  }

  toPeak() {
    const peak = this.peakShown();
    if (!peak) return;
    this.#cursor = null;
    this.setView(viewAround(this.live, peak.index, this.#byTime));
  }

  /** @param {number} factor */
  zoom(factor) {
    const index = this.#cursor ?? this.#pinned ?? this.peakShown()?.index ?? 0;
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
    const from = this.#cursor ?? this.#pinned ?? this.peakShown()?.index ?? 0;
    const { indices } = this.#drawn;
    const at = Math.max(0, Math.min(indices.length - 1, lastAtMost(indices, from) + count));
    let to = indices[at];
    if (this.#drawn.every) to = Math.max(0, Math.min(this.live.length - 1, from + count));
    const place = placeOf(this.live, to, this.#byTime);
    if (place < this.#view.low || place > this.#view.high) {
      const half = (this.#view.high - this.#view.low) / 2;
      this.setView({ low: place - half, high: place + half });
    }
    this.moveCursor(to);
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
    this.#pinChanged(index);
  }

  /** Pins the keyboard's cursor; a second time unpins. */
  pinHere() {
    const index = this.#cursor ?? this.peakShown()?.index ?? null;
    this.pin(index === this.#pinned ? null : index);
  }

  /** Draws the view anew; `theme` and `width` are given for print. */
  draw({ theme = shownTheme(), width = this.#frameWidth() } = {}) {
    this.#width = width;
    const { live } = this;
    const view = this.#view;
    const byTime = this.#byTime;
    const { first, last } = instantsOf(live, view, byTime);
    const drawn = drawnInstants(this.#totals, first, last, byTime ? live.times : null);
    const { every } = drawn;
    const indices = every ? drawn.indices : withChanges(drawn.indices, live.changes, live.reserved, first, last);
    const x = ascending(Float64Array.from(indices, (index) => placeOf(live, index, byTime)));
    const series = live.sample(indices);
    this.#drawn = { indices, x, every };
    const peak = this.#shownCategories().every((shown, i) => shown || !this.#present[i]) ? this.peakShown() : null;
    const drawing = {
      x,
      series,
      shown: this.#shown,
      present: this.#present,
      live: live.categories,
      view,
      byTime,
      width,
      height: width < 560 ? 300 : 400,
      draggable: matchMedia("(pointer: fine)").matches,
      steps: this.run.steps
        .map((step) => placeOf(live, live.indexOf(step.first), byTime))
        .filter((place) => place > view.low && place < view.high),
      failure: this.#failurePlace(),
      peak: peak && { x: placeOf(live, peak.index, byTime), bytes: peak.bytes, label: peak.label },
    };
    const figure = timelineFigure(drawing, this.#stack, theme);
    const chart = /** @type {Chart} */ (byId("chart"));
    const config = {
      ...this.#page.config,
      responsive: false,
      doubleClick: false,
      displayModeBar: false,
      scrollZoom: false,
    };
    this.painted = this.#plotly.react(chart, figure.data, figure.layout, config);
    if (!this.#bound) {
      this.#bound = true;
      chart.on("plotly_relayout", (change) => this.#relayout(change));
    }
    drawPhases(byId("phases"), this.run, live, view, byTime, width);
    byId("shown").textContent = viewNote(this.run, live, { first, last }, this.#drawn);
    this.#read();
    return this.painted;
  }

  /** Where memory ran out; null when it did not. */
  #failurePlace() {
    const failure = this.run.out_of_memory;
    return failure ? placeOf(this.live, this.live.indexOf(failure.position), this.#byTime) : null;
  }

  /** @param {Record<string, unknown>} change */
  #relayout(change) {
    const low = change["xaxis.range[0]"];
    const high = change["xaxis.range[1]"];
    if (low !== undefined && high !== undefined) this.setView({ low: Number(low), high: Number(high) });
  }

  #read() {
    const peak = this.peakShown();
    const index = this.#cursor ?? this.#pinned ?? peak?.index ?? this.live.length - 1;
    const values = Float64Array.from(this.live.sample([index]), (each) => each[0]);
    const where = describedInstant(this.run, this.live, index);
    let title = this.#step ? `At the peak of step ${this.#step.index}` : "At the peak";
    if (this.#cursor !== null) title = this.#cursor === this.#pinned ? "At the pinned event" : "At the cursor";
    else if (this.#pinned !== null) title = "At the pinned event";
    else if (!peak) title = "At the end";
    showReading(this.#rows, { title, where, values, live: this.live.categories }, this.#shown);
    this.#placeCursor(index, where, values);
  }

  /**
   * @param {number} index
   * @param {string} where
   * @param {Float64Array} values
   */
  #placeCursor(index, where, values) {
    const active = this.#cursor ?? this.#pinned;
    const frame = byId("chart-frame");
    const line = byId("cursor");
    const total = stackedTotals(
      Array.from(values, (value) => [value]),
      this.#shownCategories(),
    )[0];
    frame.setAttribute("aria-valuemax", String(this.live.position(this.live.length - 1)));
    frame.setAttribute("aria-valuenow", String(this.live.position(index)));
    frame.setAttribute("aria-valuetext", `${where}: ${formatBytes(total)}`);
    const place = active === null ? NaN : placeOf(this.live, active, this.#byTime);
    const part = (place - this.#view.low) / (this.#view.high - this.#view.low);
    line.hidden = !(part >= 0 && part <= 1);
    line.classList.toggle("pinned", active !== null && active === this.#pinned);
    line.classList.toggle("leftwards", part > 0.8 || this.#peakIsJustRightOf(part));
    if (!line.hidden) line.style.left = `${MARGIN.left + part * (this.#width - MARGIN.left - MARGIN.right)}px`;
    byId("cursor-total").textContent = formatBytes(total);
  }

  /**
   * Whether the peak's label would be under that of a cursor at this part of the view.
   * @param {number} part
   */
  #peakIsJustRightOf(part) {
    const peak = this.peakShown();
    if (!peak || part < 0.15) return false;
    const there = (placeOf(this.live, peak.index, this.#byTime) - this.#view.low) / (this.#view.high - this.#view.low);
    return there >= part && there - part < 0.2;
  }

  /**
   * What `actionOf` says.
   * @param {string} action
   */
  perform(action) {
    /** @type {Record<string, () => void>} */
    const actions = {
      "zoom-in": () => this.zoom(0.5),
      "zoom-out": () => this.zoom(2),
      "pan-left": () => this.pan(-0.25),
      "pan-right": () => this.pan(0.25),
      peak: () => this.toPeak(),
      reset: () => this.reset(),
      previous: () => this.walk(-1),
      next: () => this.walk(1),
      "previous-ten": () => this.walk(-10),
      "next-ten": () => this.walk(10),
      last: () => this.walk(this.live.length),
      pin: () => this.pinHere(),
    };
    actions[action]?.();
  }
}
