/** Puts the page together. */
import { Kinds, matchedStacks, moduleRows, shortFrame, stackRows } from "./data/alive.js";
import { AllocationTable } from "./sections/allocations.js";
import { showAddresses } from "./figures/addresses.js";
import { showComparison } from "./sections/comparison.js";
import { unpackStream } from "./data/decode.js";
import { byId, choices, fill, make, press } from "./common/dom.js";
import { MAX_SENTENCE, cleaned, formatBytes, formatCount, formatShare } from "./common/format.js";
import { actionOf, focusKind } from "./common/keys.js";
import { liveOf } from "./data/live.js";
import { showOutOfMemory } from "./sections/oom.js";
import { loadPlotly } from "./figures/plotly.js";
import { showActivations, showCasts, showPeak, showStatic, showSteps } from "./sections/tables.js";
import { showFindings, showSummary } from "./sections/summary.js";
import { shownTheme, startTheme } from "./common/theme.js";
import { addressMapAt } from "./data/segments.js";
import { Timeline } from "./figures/timeline.js";
import { matchedNodes, prunedTree, treeOf } from "./data/tree.js";
import { TreeView } from "./figures/treeview.js";

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

class Page {
  constructor(data, plotly) {
    this.data = data;
    this.lives = new Map();
    const keys = new Map(data.categories.map((category) => [category.key, category]));
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

  async #liveOf(run) {
    if (!this.lives.has(run)) {
      const stream = await unpackStream(run.stream, this.data.categories.length);
      this.lives.set(run, {
        live: liveOf(stream, run.peak?.position),
        kinds: new Kinds(stream.header, this.data.categories),
      });
    }
    return this.lives.get(run);
  }

  /** Shows another run. */
  async show(index) {
    delete document.documentElement.dataset.drawn;
    const run = this.data.runs[index];
    const { live, kinds } = await this.#liveOf(run);
    Object.assign(this, { run, live, kinds });
    byId("run").value = String(index);
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
    showActivations(run);
    showCasts(run);
    this.peakCounts = run.peak ? live.aliveAt(live.indexOf(run.peak.position)) : null;
    for (const id of ["modules", "allocations"]) byId(id).hidden = kinds.count === 0;
    byId("stacks").hidden = !kinds.hasStacks();
    this.#mapAddresses(null);
    byId("addresses").hidden = !this.addressMap?.segments.length;
    this.table.show(kinds, { peak: this.peakCounts, run: live.made() });
    showFindings(run, (id) => this.jump(id));
    this.#drawJumps();
    await nextPaint();
    document.documentElement.dataset.ready = "";
    this.#drawTrees(this.peakCounts, "at the peak");
    this.#drawAddresses(shownTheme());
    await nextPaint();
    document.documentElement.dataset.drawn = "";
  }

  /** Of the pinned instant, else of the peak, which is also where it stays when the page has no other. */
  #mapAddresses(pinned) {
    const { live, run } = this;
    const keys = this.data.categories.map((category) => category.key);
    const peak = run.peak ? live.indexOf(run.peak.position) : live.length - 1;
    const exact = addressMapAt(live, pinned ?? peak, keys);
    this.addressMap = exact ?? run.address_map;
    this.addressesWhere =
      exact && pinned !== null ? `at event ${formatCount(live.position(pinned))}` : run.peak ? "at the peak" : "at the end";
  }

  #drawAddresses(theme) {
    if (!byId("addresses").hidden) showAddresses(this.addressMap, this.addressesWhere, this.categoryOf, theme);
  }

  #drawJumps() {
    const links = JUMPS.filter(([id]) => !byId(id).hidden).map(([id, text]) => make("a", { href: `#${id}` }, text));
    fill(byId("jumps"), ...links);
  }

  #drawTrees(counts, where) {
    byId("modules-title").textContent = `Live ${where}, by module`;
    byId("stacks-title").textContent = `Live ${where}, by Python stack`;
    if (!counts) return;
    this.treeCounts = counts;
    if (!byId("modules").hidden) {
      this.modules.show(prunedTree(treeOf("model and training step", moduleRows(this.kinds, counts))));
    }
    if (byId("stacks").hidden) return;
    this.stacks.show(prunedTree(treeOf(`all live memory ${where}`, stackRows(this.kinds, counts))));
    this.#searchStacks();
  }

  #searchStacks() {
    const query = byId("stacks-search").value.trim();
    if (!this.stacks.root) return;
    if (!query) {
      byId("stacks-matched").textContent = "";
      this.stacks.highlight(null);
      return;
    }
    // Counted in all stacks: of a large tree only the largest boxes are drawn.
    const { frames, bytes } = matchedStacks(this.kinds, this.treeCounts, query);
    byId("stacks-matched").textContent =
      `${formatCount(frames)} frame${frames === 1 ? "" : "s"}, ${formatBytes(bytes)} (${formatShare(bytes, this.stacks.root.bytes)})`;
    this.stacks.highlight(matchedNodes(this.stacks.root, query));
  }

  #pinned(index) {
    const counts = index === null ? null : this.live.aliveAt(index);
    const event = index === null ? "" : `event ${formatCount(this.live.position(index))}`;
    this.table.pin(counts, event);
    this.#drawTrees(counts ?? this.peakCounts, counts ? `at ${event}` : "at the peak");
    if (!byId("addresses").hidden) this.#mapAddresses(index);
    this.#drawAddresses(shownTheme());
    for (const button of document.querySelectorAll(".unpin")) button.hidden = !counts;
    const note =
      index !== null && !counts ? "This page holds single allocations at the peak only, so this stays there." : "";
    byId("modules-note").textContent = note;
    byId("stacks-note").textContent = note;
  }

  jump(id) {
    const target = byId(id);
    target.scrollIntoView({ block: "start" });
    const title = target.querySelector("h2");
    title?.setAttribute("tabindex", "-1");
    title?.focus({ preventScroll: true });
  }

  #listen() {
    const shapes = [byId("as-treemap"), byId("as-icicle")];
    const shape = (name, chosen, other) => () => {
      this.modules.shape = name;
      press(chosen, other);
      this.modules.draw();
    };
    shapes[0].addEventListener("click", shape("treemap", shapes[0], shapes[1]));
    shapes[1].addEventListener("click", shape("icicle", shapes[1], shapes[0]));
    byId("stacks-search").addEventListener("input", () => this.#searchStacks());
    byId("run").addEventListener("change", (event) => this.show(Number(event.target.value)).catch(trouble));
    for (const button of document.querySelectorAll(".unpin")) {
      button.addEventListener("click", () => this.timeline.pin(null));
    }
    byId("help-open").addEventListener("click", () => byId("help").showModal());
    document.addEventListener("keydown", (event) => this.#key(event));
    window.addEventListener("beforeprint", () => this.#beforePrint());
    window.addEventListener("afterprint", () => this.#afterPrint());
    startTheme(() => this.#redraw());
  }

  /** Paper is light, narrow, and opens nothing. */
  #beforePrint() {
    this.opened = [...document.querySelectorAll("details:not([open])")];
    for (const details of this.opened) details.open = true;
    this.#redraw({ theme: "light", width: PRINT_WIDTH });
  }

  #afterPrint() {
    for (const details of this.opened ?? []) details.open = false;
    this.#redraw();
  }

  #redraw(options = {}) {
    if (!this.run) return;
    if (!byId("timeline").hidden) this.timeline.draw(options);
    this.#drawAddresses(options.theme ?? shownTheme());
  }

  #key(event) {
    if (byId("help").open) return;
    const action = actionOf(event, focusKind(event.target));
    if (!action) return;
    if (action === "help") byId("help").showModal();
    else if (action === "search") {
      byId("search").focus();
      byId("search").scrollIntoView({ block: "center" });
    } else if (action === "escape") this.#escape(event.target);
    else if (byId("timeline").hidden) return;
    else this.timeline.perform(action);
    // Home also scrolls up, unless the chart has the focus.
    if (action !== "reset" || focusKind(event.target) !== "page") event.preventDefault();
  }

  #escape(target) {
    if (focusKind(target) === "typing" && target.value) {
      target.value = "";
      target.dispatchEvent(new Event("input"));
      return;
    }
    if (byId("timeline").hidden) return;
    this.timeline.moveCursor(null);
    this.timeline.pin(null);
  }
}

function trouble(error) {
  byId("trouble").hidden = false;
  byId("trouble").textContent = `This page could not be drawn: ${error.message}`;
  throw error;
}

async function start() {
  const data = cleaned(JSON.parse(byId("page-data").textContent), MAX_SENTENCE, ["packed"]);
  // The head can be read while the drawing library starts.
  if (data.runs.length) showSummary(data.runs[0]);
  await nextPaint();
  const page = new Page(data, await loadPlotly());
  byId("run-choice").hidden = data.runs.length < 2;
  choices(
    byId("run"),
    data.runs.map((run, i) => [String(i), run.label]),
  );
  byId("foot").textContent = `Made by ampmem ${data.ampmem}. This page loads nothing from the network.`;
  showComparison(data.comparison, page.categoryOf);
  if (data.runs.length) await page.show(0);
  else Object.assign(document.documentElement.dataset, { ready: "", drawn: "" });
}

await start().catch(trouble);
