/** A tree of bytes as boxes that can be walked and opened with the keyboard: an icicle or a treemap. */
import { fill, make } from "../common/dom.js";
import { icicleBoxes, treemapBoxes } from "../data/boxes.js";
import { matchedNodes, prunedTree } from "../data/tree.js";
import { cutInMiddle, ruler } from "./labels.js";
import { TreeWords, boxElement } from "./treebox.js";
/** @import { CategoryView } from "../common/page.js" */
/** @import { Branch, Drawn } from "../data/tree.js" */
/** @import { Box } from "./treebox.js" */

/** @typedef {"treemap"|"icicle"} Shape */
/**
 * `shorten` makes labels of a name, the longest first; `place` says in words where the names of a path lead to;
 * `narrowed` is called when the table of allocations has been asked to show those of one box only.
 * @typedef {{shape: Shape, label: string, shorten: (name: string) => string[], place: (names: string[]) => string, narrowed: () => void}} Look
 */

const ROW = 26;
const MAP_HEIGHT = 460;
const LOW_MAP_HEIGHT = 380;
const NARROW_MAP = 560;
const NARROWEST_BOX = 0.8;
const LONGEST_CRUMB = 48;

export class TreeView {
  #drawnWidth = 0;
  #query = "";
  /**
   * From the root to what is shown.
   * @type {Branch[]}
   */
  #opened = [];
  /**
   * From what is shown to a box in it that was clicked and cannot be opened.
   * @type {Branch[]}
   */
  #chosen = [];
  /** @type {Map<Element, Drawn>} */
  #nodes = new Map();
  /** @type {Map<Branch, HTMLElement>} */
  #boxes = new Map();

  /**
   * Boxes take their colours from `categories`.
   * @param {HTMLElement} container
   * @param {HTMLElement} path
   * @param {CategoryView[]} categories
   * @param {Look} look
   */
  constructor(container, path, categories, { shape, label, shorten, place, narrowed }) {
    this.container = container;
    this.path = path;
    this.words = new TreeWords(categories, shorten);
    this.shape = shape;
    this.place = place;
    this.narrowed = narrowed;
    container.setAttribute("role", "tree");
    container.setAttribute("aria-label", label);
    container.addEventListener("keydown", (event) => this.#key(event));
    container.addEventListener("click", (event) => {
      const node = this.#nodeOf(event.target);
      if (node) this.#open(node);
    });
    new ResizeObserver(() => {
      if (this.#opened.length && Math.abs(container.clientWidth - this.#drawnWidth) > 1) this.draw();
    }).observe(container);
  }

  /**
   * Shows another tree, opened where the one before was, as far as it has the same names.
   * @param {Branch} root
   * @param {string} query as in `search`
   */
  show(root, query = "") {
    this.#query = query;
    const before = this.#opened.slice(1);
    this.#opened = [root];
    for (const { name, meaning } of before) {
      const top = this.#opened[this.#opened.length - 1];
      const found = [...top.inside, ...top.children].find(
        (branch) => branch.name === name && branch.meaning === meaning && name !== null,
      );
      if (!found) break;
      this.#opened.push(found);
    }
    this.#chosen = [];
    this.draw();
  }

  /**
   * Highlights the boxes whose names hold `query`; none where it is empty.
   * @param {string} query
   */
  search(query) {
    // Without a search before and now, the boxes are as they were drawn.
    if (!query && !this.#query) return;
    this.#query = query;
    this.draw();
  }

  draw() {
    const top = this.#opened[this.#opened.length - 1];
    if (!top) return;
    const width = this.container.clientWidth || 900;
    this.#drawnWidth = this.container.clientWidth;
    const drawn = prunedTree(top);
    const boxes = this.shape === "icicle" ? this.#icicle(drawn, width) : this.#treemap(drawn, width);
    const matches = this.#query ? matchedNodes(drawn, this.#query) : null;
    const widthOf = ruler(`12px ${getComputedStyle(this.container).fontFamily}`);
    const view = { root: this.#opened[0], above: this.#opened[this.#opened.length - 2] ?? null, widthOf };
    this.#nodes = new Map();
    this.#boxes = new Map();
    for (const box of boxes) {
      if (Math.min(box.width, box.tall) < NARROWEST_BOX) continue;
      const element = boxElement(box, this.words, view);
      element.classList.toggle("match", Boolean(matches?.has(box.node)));
      this.#nodes.set(element, box.node);
      this.#boxes.set(box.node.branch, element);
    }
    fill(this.container, ...this.#nodes.keys());
    this.container.classList.toggle("icicle", this.shape === "icicle");
    this.container.classList.toggle("searched", matches !== null);
    this.#boxes.get(top)?.setAttribute("tabindex", "0");
    this.#drawPath();
  }

  /**
   * @param {Drawn} top
   * @param {number} width
   * @returns {Box[]}
   */
  #icicle(top, width) {
    const boxes = icicleBoxes(top);
    const depth = boxes.reduce((most, box) => Math.max(most, box.node.depth), 0);
    this.container.style.height = `${(depth + 1) * ROW}px`;
    return boxes.map((box) => ({
      ...box,
      left: 100 * box.left,
      wide: 100 * box.width,
      width: box.width * width,
      top: box.node.depth * ROW,
      tall: ROW - 1,
      open: box.node.children.length > 0,
    }));
  }

  /**
   * @param {Drawn} top
   * @param {number} width
   * @returns {Box[]}
   */
  #treemap(top, width) {
    const height = width < NARROW_MAP ? LOW_MAP_HEIGHT : MAP_HEIGHT;
    this.container.style.height = `${height}px`;
    return treemapBoxes(top, width, height).map((box) => ({
      ...box,
      left: (100 * box.left) / width,
      wide: (100 * box.width) / width,
      tall: box.height,
    }));
  }

  /**
   * Shows what is in a box, or what it is in where it is open already; a leaf is chosen.
   * @param {Drawn} node
   */
  #open(node) {
    const focused = this.container.contains(document.activeElement);
    const path = [node.branch];
    for (let above = node.parent; above; above = above.parent) path.unshift(above.branch);
    this.#chosen = [];
    if (!node.parent) {
      if (this.#opened.length > 1) this.#opened.pop();
    } else if (node.branch.inside.length) this.#opened.push(...path.slice(1));
    else this.#chosen = path.slice(1);
    this.draw();
    const next = node.parent && !this.#chosen.length ? this.#opened[this.#opened.length - 1] : node.branch;
    if (focused) this.#focus(next);
  }

  /**
   * @param {number} level of the opened ones
   */
  #backTo(level) {
    this.#opened.length = level + 1;
    this.#chosen = [];
    this.draw();
    this.#focus(this.#opened[level]);
  }

  #drawPath() {
    const path = [...this.#opened, ...this.#chosen];
    this.path.hidden = path.length < 2;
    const crumbs = path.map((branch, level) => {
      const name = this.words.nameOf(branch, level > 1 ? path[level - 1] : null);
      const last = level === path.length - 1;
      const inChosen = level >= this.#opened.length;
      const crumb = make(
        "button",
        { type: "button", class: "crumb", disabled: last || inChosen, title: name },
        cutInMiddle(name, LONGEST_CRUMB),
      );
      crumb.addEventListener("click", () => this.#backTo(level));
      return crumb;
    });
    const narrow = make("button", { type: "button", class: "link narrow" }, "Show its allocations");
    narrow.addEventListener("click", () => this.#narrow(path));
    fill(this.path, make("span", { class: "crumbs" }, ...crumbs), narrow);
    for (const element of this.container.querySelectorAll("[aria-selected]")) element.removeAttribute("aria-selected");
    const chosen = this.#chosen[this.#chosen.length - 1];
    if (chosen) this.#boxes.get(chosen)?.setAttribute("aria-selected", "true");
  }

  /**
   * Asks the table of allocations to show those of a branch only.
   * @param {Branch[]} path from the root to it
   */
  #narrow(path) {
    const branch = path[path.length - 1];
    // One that stands for several is not named before one of those.
    const named = path.slice(1).filter(({ name, members }, i) => name !== null && !members.includes(path[i + 2]));
    const place = this.place(named.map(({ name }) => name ?? ""));
    const name = this.words.nameOf(branch, null);
    const rest = `${name} of ${place || path[0].name}`;
    const label = branch.name !== null ? place : branch.meaning === "rest" ? rest : `${place}, ${name}`;
    const { kinds } = branch;
    const keep = (/** @type {number} */ kind) => kinds.has(kind);
    document.dispatchEvent(new CustomEvent("narrow", { detail: { label, keep } }));
    this.narrowed();
  }

  /** @param {Branch|undefined} branch */
  #focus(branch) {
    const box = branch && this.#boxes.get(branch);
    if (!box) return;
    for (const each of this.container.querySelectorAll("[tabindex='0']")) each.setAttribute("tabindex", "-1");
    box.setAttribute("tabindex", "0");
    box.focus();
  }

  /**
   * @param {Drawn} node
   * @param {number} by
   */
  #sibling(node, by) {
    const row = (node.parent?.children ?? [node]).filter((each) => this.#boxes.has(each.branch));
    return row[row.indexOf(node) + by]?.branch;
  }

  /**
   * The node whose box holds `target`.
   * @param {EventTarget|null} target
   */
  #nodeOf(target) {
    const box = target instanceof Element ? target.closest("[role=treeitem]") : null;
    return box ? this.#nodes.get(box) : undefined;
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    const node = this.#nodeOf(event.target);
    const top = this.#nodes.values().next().value;
    if (!node || !top) return;
    /** @type {Record<string, () => void>} */
    const moves = {
      ArrowDown: () => this.#focus(node.children.find((child) => this.#boxes.has(child.branch))?.branch),
      ArrowUp: () => this.#focus(node.parent?.branch),
      ArrowLeft: () => this.#focus(this.#sibling(node, -1)),
      ArrowRight: () => this.#focus(this.#sibling(node, 1)),
      Home: () => this.#focus(top.branch),
      Enter: () => this.#open(node),
      " ": () => this.#open(node),
      Backspace: () => this.#open(top),
    };
    const move = moves[event.key];
    if (!move || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    move();
  }
}
