/** One box of a tree: its words and its colours. */
import { make, paint } from "../common/dom.js";
import { formatBytes, formatCount, formatShare } from "../common/format.js";
import { fittingText } from "./labels.js";
/** @import { CategoryView } from "../common/page.js" */
/** @import { Branch, Drawn } from "../data/tree.js" */

/**
 * `left` and `wide` in percent of the width, the rest in pixels; an `open` box has its children inside or below it.
 * @typedef {{node: Drawn, left: number, wide: number, width: number, top: number, tall: number, open: boolean}} Box
 */

/**
 * `root` is that of the tree, `above` is above what is shown, null for the root.
 * @typedef {{root: Branch, above: Branch|null, widthOf: (text: string) => number}} View
 */

const LOWEST_LABEL = 16;
const BESIDE_LABEL = 10;
const NARROWEST_FRAME = 12;
const SHARE_OF_STRIPES = 0.6; // of the width that a label may cover
const LONGEST_LIST = 20;

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

/**
 * Stripes in proportion to bytes by category.
 * @param {number[]} mix with holes
 * @param {CategoryView[]} categories
 * @param {string} direction
 */
export function stripes(mix, categories, direction) {
  const total = mix.reduce((sum, bytes) => sum + bytes, 0);
  /** @type {string[]} */
  const stops = [];
  let at = 0;
  mix.forEach((bytes, category) => {
    const { light, dark } = categories[category];
    const end = at + (100 * bytes) / total;
    stops.push(`light-dark(${light}, ${dark}) ${at.toFixed(2)}% ${end.toFixed(2)}%`);
    at = end;
  });
  return `linear-gradient(${direction}, ${stops.join(", ")})`;
}

/**
 * `0.6 MiB`, or `0.5 MiB to 0.7 MiB` where the sizes differ.
 * @param {Branch[]} members
 */
function sizesOf(members) {
  const sizes = members.map((member) => member.bytes);
  const least = formatBytes(sizes.reduce((one, two) => Math.min(one, two)));
  const most = formatBytes(sizes.reduce((one, two) => Math.max(one, two)));
  return least === most ? least : `${least} to ${most}`;
}

/** What is said of branches. */
export class TreeWords {
  /**
   * @param {CategoryView[]} categories
   * @param {(name: string) => string[]} shorten labels of a name, the longest first
   */
  constructor(categories, shorten) {
    this.categories = categories;
    this.shorten = shorten;
  }

  /** @param {string|null} name */
  #short(name) {
    return this.shorten(name ?? "")[0];
  }

  /**
   * Its name; siblings that are numbered only have the name of what is above them before it.
   * @param {Branch} branch
   * @param {Branch|null} above null for the root, whose name is no module's
   */
  nameOf(branch, above) {
    const { meaning, name, category, members } = branch;
    if (meaning === "rest") return `${formatCount(members.length)} more`;
    if (meaning === "run") return `${formatCount(members.length)} frames`;
    if (category !== null) return this.categories[category]?.label ?? "";
    if (meaning === "alike" && above?.name && /^\d/.test(name ?? "")) return `${above.name}.${name}`;
    return this.#short(name);
  }

  /**
   * Labels of a branch, the longest first.
   * @param {Branch} branch
   * @param {Branch|null} above
   */
  labelsOf(branch, above) {
    const { meaning, members } = branch;
    const name = this.nameOf(branch, above);
    const size = formatBytes(branch.bytes);
    if (meaning === "alike") {
      const each = `${name}, ${formatCount(members.length)} × ${sizesOf(members)}`;
      return [`${each} · ${size}`, each, name, branch.name ?? ""];
    }
    if (meaning === "run") {
      const ends = [members[0], branch].map((member) => this.#short(member.name));
      return [`${name}, ${ends[0]} → … → ${ends[1]} · ${size}`, `${name}, … → ${ends[1]}`, name];
    }
    if (meaning === "rest") return [`${name} · ${size}`, name];
    if (branch.category !== null) return [`${name} · ${size}`, name, name.split(" ")[0]];
    return [`${name} · ${size}`, ...this.shorten(branch.name ?? "")];
  }

  /**
   * @param {Branch} branch
   * @param {Branch|null} above
   * @param {number} total
   */
  spokenOf(branch, above, total) {
    const { meaning, members, bytes } = branch;
    const name = meaning === "one" && branch.category === null ? branch.name : this.nameOf(branch, above);
    const each = meaning === "alike" ? `, ${formatCount(members.length)} × ${sizesOf(members)}` : "";
    return `${name}${each}, ${formatBytes(bytes)}, ${formatShare(bytes, total)}`;
  }

  /**
   * All that is known of a branch.
   * @param {Branch} branch
   * @param {Branch|null} above
   * @param {number} total
   */
  titleOf(branch, above, total) {
    const { meaning, members, mix } = branch;
    const lines = [this.spokenOf(branch, above, total)];
    if (meaning === "run") lines.push(...members.slice(0, LONGEST_LIST).map((member) => member.name ?? ""));
    if (branch.category === null) {
      mix.forEach((bytes, category) => lines.push(`${this.categories[category]?.label}: ${formatBytes(bytes)}`));
    }
    return lines.join("\n");
  }
}

/**
 * The element of a box.
 * @param {Box} box
 * @param {TreeWords} words
 * @param {View} view
 */
export function boxElement({ node, left, wide, width, top, tall, open }, words, view) {
  const { branch, depth, parent } = node;
  const above = parent?.branch === view.root ? null : (parent?.branch ?? view.above);
  const folded = branch.meaning !== "one" && parent !== null;
  const category = branch.category === null ? null : words.categories[branch.category];
  const box = make("div", {
    class: "box",
    role: "treeitem",
    tabindex: -1,
    "aria-level": depth + 1,
    "aria-expanded": branch.inside.length ? String(open && !folded) : null,
    "aria-label": words.spokenOf(branch, above, view.root.bytes),
    title: words.titleOf(branch, above, view.root.bytes),
  });
  box.dataset.bytes = String(branch.bytes);
  box.style.cssText = `left:${left}%;width:${wide}%;top:${top}px;height:${tall}px`;
  const labels = words.labelsOf(branch, above);
  if (branch.meaning !== "one") labels.forEach((label, i) => (labels[i] = `${folded ? "▸" : "▾"} ${label}`));
  const striped = !category && (!open || width < NARROWEST_FRAME);
  const room = striped ? SHARE_OF_STRIPES * width : width - BESIDE_LABEL;
  const label = tall < LOWEST_LABEL ? "" : fittingText(labels, room, view.widthOf, !category && branch.name !== null);
  if (label) box.append(make("span", { class: "box-label" }, label));
  if (category) {
    paint(box, category);
    box.style.setProperty("--on", `light-dark(${inkOn(category.light)}, ${inkOn(category.dark)})`);
  } else {
    box.classList.add(striped ? "striped" : "inner");
    box.style.setProperty("--mix", stripes(branch.mix, words.categories, striped ? "to top" : "to right"));
  }
  return box;
}
