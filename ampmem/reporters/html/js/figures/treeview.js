/** A tree of bytes as boxes that can be walked and opened with the keyboard: an icicle or a treemap. */
import { fill, make, paint } from "../common/dom.js";
import { formatBytes, formatShare } from "../common/format.js";
import { icicleBoxes, treemapBoxes } from "../data/tree.js";

const ROW = 26;
const MAP_HEIGHT = 460;
const NARROWEST_BOX = 0.8;

function luminance(color) {
  const parts = [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16) / 255);
  const linear = parts.map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
}

/** Black or white, whichever can be read better on `color`. */
export function inkOn(color) {
  const light = luminance(color);
  return 1.05 / (light + 0.05) > (light + 0.05) / 0.0525 ? "#ffffff" : "#0b0f16";
}

export class TreeView {
  #drawnWidth = 0;

  /** `shape` is `treemap` or `icicle`; boxes take their colours from `categories`; `shorten` makes labels of names. */
  constructor(container, path, categories, shape, label, shorten = null) {
    Object.assign(this, { container, path, categories, shape, label, shorten, root: null, top: null, matches: null });
    container.addEventListener("keydown", (event) => this.#key(event));
    container.addEventListener("click", (event) => {
      const node = this.nodes?.get(event.target.closest("[role=treeitem]"));
      if (node) this.open(node);
    });
    new ResizeObserver(() => {
      if (this.root && Math.abs(container.clientWidth - this.#drawnWidth) > 1) this.draw();
    }).observe(container);
  }

  show(root) {
    this.root = root;
    this.top = root;
    this.draw();
  }

  open(node) {
    const target = node === this.top ? node.parent : node;
    if (!target || !target.children.length) return;
    const focused = this.container.contains(document.activeElement);
    this.top = target;
    this.draw();
    if (focused) this.container.querySelector("[role=treeitem]")?.focus();
  }

  highlight(matches) {
    this.matches = matches;
    this.draw();
  }

  nameOf(node) {
    if (node.name !== null) return node.name;
    return this.categories[node.category]?.label ?? "";
  }

  /** What is written into the box of `node`. */
  labelOf(node) {
    return this.shorten && node.name !== null ? this.shorten(node.name) : this.nameOf(node);
  }

  draw() {
    const width = this.container.clientWidth || 900;
    this.#drawnWidth = this.container.clientWidth;
    const boxes = this.shape === "icicle" ? this.#icicle(width) : this.#treemap(width);
    this.nodes = new Map();
    this.boxes = new Map();
    fill(this.container, ...boxes.filter((box) => (box.pixels ?? 0) >= NARROWEST_BOX).map((box) => this.#box(box)));
    this.container.setAttribute("role", "tree");
    this.container.setAttribute("aria-label", this.label);
    this.container.classList.toggle("searched", this.matches !== null);
    this.container.querySelector("[role=treeitem]")?.setAttribute("tabindex", "0");
    this.#drawPath();
  }

  #icicle(width) {
    const boxes = icicleBoxes(this.top);
    const depth = boxes.reduce((most, box) => Math.max(most, box.pixels === 0 ? 0 : box.depth), 0);
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

  #treemap(width) {
    const height = width < 560 ? 380 : MAP_HEIGHT;
    this.container.style.height = `${height}px`;
    return treemapBoxes(this.top, width, height).map((box) => ({
      ...box,
      left: (100 * box.left) / width,
      wide: (100 * box.width) / width,
      top: box.top,
      tall: box.height,
      pixels: Math.min(box.width, box.height),
    }));
  }

  #box({ node, left, wide, top, tall, depth, pixels }) {
    const name = this.nameOf(node);
    const size = formatBytes(node.bytes);
    const share = formatShare(node.bytes, this.root.bytes);
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
    box.classList.toggle("match", Boolean(this.matches?.has(node)));
    box.style.cssText += `;left:${left}%;width:${wide}%;top:${top}px;height:${tall}px`;
    if (pixels > 14 && tall > 13) {
      const label = this.labelOf(node);
      box.append(make("span", { class: "box-label" }, pixels > 150 ? `${label} · ${size}` : label));
    }
    this.nodes.set(box, node);
    this.boxes.set(node, box);
    return box;
  }

  #drawPath() {
    const above = [];
    for (let node = this.top; node; node = node.parent) above.unshift(node);
    this.path.hidden = above.length < 2;
    fill(
      this.path,
      ...above.map((node) => {
        const button = make(
          "button",
          { type: "button", class: "crumb", disabled: node === this.top },
          this.labelOf(node),
        );
        button.addEventListener("click", () => {
          this.top = node;
          this.draw();
        });
        return button;
      }),
    );
  }

  #focus(node) {
    const box = node && this.boxes.get(node);
    if (!box) return;
    for (const each of this.container.querySelectorAll("[tabindex='0']")) each.setAttribute("tabindex", "-1");
    box.setAttribute("tabindex", "0");
    box.focus();
  }

  #sibling(node, by) {
    const row = (node.parent?.children ?? [node]).filter((each) => this.boxes.has(each));
    return row[row.indexOf(node) + by];
  }

  #key(event) {
    const node = this.nodes.get(event.target);
    if (!node) return;
    const moves = {
      ArrowDown: () => this.#focus(node.children.find((child) => this.boxes.has(child))),
      ArrowUp: () => node !== this.top && this.#focus(node.parent),
      ArrowLeft: () => this.#focus(this.#sibling(node, -1)),
      ArrowRight: () => this.#focus(this.#sibling(node, 1)),
      Home: () => this.#focus(this.top),
      Enter: () => this.open(node),
      " ": () => this.open(node),
      Backspace: () => this.top.parent && this.open(this.top),
    };
    const move = moves[event.key];
    if (!move || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    move();
  }
}
