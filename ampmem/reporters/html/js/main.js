/** Puts the page together. */
import { byId, choices, fill, make, press } from "./common/dom.js";
import { MAX_SENTENCE, cleaned, formatBytes, formatCount, formatShare } from "./common/format.js";
import { given } from "./common/given.js";
import { actionOf, focusKind } from "./common/keys.js";
import { shownTheme, startTheme } from "./common/theme.js";
import { Kinds, matchedStacks, moduleRows, shortFrame, stackRows } from "./data/alive.js";
import { unpackStream } from "./data/decode.js";
import { liveOf } from "./data/live.js";
import { addressMapAt } from "./data/segments.js";
import { matchedNodes, prunedTree, treeOf } from "./data/tree.js";
import { showAddresses } from "./figures/addresses.js";
import { loadPlotly } from "./figures/plotly.js";
import { Timeline } from "./figures/timeline.js";
import { TreeView } from "./figures/treeview.js";
import { showActivations } from "./sections/activations.js";
import { AllocationTable } from "./sections/allocations.js";
import { showComparison } from "./sections/comparison.js";
import { showOutOfMemory } from "./sections/oom.js";
import { showFindings, showSummary } from "./sections/summary.js";
import { showCasts, showPeak, showStatic, showSteps } from "./sections/tables.js";
/** @import { AddressMapView, PageView, RunView } from "./common/page.js" */
/** @import { Theme } from "./common/theme.js" */
/** @import { Live } from "./data/stream.js" */
/** @import { CategoryOf } from "./figures/bars.js" */
/** @import { Plotly } from "./figures/figures.js" */
/** @import { Shape } from "./figures/treeview.js" */

/** @typedef {{run: RunView, live: Live, kinds: Kinds}} Shown a run with its events unpacked */

/** @type {Array<[id: string, text: string]>} */
const JUMPS = [
  ["out-of-memory", "Out of memory"],
  ["timeline", "Timeline"],
  ["peak", "Peak"],
  ["comparison", "Arms"],
  ["steps", "Steps"],
  ["static", "Model check"],
  ["activations", "Activations"],
  ["casts", "Casts"],
  ["modules", "Modules"],
  ["stacks", "Stacks"],
  ["addresses", "Address map"],
  ["allocations", "Allocations"],
];
const PRINT_WIDTH = 640;

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

class Page {
  /** @type {Map<RunView, Shown>} */
  #unpacked = new Map();
  /** @type {Shown|null} */
  #shown = null;
  /** @type {AddressMapView|null} */
  #addressMap = null;
  #addressesWhere = "";
  /** @type {Int32Array|null} */
  #peakCounts = null;
  /** @type {Int32Array|null} */
  #treeCounts = null;
  /** @type {HTMLDetailsElement[]} */
  #opened = [];
  #help = byId("help", HTMLDialogElement);
  #stacksSearch = byId("stacks-search", HTMLInputElement);

  /**
   * @param {PageView} data
   * @param {Plotly} plotly
   */
  constructor(data, plotly) {
    this.data = data;
    const keys = new Map(data.categories.map((category) => [category.key, category]));
    /** @type {CategoryOf} */
    this.categoryOf = (key) => keys.get(key) ?? null;
    this.table = new AllocationTable();
    this.timeline = new Timeline(plotly, data, (index) => this.#pinned(index));
    this.modules = new TreeView(
      byId("modules-tree"),
      byId("modules-path"),
      data.categories,
      "treemap",
      "Live bytes by module",
    );
    this.stacks = new TreeView(
      byId("stacks-tree"),
      byId("stacks-path"),
      data.categories,
      "icicle",
      "Live bytes by Python stack",
      shortFrame,
    );
    this.#listen();
  }

  /**
   * @param {RunView} run
   * @returns {Promise<Shown>}
   */
  async #unpack(run) {
    const before = this.#unpacked.get(run);
    if (before) return before;
    const stream = await unpackStream(run.stream, this.data.categories.length);
    const live = liveOf(stream, run.peak?.position);
    const shown = { run, live, kinds: new Kinds(stream.header, this.data.categories) };
    this.#unpacked.set(run, shown);
    return shown;
  }

  /**
   * Shows another run.
   * @param {number} index
   */
  async show(index) {
    delete document.documentElement.dataset.drawn;
    const shown = await this.#unpack(this.data.runs[index]);
    const { run, live, kinds } = shown;
    this.#shown = shown;
    byId("run", HTMLSelectElement).value = String(index);
    showSummary(run);
    byId("timeline").hidden = live.length < 2;
    if (live.length > 1) {
      this.timeline.show(run, live);
      await this.timeline.painted;
    }
    showOutOfMemory(run, this.categoryOf, (position) => {
      this.timeline.pin(live.indexOf(position));
      this.jump("timeline");
    });
    showPeak(run, this.categoryOf);
    showSteps(run, this.categoryOf, (step) => {
      this.timeline.toStep(String(step));
      this.jump("timeline");
    });
    showStatic(run, this.categoryOf);
    showActivations(run, kinds);
    showCasts(run);
    this.#peakCounts = run.peak ? live.aliveAt(live.indexOf(run.peak.position)) : null;
    for (const id of ["modules", "allocations"]) byId(id).hidden = kinds.count === 0;
    byId("stacks").hidden = !kinds.hasStacks();
    this.#mapAddresses(shown, null);
    byId("addresses").hidden = !this.#addressMap?.segments.length;
    this.table.show(kinds, { peak: this.#peakCounts, run: live.made() });
    showFindings(run, (id) => this.jump(id));
    this.#drawJumps();
    await nextPaint();
    document.documentElement.dataset.ready = "";
    this.#drawTrees(shown, this.#peakCounts, "at the peak");
    this.#drawAddresses(shownTheme());
    await nextPaint();
    document.documentElement.dataset.drawn = "";
  }

  /**
   * Of the pinned instant, else of the peak, which is also where it stays when the page has no other.
   * @param {Shown} shown
   * @param {number|null} pinned
   */
  #mapAddresses({ live, run }, pinned) {
    const keys = this.data.categories.map((category) => category.key);
    const peak = run.peak ? live.indexOf(run.peak.position) : live.length - 1;
    const exact = addressMapAt(live, pinned ?? peak, keys);
    this.#addressMap = exact ?? run.address_map;
    this.#addressesWhere =
      exact && pinned !== null ? `at event ${formatCount(live.position(pinned))}` : run.peak ? "at the peak" : "at the end";
  }

  /** @param {Theme} theme */
  #drawAddresses(theme) {
    if (byId("addresses").hidden || !this.#addressMap) return;
    showAddresses(this.#addressMap, this.#addressesWhere, this.categoryOf, theme);
  }

  #drawJumps() {
    const links = JUMPS.filter(([id]) => !byId(id).hidden).map(([id, text]) => make("a", { href: `#${id}` }, text));
    fill(byId("jumps"), ...links);
  }

  /**
   * @param {Shown} shown
   * @param {Int32Array|null} counts
   * @param {string} where
   */
  #drawTrees({ kinds }, counts, where) {
    byId("modules-title").textContent = `Live ${where}, by module`;
    byId("stacks-title").textContent = `Live ${where}, by Python stack`;
    if (!counts) return;
    this.#treeCounts = counts;
    if (!byId("modules").hidden) {
      this.modules.show(prunedTree(treeOf("model and training step", moduleRows(kinds, counts))));
    }
    if (byId("stacks").hidden) return;
    this.stacks.show(prunedTree(treeOf(`all live memory ${where}`, stackRows(kinds, counts))));
    this.#searchStacks();
  }

  #searchStacks() {
    const query = this.#stacksSearch.value.trim();
    const { root } = this.stacks;
    const kinds = this.#shown?.kinds;
    const counts = this.#treeCounts;
    if (!root || !kinds || !counts) return;
    if (!query) {
      byId("stacks-matched").textContent = "";
      this.stacks.highlight(null);
      return;
    }
    // Counted in all stacks: of a large tree only the largest boxes are drawn.
    const { frames, bytes } = matchedStacks(kinds, counts, query);
    byId("stacks-matched").textContent =
      `${formatCount(frames)} frame${frames === 1 ? "" : "s"}, ${formatBytes(bytes)} (${formatShare(bytes, root.bytes)})`;
    this.stacks.highlight(matchedNodes(root, query));
  }

  /** @param {number|null} index */
  #pinned(index) {
    const shown = given(this.#shown);
    const { live } = shown;
    const counts = index === null ? null : live.aliveAt(index);
    const event = index === null ? "" : `event ${formatCount(live.position(index))}`;
    this.table.pin(counts, event);
    this.#drawTrees(shown, counts ?? this.#peakCounts, counts ? `at ${event}` : "at the peak");
    if (!byId("addresses").hidden) this.#mapAddresses(shown, index);
    this.#drawAddresses(shownTheme());
    for (const button of unpinButtons()) button.hidden = !counts;
    const note =
      index !== null && !counts ? "This page holds single allocations at the peak only, so this stays there." : "";
    byId("modules-note").textContent = note;
    byId("stacks-note").textContent = note;
  }

  /** @param {string} id */
  jump(id) {
    const target = byId(id);
    target.scrollIntoView({ block: "start" });
    const title = target.querySelector("h2");
    title?.setAttribute("tabindex", "-1");
    title?.focus({ preventScroll: true });
  }

  #listen() {
    const shapes = [byId("as-treemap"), byId("as-icicle")];
    /**
     * @param {Shape} name
     * @param {Element} chosen
     * @param {Element} other
     */
    const shape = (name, chosen, other) => () => {
      this.modules.shape = name;
      press(chosen, other);
      this.modules.draw();
    };
    shapes[0].addEventListener("click", shape("treemap", shapes[0], shapes[1]));
    shapes[1].addEventListener("click", shape("icicle", shapes[1], shapes[0]));
    this.#stacksSearch.addEventListener("input", () => this.#searchStacks());
    const runs = byId("run", HTMLSelectElement);
    runs.addEventListener("change", () => this.show(Number(runs.value)).catch(trouble));
    for (const button of unpinButtons()) button.addEventListener("click", () => this.timeline.pin(null));
    byId("help-open").addEventListener("click", () => this.#help.showModal());
    document.addEventListener("keydown", (event) => this.#key(event));
    window.addEventListener("beforeprint", () => this.#beforePrint());
    window.addEventListener("afterprint", () => this.#afterPrint());
    startTheme(() => this.#redraw());
  }

  /** Paper is light, narrow, and opens nothing. */
  #beforePrint() {
    /** @type {NodeListOf<HTMLDetailsElement>} */
    const closed = document.querySelectorAll("details:not([open])");
    this.#opened = [...closed];
    for (const details of this.#opened) details.open = true;
    this.#redraw({ theme: "light", width: PRINT_WIDTH });
  }

  #afterPrint() {
    for (const details of this.#opened) details.open = false;
    this.#redraw();
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
    else this.timeline.perform(action);
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

/**
 * @param {Error} error
 * @returns {never}
 */
function trouble(error) {
  byId("trouble").hidden = false;
  byId("trouble").textContent = `This page could not be drawn: ${error.message}`;
  throw error;
}

async function start() {
  const packed = JSON.parse(given(byId("page-data").textContent));
  const data = /** @type {PageView} */ (cleaned(packed, MAX_SENTENCE, ["packed"]));
  // The head can be read while the drawing library starts.
  if (data.runs.length) showSummary(data.runs[0]);
  await nextPaint();
  const page = new Page(data, await loadPlotly());
  byId("run-choice").hidden = data.runs.length < 2;
  choices(
    byId("run", HTMLSelectElement),
    data.runs.map((run, i) => [String(i), run.label]),
  );
  byId("foot").textContent = `Made by ampmem ${data.ampmem}. This page loads nothing from the network.`;
  showComparison(data.comparison, page.categoryOf);
  if (data.runs.length) await page.show(0);
  else Object.assign(document.documentElement.dataset, { ready: "", drawn: "" });
}

await start().catch(trouble);
