/** Puts the page together. */
import { byId, choices } from "./common/dom.js";
import { MAX_SENTENCE, cleaned, formatCount } from "./common/format.js";
import { given } from "./common/given.js";
import { actionOf, focusKind } from "./common/keys.js";
import { placeOfHash } from "./common/permalink.js";
import { shownTheme, startTheme } from "./common/theme.js";
import { Kinds } from "./data/alive.js";
import { unpackStream } from "./data/decode.js";
import { liveOf } from "./data/live.js";
import { runOf } from "./data/run.js";
import { segmentsFilledAt } from "./data/segments.js";
import { showAddresses } from "./figures/addresses.js";
import { loadPlotly } from "./figures/plotly.js";
import { showActivations } from "./sections/activations.js";
import { AllocationTable } from "./sections/allocations.js";
import { showChanges } from "./sections/changes.js";
import { showComparison } from "./sections/comparison.js";
import { drawJumps, startHelp } from "./sections/jumps.js";
import { PageLink } from "./sections/link.js";
import { LiveList } from "./sections/livelist.js";
import { showOutOfMemory } from "./sections/oom.js";
import { drawBeforeLoaded, startPrinting, trouble } from "./sections/paper.js";
import { offerToSave, showAskedPicture } from "./sections/saving.js";
import { showFindings, showSummary } from "./sections/summary.js";
import { showCasts, showPeak, showStatic, showSteps } from "./sections/tables.js";
import { Trees } from "./sections/trees.js";
import { perform } from "./timeline/actions.js";
import { Timeline } from "./timeline/timeline.js";
/** @import { PageView, RunView } from "./common/page.js" */
/** @import { Run } from "./data/run.js" */
/** @import { Place } from "./common/permalink.js" */
/** @import { Theme } from "./common/theme.js" */
/** @import { Filled } from "./data/segments.js" */
/** @import { Live } from "./data/stream.js" */
/** @import { CategoryOf } from "./figures/bars.js" */
/** @import { Plotly } from "./figures/figures.js" */

/** @typedef {{view: RunView, run: Run, live: Live, kinds: Kinds}} Shown a run with its events unpacked */


/** After the browser has painted what there is so far. */
function nextPaint() {
  return new Promise((resolve) => {
    // A page in a background tab gets no frames.
    if (document.hidden) setTimeout(resolve);
    else requestAnimationFrame(() => setTimeout(resolve));
  });
}

/**
 * The buttons that lead back to the peak.
 * @returns {NodeListOf<HTMLElement>}
 */
function unpinButtons() {
  return document.querySelectorAll(".unpin");
}

/**
 * On the page of many ranks, whose page it is below.
 * @param {Run} run
 */
function nameShownRank(run) {
  const name = document.getElementById("shown-run");
  if (name) name.textContent = run.label;
}

/**
 * What the instant is called that is shown where none is pinned: the peak, or the failure of a run that ended with it.
 *
 * @param {Run} run
 */
const instantOf = (run) => run.instant?.name ?? "peak";

/**
 * Names that instant in the headings and on the buttons.
 *
 * @param {Run} run
 */
function nameInstant(run) {
  const name = instantOf(run);
  byId("modules-title").textContent = `Live at the ${name}, by module`;
  byId("stacks-title").textContent = `Live at the ${name}, by Python stack`;
  for (const button of unpinButtons()) button.textContent = `Back to the ${name}`;
}

class Page {
  /** @type {Map<RunView, Shown>} */
  #unpacked = new Map();
  /** @type {Shown|null} */
  #shown = null;
  /** @type {Filled[]} */
  #segments = [];
  #addressesWhere = "";
  /** @type {Int32Array|null} */
  #peakCounts = null;
  #help = startHelp();
  #plotly;

  /**
   * @param {PageView} data
   * @param {Plotly} plotly
   * @param {Place} place where the address leads to
   */
  constructor(data, plotly, place) {
    this.data = data;
    const keys = new Map(data.categories.map((category) => [category.key, category]));
    /** @type {CategoryOf} */
    this.categoryOf = (key) => keys.get(key) ?? null;
    this.table = new AllocationTable();
    this.link = new PageLink(
      () => this.#place(),
      (there) => this.#follow(there).catch(trouble),
    );
    this.list = new LiveList(
      (index) => this.timeline.pin(index),
      () => this.link.jump("allocations"),
    );
    this.#plotly = plotly;
    this.timeline = new Timeline(plotly, data, {
      pinned: (index) => this.#pinned(index),
      read: (index, title) => this.#read(index, title),
      picked: (category) => this.list.choose(category),
      viewed: () => this.link.remember(),
    });
    this.trees = new Trees(data.categories, () => this.link.jump("allocations"));
    this.#listen(place.theme);
  }

  /**
   * @param {RunView} view
   * @returns {Promise<Shown>}
   */
  async #unpack(view) {
    const before = this.#unpacked.get(view);
    if (before) return before;
    const run = await runOf(view, this.data);
    const stream = await unpackStream(run.stream, this.data.categories.length);
    const live = liveOf(stream, run.instant?.position);
    const shown = { view, run, live, kinds: new Kinds(stream.header, this.data.categories) };
    this.#unpacked.set(view, shown);
    return shown;
  }

  /**
   * Shows another run.
   * @param {number} index
   * @param {Place|null} place where in it
   */
  async show(index, place = null) {
    delete document.documentElement.dataset.drawn;
    const shown = await this.#unpack(this.data.runs[index]);
    const { run, live, kinds } = shown;
    this.#shown = shown;
    byId("run", HTMLSelectElement).value = String(index);
    nameShownRank(run);
    showSummary(run);
    byId("timeline").hidden = live.length < 2;
    if (live.length > 1) {
      this.list.show(kinds, live, instantOf(run));
      this.timeline.show(run, live);
      await this.timeline.painted;
    }
    showPeak(run, this.categoryOf);
    showSteps(run, this.categoryOf, (step) => {
      this.timeline.toStep(String(step));
      this.link.jump("timeline");
    });
    showStatic(run, this.categoryOf);
    const pin = (/** @type {number} */ at) => this.timeline.pin(at);
    showActivations(run, kinds, live, pin, () => this.link.jump("allocations"));
    showCasts(run);
    this.#peakCounts = run.instant ? live.aliveAt(live.indexOf(run.instant.position)) : null;
    nameInstant(run);
    for (const id of ["modules", "allocations"]) byId(id).hidden = kinds.count === 0;
    byId("stacks").hidden = !kinds.hasStacks();
    this.#mapAddresses(shown, null);
    byId("addresses").hidden = !this.#segments.length;
    this.table.show(kinds, { peak: this.#peakCounts, run: live.made() }, instantOf(run));
    const toFailure = (/** @type {number} */ position) => {
      this.timeline.pin(live.indexOf(position));
      this.link.jump("timeline");
    };
    showOutOfMemory(run, this.categoryOf, toFailure, (id) => this.link.jump(id));
    showFindings(run, (id) => this.link.jump(id));
    drawJumps();
    if (place && live.length > 1) this.timeline.restore(place);
    await nextPaint();
    document.documentElement.dataset.ready = "";
    const { pinned } = this.timeline;
    if (live.length > 1 && pinned !== null) this.#pinned(pinned);
    else this.trees.show(kinds, this.#peakCounts, `at the ${instantOf(run)}`);
    this.#drawAddresses(shownTheme());
    offerToSave(this.#plotly);
    await nextPaint();
    if (place) this.link.arrive(place.section);
    document.documentElement.dataset.drawn = "";
  }

  /**
   * Of the pinned instant, else of the peak or the failure, which is also where it stays when the page has no other.
   * @param {Shown} shown
   * @param {number|null} pinned
   */
  #mapAddresses({ live, run }, pinned) {
    const keys = this.data.categories.map((category) => category.key);
    const shown = run.instant ? live.indexOf(run.instant.position) : live.length - 1;
    const exact = segmentsFilledAt(live, pinned ?? shown, keys);
    this.#segments = exact ?? run.address_map;
    this.#addressesWhere =
      exact && pinned !== null
        ? `at event ${formatCount(live.position(pinned))}`
        : run.instant
          ? `at the ${run.instant.name}`
          : "at the end";
  }

  /** @param {Theme} theme */
  #drawAddresses(theme) {
    if (byId("addresses").hidden || !this.#shown) return;
    const { kinds, run } = this.#shown;
    const told = { kinds, steps: run.steps, categoryOf: this.categoryOf };
    showAddresses(this.#segments, this.#addressesWhere, told, theme);
  }

  /** @param {number|null} index */
  #pinned(index) {
    const shown = given(this.#shown);
    const { live } = shown;
    const name = instantOf(shown.run);
    const counts = index === null ? null : live.aliveAt(index);
    const event = index === null ? "" : `event ${formatCount(live.position(index))}`;
    this.table.pin(counts, event);
    this.trees.show(shown.kinds, counts ?? this.#peakCounts, counts ? `at ${event}` : `at the ${name}`);
    if (!byId("addresses").hidden) this.#mapAddresses(shown, index);
    this.#drawAddresses(shownTheme());
    // The band that was clicked goes with the pin.
    if (index === null) this.list.choose(null);
    for (const button of unpinButtons()) button.hidden = !counts;
    const note =
      index !== null && !counts
        ? `This page has single allocations only at the ${name}, so this part still shows that instant.`
        : "";
    byId("modules-note").textContent = note;
    byId("stacks-note").textContent = note;
  }

  /**
   * The list of what lives stays at the pinned instant while the pointer reads others.
   * @param {number} index
   * @param {string} title what the instant is called
   */
  #read(index, title) {
    const { pinned, moving } = this.timeline;
    this.list.event(index);
    if (pinned === null) this.list.at(index, title, moving);
    else this.list.at(pinned, "At the pinned event", false);
  }

  /**
   * Where the reader is, for the address.
   * @returns {Omit<Place, "section">|null}
   */
  #place() {
    if (!this.#shown) return null;
    const { view } = this.#shown;
    const { opens, runs } = this.data;
    const { theme } = document.documentElement.dataset;
    return {
      ...(byId("timeline").hidden ? { view: null, byTime: false, pin: null } : this.timeline.place),
      run: view === runs[opens] ? null : view.label,
      theme: theme === "light" || theme === "dark" ? theme : null,
    };
  }

  /**
   * Goes to a place; what that does not say stays as it is.
   * @param {Place} place
   */
  async #follow(place) {
    const index = place.run === null ? -1 : this.runOf(place);
    if (index >= 0 && this.data.runs[index] !== this.#shown?.view) await this.show(index, place);
    else {
      if (!byId("timeline").hidden) this.timeline.restore(place);
      // What stands behind the section in the address keeps the browser from going there.
      if (place.run !== null) this.link.jump(place.section);
    }
  }

  /**
   * Which run a place is in; the one that the page opens on where there is none of that name.
   * @param {Place} place
   */
  runOf({ run }) {
    const index = this.data.runs.findIndex((each) => each.label === run);
    return index < 0 ? this.data.opens : index;
  }

  /** @param {Theme|null} theme that the address asks for */
  #listen(theme) {
    const runs = byId("run", HTMLSelectElement);
    runs.addEventListener("change", () => this.show(Number(runs.value)).catch(trouble));
    for (const button of unpinButtons()) button.addEventListener("click", () => this.timeline.pin(null));
    document.addEventListener("keydown", (event) => this.#key(event));
    startPrinting((options) => this.#redraw(options));
    startTheme(() => {
      this.#redraw();
      this.link.remember();
    }, theme);
  }

  /** @param {{theme?: Theme, width?: number}} options */
  #redraw(options = {}) {
    if (!this.#shown) return;
    if (!byId("timeline").hidden) this.timeline.draw(options);
    this.#drawAddresses(options.theme ?? shownTheme());
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    if (this.#help.open) return;
    const target = event.target instanceof Element ? event.target : null;
    const action = actionOf(event, focusKind(target));
    if (!action) return;
    if (action === "help") this.#help.showModal();
    else if (action === "search") {
      byId("search").focus();
      byId("search").scrollIntoView({ block: "center" });
    } else if (action === "escape") this.#escape(target);
    else if (byId("timeline").hidden) return;
    else perform(this.timeline, action);
    // Home also scrolls up, unless the chart has the focus.
    if (action !== "reset" || focusKind(target) !== "page") event.preventDefault();
  }

  /** @param {Element|null} target */
  #escape(target) {
    const field = target instanceof HTMLInputElement || target instanceof HTMLSelectElement;
    if (field && target.value) {
      target.value = "";
      target.dispatchEvent(new Event("input"));
      return;
    }
    if (byId("timeline").hidden) return;
    this.timeline.moveCursor(null);
    this.timeline.pin(null);
  }
}

async function start() {
  const packed = JSON.parse(given(byId("page-data").textContent));
  const data = /** @type {PageView} */ (cleaned(packed, MAX_SENTENCE, ["packed"]));
  const place = placeOfHash(location.hash);
  // The head can be read while the drawing library starts.
  if (data.runs.length) showSummary(await runOf(data.runs[data.opens], data));
  await nextPaint();
  const plotly = await loadPlotly();
  const page = new Page(data, plotly, place);
  byId("run-choice").hidden = data.runs.length < 2;
  choices(
    byId("run", HTMLSelectElement),
    data.runs.map((run, i) => [String(i), run.label]),
  );
  byId("foot").textContent = `Made by ampmem ${data.ampmem}. This page loads nothing from the network.`;
  showComparison(data, page.categoryOf);
  showChanges(data.changes, page.categoryOf);
  if (data.runs.length) await page.show(page.runOf(place), place);
  else Object.assign(document.documentElement.dataset, { ready: "", drawn: "" });
  await showAskedPicture(plotly);
}

await drawBeforeLoaded(start);
