/** The timeline: state of the view and the cursor, and what draws them. */
import { byId, choices, press } from "../common/dom.js";
import { formatBytes, formatCount, formatDuration } from "../common/format.js";
import { MARGIN, timelineFigure, stackedTotals } from "./timelinefigure.js";
import { lastAtMost } from "../data/live.js";
import { drawPhases } from "./phases.js";
import { buildReadout, showReading } from "./readout.js";
import { ascending, drawnInstants, withChanges } from "../data/reduce.js";
import { shownTheme } from "../common/theme.js";
import { clampedView, convertedView, instantsOf, pannedView, placeOf, viewAround, wholeView, zoomedView } from "./view.js";

const STILL = 4;
const DOUBLE_MS = 350;

/** Step and phase of the event that led to `position`. */
function placeInRun(run, position) {
  const event = position - 1;
  const phases = run.phase_runs;
  const step = run.steps.find((each) => each.first < position && position <= each.last) ?? null;
  if (event < 0 || !phases.length || phases[0][0] > event) return { step, phase: "" };
  let low = 0;
  let high = phases.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >>> 1;
    if (phases[middle][0] <= event) low = middle;
    else high = middle - 1;
  }
  return { step, phase: phases[low][1] };
}

export class Timeline {
  #plotly;
  #page;
  #pinChanged;
  #width = 0;
  #down = null;
  #clicked = 0;

  /** `pinChanged` is called with the pinned instant, or null. */
  constructor(plotly, page, pinChanged) {
    this.#plotly = plotly;
    this.#page = page;
    this.#pinChanged = pinChanged;
    this.byTime = false;
    this.#listen();
  }

  /** Shows another run from its start. */
  show(run, live) {
    Object.assign(this, { run, live, cursor: null, pinned: null, step: null });
    /** What is stacked: the categories, and above them the allocator's layers where they are known. */
    this.stack = [...this.#page.categories, ...(live.layers ? this.#page.layers : [])];
    this.shown = this.stack.map(() => true);
    this.present = Array.from(live.most, (most) => most > 0);
    this.totals = live.totals;
    this.peakIndex = run.peak ? live.indexOf(run.peak.position) : 0;
    this.rows = buildReadout(this.stack, this.present, (category) => this.toggle(category));
    const steps = run.steps.map((step, i) => [String(i), `Step ${step.index}`]);
    choices(byId("step"), [["all", "All steps"], ...steps], "all");
    byId("to-peak").disabled = !run.peak;
    this.reset();
  }

  #listen() {
    const frame = byId("chart-frame");
    byId("by-events").addEventListener("click", () => this.useTime(false));
    byId("by-time").addEventListener("click", () => this.useTime(true));
    byId("to-peak").addEventListener("click", () => this.toPeak());
    byId("reset").addEventListener("click", () => this.reset());
    byId("zoom-in").addEventListener("click", () => this.zoom(0.5));
    byId("zoom-out").addEventListener("click", () => this.zoom(2));
    byId("step").addEventListener("change", (event) => this.toStep(event.target.value));
    frame.addEventListener("pointermove", (event) => this.#hover(event));
    frame.addEventListener("pointerleave", () => this.moveCursor(null));
    frame.addEventListener("pointerdown", (event) => (this.#down = { x: event.clientX, y: event.clientY }), true);
    // The drawing library covers the page while the button is down, so the frame does not see it go up.
    window.addEventListener("pointerup", (event) => this.#up(event), true);
    new ResizeObserver(() => {
      if (this.live && Math.abs(this.#frameWidth() - this.#width) > 1) this.draw();
    }).observe(byId("chart-frame"));
  }

  #frameWidth() {
    return byId("chart-frame").clientWidth;
  }

  #up(event) {
    const down = this.#down;
    this.#down = null;
    if (!down || Math.hypot(event.clientX - down.x, event.clientY - down.y) > STILL) return;
    if (event.timeStamp - this.#clicked < DOUBLE_MS) {
      this.#clicked = 0;
      this.pin(null);
      this.reset();
      return;
    }
    this.#clicked = event.timeStamp;
    this.#hover(event);
    this.pin(this.cursor);
  }

  #hover(event) {
    const box = byId("chart-frame").getBoundingClientRect();
    const at = event.clientX - box.left - MARGIN.left;
    const inner = this.#width - MARGIN.left - MARGIN.right;
    if (at < -4 || at > inner + 4) return this.moveCursor(null);
    const place = this.view.low + ((this.view.high - this.view.low) * at) / inner;
    return this.moveCursor(this.#nearestDrawn(place));
  }

  #nearestDrawn(place) {
    const { x, indices } = this.drawn;
    const before = lastAtMost(x, place);
    const after = Math.min(before + 1, x.length - 1);
    return indices[place - x[before] <= x[after] - place ? before : after];
  }

  useTime(byTime) {
    if (byTime === this.byTime) return;
    this.view = convertedView(this.live, this.view, this.byTime, byTime);
    this.byTime = byTime;
    press(...(byTime ? [byId("by-time"), byId("by-events")] : [byId("by-events"), byId("by-time")]));
    this.setView(this.view);
  }

  setView(view) {
    this.view = clampedView(this.live, view, this.byTime);
    this.draw();
  }

  reset() {
    this.step = null;
    byId("step").value = "all";
    this.setView(wholeView(this.live, this.byTime));
  }

  toStep(value) {
    if (value === "all") return this.reset();
    this.step = this.run.steps[Number(value)];
    byId("step").value = value;
    const [low, high] = [this.step.first, this.step.last].map((position) =>
      placeOf(this.live, this.live.indexOf(position), this.byTime),
    );
    return this.setView({ low, high });
  }

  /** The peak of the chosen step, else of the run: its instant, bytes and name. */
  peakShown() {
    if (this.step) {
      return {
        index: this.live.indexOf(this.step.peak),
        bytes: this.step.peak_bytes,
        label: `step ${this.step.index} peak`,
      };
    }
    return this.run.peak ? { index: this.peakIndex, bytes: this.run.peak.bytes, label: "peak" } : null;
  }

  toPeak() {
    const peak = this.peakShown();
    if (!peak) return;
    this.cursor = null;
    this.setView(viewAround(this.live, peak.index, this.byTime));
  }

  zoom(factor) {
    const index = this.cursor ?? this.pinned ?? this.peakShown()?.index ?? 0;
    this.setView(zoomedView(this.view, factor, placeOf(this.live, index, this.byTime)));
  }

  pan(part) {
    this.setView(pannedView(this.view, part));
  }

  /** Moves the cursor by `count` drawn instants; the view follows. */
  walk(count) {
    const from = this.cursor ?? this.pinned ?? this.peakShown()?.index ?? 0;
    const { indices } = this.drawn;
    const at = Math.max(0, Math.min(indices.length - 1, lastAtMost(indices, from) + count));
    let to = indices[at];
    if (this.drawn.every) to = Math.max(0, Math.min(this.live.length - 1, from + count));
    const place = placeOf(this.live, to, this.byTime);
    if (place < this.view.low || place > this.view.high) {
      const half = (this.view.high - this.view.low) / 2;
      this.setView({ low: place - half, high: place + half });
    }
    this.moveCursor(to);
  }

  toggle(category) {
    this.shown[category] = !this.shown[category];
    this.totals = this.live.totalsOf(this.#shownCategories());
    this.draw();
  }

  #shownCategories() {
    return this.shown.slice(0, this.live.categories);
  }

  moveCursor(index) {
    if (index === this.cursor) return;
    this.cursor = index;
    this.#read();
  }

  pin(index) {
    if (index === this.pinned) return;
    this.pinned = index;
    this.#read();
    this.#pinChanged(index);
  }

  /** Pins the keyboard's cursor; a second time unpins. */
  pinHere() {
    const index = this.cursor ?? this.peakShown()?.index ?? null;
    this.pin(index === this.pinned ? null : index);
  }

  /** `event 2,307 · step 2 · backward · 36.3 ms` */
  describe(index) {
    const position = this.live.position(index);
    const { step, phase } = placeInRun(this.run, position);
    const parts = [
      `event ${formatCount(position)}`,
      step ? `step ${step.index}` : "",
      phase,
      formatDuration(this.live.times[index]),
    ];
    return parts.filter(Boolean).join(" · ");
  }

  /** Draws the view anew; `theme` and `width` are given for print. */
  draw({ theme = shownTheme(), width = this.#frameWidth() } = {}) {
    this.#width = width;
    const { live, view, byTime } = this;
    const { first, last } = instantsOf(live, view, byTime);
    const drawn = drawnInstants(this.totals, first, last, byTime ? live.times : null);
    const { every } = drawn;
    const indices = every ? drawn.indices : withChanges(drawn.indices, live.changes, live.reserved, first, last);
    const x = ascending(Float64Array.from(indices, (index) => placeOf(live, index, byTime)));
    const series = live.sample(indices);
    this.drawn = { indices, x, series, every };
    const peak = this.#shownCategories().every((shown, i) => shown || !this.present[i]) ? this.peakShown() : null;
    const drawing = {
      x,
      series,
      shown: this.shown,
      present: this.present,
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
    const figure = timelineFigure(drawing, this.stack, theme);
    const chart = byId("chart");
    const config = {
      ...this.#page.config,
      responsive: false,
      doubleClick: false,
      displayModeBar: false,
      scrollZoom: false,
    };
    this.painted = this.#plotly.react(chart, figure.data, figure.layout, config);
    if (!this.bound) {
      this.bound = true;
      chart.on("plotly_relayout", (change) => this.#relayout(change));
    }
    drawPhases(byId("phases"), this.run, live, view, byTime, width);
    this.#say();
    this.#read();
    return this.painted;
  }

  /** Where memory ran out; null when it did not. */
  #failurePlace() {
    const failure = this.run.out_of_memory;
    return failure ? placeOf(this.live, this.live.indexOf(failure.position), this.byTime) : null;
  }

  #relayout(change) {
    const low = change["xaxis.range[0]"];
    const high = change["xaxis.range[1]"];
    if (low !== undefined && high !== undefined) this.setView({ low: Number(low), high: Number(high) });
  }

  #say() {
    const { first, last } = instantsOf(this.live, this.view, this.byTime);
    const events = this.live.position(last) - this.live.position(first);
    const drawn = formatCount(this.drawn.indices.length);
    const words = [];
    if (!this.live.exact) {
      words.push(
        this.run.stream.note,
        `${formatCount(events)} events in view, drawn at ${drawn} of the instants kept.`,
      );
    } else if (this.drawn.every) words.push(`Every event is shown: ${formatCount(events)} in view.`);
    else {
      words.push(
        `${formatCount(events)} events in view, drawn at ${drawn} exact instants: the lowest and the highest of every stretch.`,
      );
    }
    byId("shown").textContent = words.filter(Boolean).join(" ");
  }

  #read() {
    const peak = this.peakShown();
    const index = this.cursor ?? this.pinned ?? peak?.index ?? this.live.length - 1;
    const values = Float64Array.from(this.live.sample([index]), (each) => each[0]);
    const where = this.describe(index);
    let title = this.step ? `At the peak of step ${this.step.index}` : "At the peak";
    if (this.cursor !== null) title = this.cursor === this.pinned ? "At the pinned event" : "At the cursor";
    else if (this.pinned !== null) title = "At the pinned event";
    else if (!peak) title = "At the end";
    showReading(this.rows, { title, where, values, live: this.live.categories }, this.shown);
    this.#placeCursor(index, where, values);
  }

  #placeCursor(index, where, values) {
    const active = this.cursor ?? this.pinned;
    const frame = byId("chart-frame");
    const line = byId("cursor");
    const total = stackedTotals(
      Array.from(values, (value) => [value]),
      this.#shownCategories(),
    )[0];
    frame.setAttribute("aria-valuemax", String(this.live.position(this.live.length - 1)));
    frame.setAttribute("aria-valuenow", String(this.live.position(index)));
    frame.setAttribute("aria-valuetext", `${where}: ${formatBytes(total)}`);
    const place = active === null ? NaN : placeOf(this.live, active, this.byTime);
    const part = (place - this.view.low) / (this.view.high - this.view.low);
    line.hidden = !(part >= 0 && part <= 1);
    line.classList.toggle("pinned", active !== null && active === this.pinned);
    line.classList.toggle("leftwards", part > 0.8 || this.#peakIsJustRightOf(part));
    if (!line.hidden) line.style.left = `${MARGIN.left + part * (this.#width - MARGIN.left - MARGIN.right)}px`;
    byId("cursor-total").textContent = formatBytes(total);
  }

  /** Whether the peak's label would be under that of a cursor at this part of the view. */
  #peakIsJustRightOf(part) {
    const peak = this.peakShown();
    if (!peak || part < 0.15) return false;
    const there = (placeOf(this.live, peak.index, this.byTime) - this.view.low) / (this.view.high - this.view.low);
    return there >= part && there - part < 0.2;
  }

  /** What `actionOf` says. */
  perform(action) {
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
