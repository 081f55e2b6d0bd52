/** What is alive, by module and by Python stack. */
import { byId, press } from "../common/dom.js";
import { formatBytes, formatCount, formatShare } from "../common/format.js";
import { matchedStacks, moduleRows, shortFrame, stackRows } from "../data/alive.js";
import { moduleBranch, stackBranch } from "../data/fold.js";
import { isLibraryFrame } from "../data/frames.js";
import { treeOf } from "../data/tree.js";
import { TreeView } from "../figures/treeview.js";
/** @import { CategoryView } from "../common/page.js" */
/** @import { Kinds } from "../data/alive.js" */
/** @import { Shape } from "../figures/treeview.js" */

export class Trees {
  /** @type {Kinds|null} */
  #kinds = null;
  /** @type {Int32Array|null} */
  #counts = null;
  #where = "";
  #search = byId("stacks-search", HTMLInputElement);
  #libraries = byId("stacks-libraries", HTMLInputElement);

  /**
   * @param {CategoryView[]} categories
   * @param {() => void} narrowed what is to happen once the table of allocations shows those of one box only
   */
  constructor(categories, narrowed) {
    this.modules = new TreeView(byId("modules-tree"), byId("modules-path"), categories, {
      shape: "treemap",
      label: "Live bytes by module",
      shorten: (name) => [name],
      place: (names) => names.join("."),
      narrowed,
    });
    this.stacks = new TreeView(byId("stacks-tree"), byId("stacks-path"), categories, {
      shape: "icicle",
      label: "Live bytes by Python stack",
      shorten: (name) => [shortFrame(name), shortFrame(name).split("  ")[0]],
      place: (names) => shortFrame(names[names.length - 1] ?? ""),
      narrowed,
    });
    this.#listen();
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
    this.#search.addEventListener("input", () => this.#searchStacks());
    this.#libraries.addEventListener("change", () => this.#showStacks());
  }

  /**
   * Where `counts` are not known, only the titles change.
   * @param {Kinds} kinds
   * @param {Int32Array|null} counts by kind
   * @param {string} where
   */
  show(kinds, counts, where) {
    byId("modules-title").textContent = `Live ${where}, by module`;
    byId("stacks-title").textContent = `Live ${where}, by Python stack`;
    if (!counts) return;
    this.#kinds = kinds;
    this.#counts = counts;
    this.#where = where;
    byId("stacks-libraries-choice").hidden = !kinds.header.frames.some(isLibraryFrame);
    if (!byId("modules").hidden) {
      this.modules.show(moduleBranch(treeOf("model and training step", moduleRows(kinds, counts))));
    }
    if (!byId("stacks").hidden) this.#showStacks();
  }

  #showStacks() {
    if (!this.#kinds || !this.#counts) return;
    const rows = stackRows(this.#kinds, this.#counts, this.#libraries.checked);
    this.stacks.show(stackBranch(treeOf(`all live memory ${this.#where}`, rows)), this.#query);
    this.#sayMatched();
  }

  get #query() {
    return this.#search.value.trim();
  }

  #searchStacks() {
    if (!this.#kinds || !this.#counts) return;
    this.stacks.search(this.#query);
    this.#sayMatched();
  }

  /** Counted in all stacks: of a large tree only the largest boxes are drawn. */
  #sayMatched() {
    const kinds = this.#kinds;
    const counts = this.#counts;
    if (!kinds || !counts) return;
    const { frames, libraries, bytes } = matchedStacks(kinds, counts, this.#query);
    const total = counts.reduce((sum, count, kind) => sum + count * kinds.bytes(kind), 0);
    const found = `${formatCount(frames)} frame${frames === 1 ? "" : "s"}`;
    const hidden = libraries && !this.#libraries.checked ? `, ${formatCount(libraries)} of them not shown` : "";
    const size = `${formatBytes(bytes)} (${formatShare(bytes, total)})`;
    byId("stacks-matched").textContent = this.#query ? `${found}${hidden}, ${size}` : "";
  }
}
