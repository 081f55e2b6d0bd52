/** A tree of bytes as boxes that can be walked and opened with the keyboard: an icicle or a treemap. */
import { fill, make, paint } from "../common/dom.js";
import { formatBytes, formatShare } from "../common/format.js";
import { icicleBoxes, treemapBoxes } from "../data/tree.js";
/** @import { CategoryView } from "../common/page.js" */
/** @import { Pruned } from "../data/tree.js" */

/** @typedef {"treemap"|"icicle"} Shape */
/**
 * `left` and `wide` in percent of the width, `top` and `tall` in pixels; `pixels` is its narrower side.
 * @typedef {{node: Pruned, depth: number, left: number, wide: number, top: number, tall: number, pixels: number}} Box
 */

const ROW = 26;
const MAP_HEIGHT = 460;
const NARROWEST_BOX = 0.8;

/** @param {string} color `#rrggbb` */
function luminance(color) {
  const parts = [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16) / 255);
  const linear = parts.map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
}

/**
 * Black or white, whichever can be read better on `color`.
 * @param {string} color `#rrggbb`
 */
export function inkOn(color) {
  const light = luminance(color);
  return 1.05 / (light + 0.05) > (light + 0.05) / 0.0525 ? "#ffffff" : "#0b0f16";
}

export class TreeView {
  #drawnWidth = 0;
  /** @type {Pruned|null} */
  root = null;
  /** @type {Pruned|null} */
  #top = null;
  /** @type {Set<Pruned>|null} */
  #matches = null;
  /** @type {Map<Element, Pruned>} */
  #nodes = new Map();
  /** @type {Map<Pruned, HTMLElement>} */
  #boxes = new Map();

  /**
   * `shape` is `treemap` or `icicle`; boxes take their colours from `categories`; `shorten` makes labels of names.
   * @param {HTMLElement} container
   * @param {HTMLElement} path
   * @param {CategoryView[]} categories
   * @param {Shape} shape
   * @param {string} label
   * @param {((name: string) => string)|null} shorten
   */
  constructor(container, path, categories, shape, label, shorten = null) {
    this.container = container;
    this.path = path;
    this.categories = categories;
    this.shape = shape;
    this.label = label;
    this.shorten = shorten;
    container.addEventListener("keydown", (event) => this.#key(event));
    container.addEventListener("click", (event) => {
      const node = this.#nodeOf(event.target);
      if (node) this.open(node);
    });
    new ResizeObserver(() => {
      if (this.root && Math.abs(container.clientWidth - this.#drawnWidth) > 1) this.draw();
    }).observe(container);
  }

  /** @param {Pruned} root */
  show(root) {
    this.root = root;
    this.#top = root;
    this.draw();
  }

  /** @param {Pruned} node */
  open(node) {
    const target = node === this.#top ? node.parent : node;
    if (!target || !target.children.length) return;
    const focused = this.container.contains(document.activeElement);
    this.#top = target;
    this.draw();
    if (focused) this.#boxes.get(target)?.focus();
  }

  /** @param {Set<Pruned>|null} matches */
  highlight(matches) {
    // Without a search before and now, the boxes are as they were drawn.
    if (!matches && !this.#matches) return;
    this.#matches = matches;
    this.draw();
  }

  /** @param {Pruned} node */
  nameOf(node) {
    if (node.name !== null) return node.name;
    return (node.category === null ? null : this.categories[node.category]?.label) ?? "";
  }

  /**
   * What is written into the box of `node`.
   * @param {Pruned} node
   */
  labelOf(node) {
    return this.shorten && node.name !== null ? this.shorten(node.name) : this.nameOf(node);
  }

  draw() {
    const { root } = this;
    const top = this.#top;
    if (!root || !top) return;
    const width = this.container.clientWidth || 900;
    this.#drawnWidth = this.container.clientWidth;
    const boxes = this.shape === "icicle" ? this.#icicle(top, width) : this.#treemap(top, width);
    this.#nodes = new Map();
    this.#boxes = new Map();
    fill(this.container, ...boxes.filter((box) => box.pixels >= NARROWEST_BOX).map((box) => this.#box(box, root)));
    this.container.setAttribute("role", "tree");
    this.container.setAttribute("aria-label", this.label);
    this.container.classList.toggle("searched", this.#matches !== null);
    this.container.querySelector("[role=treeitem]")?.setAttribute("tabindex", "0");
    this.#drawPath(top);
  }

  /**
   * @param {Pruned} top
   * @param {number} width
   * @returns {Box[]}
   */
  #icicle(top, width) {
    const boxes = icicleBoxes(top);
    const depth = boxes.reduce((most, box) => Math.max(most, box.depth), 0);
    this.container.style.height = `${(depth + 1) * ROW}px`;
    return boxes.map((box) => ({
      ...box,
      left: 100 * box.left,
      wide: 100 * box.width,
      top: box.depth * ROW,
      tall: ROW - 1,
      pixels: box.width * width,
    }));
  }

  /**
   * @param {Pruned} top
   * @param {number} width
   * @returns {Box[]}
   */
  #treemap(top, width) {
    const height = width < 560 ? 380 : MAP_HEIGHT;
    this.container.style.height = `${height}px`;
    return treemapBoxes(top, width, height).map((box) => ({
      ...box,
      left: (100 * box.left) / width,
      wide: (100 * box.width) / width,
      top: box.top,
      tall: box.height,
      pixels: Math.min(box.width, box.height),
    }));
  }

  /**
   * @param {Box} box
   * @param {Pruned} root
   */
  #box({ node, left, wide, top, tall, depth, pixels }, root) {
    const name = this.nameOf(node);
    const size = formatBytes(node.bytes);
    const share = formatShare(node.bytes, root.bytes);
    const box = make("div", {
      class: "box",
      role: "treeitem",
      tabindex: -1,
      "aria-level": depth + 1,
      "aria-label": `${name}, ${size}, ${share}`,
      title: `${name} · ${size} · ${share}`,
    });
    if (node.children.length) box.setAttribute("aria-expanded", "true");
    const category = node.category === null ? null : this.categories[node.category];
    paint(box, category);
    if (category) box.style.setProperty("--on", `light-dark(${inkOn(category.light)}, ${inkOn(category.dark)})`);
    box.dataset.bytes = String(node.bytes);
    box.classList.toggle("inner", !category);
    box.classList.toggle("rest", node.rest);
    box.classList.toggle("match", Boolean(this.#matches?.has(node)));
    box.style.cssText += `;left:${left}%;width:${wide}%;top:${top}px;height:${tall}px`;
    if (pixels > 14 && tall > 13) {
      const label = this.labelOf(node);
      box.append(make("span", { class: "box-label" }, pixels > 150 ? `${label} · ${size}` : label));
    }
    this.#nodes.set(box, node);
    this.#boxes.set(node, box);
    return box;
  }

  /** @param {Pruned} top */
  #drawPath(top) {
    const above = [top];
    for (let node = top.parent; node; node = node.parent) above.unshift(node);
    this.path.hidden = above.length < 2;
    fill(
      this.path,
      ...above.map((node) => {
        const button = make(
          "button",
          { type: "button", class: "crumb", disabled: node === top },
          this.labelOf(node),
        );
        button.addEventListener("click", () => {
          this.#top = node;
          this.draw();
        });
        return button;
      }),
    );
  }

  /** @param {Pruned|null|undefined} node */
  #focus(node) {
    const box = node && this.#boxes.get(node);
    if (!box) return;
    for (const each of this.container.querySelectorAll("[tabindex='0']")) each.setAttribute("tabindex", "-1");
    box.setAttribute("tabindex", "0");
    box.focus();
  }

  /**
   * @param {Pruned} node
   * @param {number} by
   */
  #sibling(node, by) {
    const row = (node.parent?.children ?? [node]).filter((each) => this.#boxes.has(each));
    return row[row.indexOf(node) + by];
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
    const top = this.#top;
    const node = this.#nodeOf(event.target);
    if (!node || !top) return;
    /** @type {Record<string, () => void>} */
    const moves = {
      ArrowDown: () => this.#focus(node.children.find((child) => this.#boxes.has(child))),
      ArrowUp: () => this.#focus(node === top ? null : node.parent),
      ArrowLeft: () => this.#focus(this.#sibling(node, -1)),
      ArrowRight: () => this.#focus(this.#sibling(node, 1)),
      Home: () => this.#focus(top),
      Enter: () => this.open(node),
      " ": () => this.open(node),
      Backspace: () => this.open(top),
    };
    const move = moves[event.key];
    if (!move || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    move();
  }
}
