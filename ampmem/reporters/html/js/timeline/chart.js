/** The chart of the timeline: what is drawn of a view, and what lies under a point of it. */
import { byId } from "../common/dom.js";
import { lastAtMost } from "../data/live.js";
import { ascending, drawnInstants, withChanges } from "../data/reduce.js";
import { MARGIN, NARROW_WIDTH, timelineFigure } from "./figure.js";
import { instantsOf, placeOf } from "./view.js";
/** @import { CategoryView } from "../common/page.js" */
/** @import { Run } from "../data/run.js" */
/** @import { Theme } from "../common/theme.js" */
/** @import { Live } from "../data/stream.js" */
/** @import { Chart, Plotly, View } from "../figures/figures.js" */

/**
 * @typedef {object} Picture what is to be drawn
 * @property {Run} run
 * @property {Live} live
 * @property {View} view
 * @property {boolean} byTime
 * @property {Float64Array} totals what the extremes are taken of
 * @property {CategoryView[]} stack the categories, and the layers above them
 * @property {boolean[]} shown by series of the stack
 * @property {boolean[]} present by series of the stack
 * @property {{index: number, bytes: number, label: string}|null} peak
 * @property {Theme} theme
 * @property {number} width
 */

const CHART_HEIGHT = 400;
const NARROW_HEIGHT = 300;

export class TimelineChart {
  #plotly;
  #config;
  #zoomed;
  #bound = false;
  #frame = byId("chart-frame");
  /** @type {View} */
  #view = { low: 0, high: 1 };
  #height = CHART_HEIGHT;
  #top = 1;
  /** @type {Float64Array} */
  #x = new Float64Array(0);
  width = 0;
  /**
   * The drawn instants.
   * @type {Uint32Array}
   */
  indices = new Uint32Array(0);
  /** Whether they are all there are in view. */
  every = true;
  /** @type {Promise<unknown>} */
  painted = Promise.resolve();

  /**
   * @param {Plotly} plotly
   * @param {Record<string, unknown>} config
   * @param {(view: View) => void} zoomed called when a view is chosen in the chart
   */
  constructor(plotly, config, zoomed) {
    this.#plotly = plotly;
    this.#config = { ...config, responsive: false, doubleClick: false, displayModeBar: false, scrollZoom: false };
    this.#zoomed = zoomed;
  }

  /** The width that the page has for it. */
  get room() {
    return this.#frame.clientWidth;
  }

  /**
   * @param {Picture} picture
   * @returns {{first: number, last: number}} the instants in view
   */
  draw({ run, live, view, byTime, totals, stack, shown, present, peak, theme, width }) {
    const { first, last } = instantsOf(live, view, byTime);
    const { indices, every } = drawnInstants(totals, first, last, byTime ? live.times : null);
    this.indices = every ? indices : withChanges(indices, live.changes, live.reserved, first, last);
    this.every = every;
    this.width = width;
    this.#view = view;
    this.#height = width < NARROW_WIDTH ? NARROW_HEIGHT : CHART_HEIGHT;
    this.#x = ascending(Float64Array.from(this.indices, (index) => placeOf(live, index, byTime)));
    const place = (/** @type {number} */ position) => placeOf(live, live.indexOf(position), byTime);
    // What came after the recorded steps is in no chart.
    const failed = run.failure?.later ? null : run.failure;
    const drawing = {
      x: this.#x,
      series: live.sample(this.indices),
      shown,
      present,
      live: live.categories,
      view,
      byTime,
      width,
      height: this.#height,
      draggable: matchMedia("(pointer: fine)").matches,
      steps: run.steps.map((step) => place(step.first)).filter((each) => each > view.low && each < view.high),
      failure: failed && { ...failed, x: place(failed.position) },
      peak: peak && { x: placeOf(live, peak.index, byTime), bytes: peak.bytes, label: peak.label },
    };
    const figure = timelineFigure(drawing, stack, theme);
    this.#top = figure.top;
    const chart = /** @type {Chart} */ (byId("chart"));
    this.painted = this.#plotly.react(chart, figure.data, figure.layout, this.#config);
    if (!this.#bound) {
      this.#bound = true;
      chart.on("plotly_relayout", (change) => this.#relayout(change));
    }
    return { first, last };
  }

  /** @param {Record<string, unknown>} change */
  #relayout(change) {
    const low = change["xaxis.range[0]"];
    const high = change["xaxis.range[1]"];
    if (low !== undefined && high !== undefined) this.#zoomed({ low: Number(low), high: Number(high) });
  }

  /**
   * The drawn instant that is nearest to a point; null beside the plot.
   * @param {number} clientX
   */
  instantAt(clientX) {
    const at = clientX - this.#frame.getBoundingClientRect().left - MARGIN.left;
    const inner = this.width - MARGIN.left - MARGIN.right;
    if (at < -4 || at > inner + 4) return null;
    const place = this.#view.low + ((this.#view.high - this.#view.low) * at) / inner;
    const before = lastAtMost(this.#x, place);
    const after = Math.min(before + 1, this.#x.length - 1);
    return this.indices[place - this.#x[before] <= this.#x[after] - place ? before : after];
  }

  /**
   * The bytes at the height of a point.
   * @param {number} clientY
   */
  bytesAt(clientY) {
    const foot = this.#frame.getBoundingClientRect().top + this.#height - MARGIN.bottom;
    return (this.#top * (foot - clientY)) / (this.#height - MARGIN.top - MARGIN.bottom);
  }
}

/**
 * The series in whose band `bytes` lie; null above all of them.
 * @param {ArrayLike<number>} values by series, from the bottom of the stack
 * @param {boolean[]} shown
 * @param {number} bytes
 */
export function bandAt(values, shown, bytes) {
  let top = 0;
  for (let series = 0; series < values.length; series += 1) {
    if (shown[series]) top += values[series];
    if (bytes <= top) return series;
  }
  return null;
}
