/** Trees of bytes, built from paths. A branch is one node of such a tree, or several that are shown as one. */

/** @typedef {{path: string[], bytes: number, category: number, kind: number}} PathRow */
/**
 * `mix` are bytes by category, with holes; `category` and `kinds`, numbers of allocations' kinds, are those of a leaf.
 * @typedef {{name: string|null, bytes: number, category: number|null, mix: number[], kinds: number[], children: Map<string|number, Tree>}} Tree
 */
/**
 * What a branch stands for: one name; siblings that are alike; a run of single children; what has no box of its own.
 * @typedef {"one"|"alike"|"run"|"rest"} Meaning
 */
/** @typedef {{branch: Branch, depth: number, parent: Drawn|null, children: Drawn[]}} Drawn a branch that has a box */
/** @typedef {(children: Branch[]) => Branch[]} Arrange puts siblings in order, and folds them */

const MAX_BOXES = 500;

/**
 * @param {string|null} name
 * @param {number|null} category
 * @returns {Tree}
 */
function newNode(name, category = null) {
  return { name, bytes: 0, category, mix: [], kinds: [], children: new Map() };
}

/**
 * The child of `node` with this name or category.
 * @param {Tree} node
 * @param {string|number} key
 */
function childOf(node, key) {
  let child = node.children.get(key);
  if (!child) {
    // A number as the key is a category: no name, which is a string, is the same.
    child = typeof key === "number" ? newNode(null, key) : newNode(key);
    node.children.set(key, child);
  }
  return child;
}

/**
 * A tree from rows with a path, and the category and the kind of the leaf.
 * @param {string} rootName
 * @param {Iterable<PathRow>} rows
 */
export function treeOf(rootName, rows) {
  const root = newNode(rootName);
  for (const { path, bytes, category, kind } of rows) {
    let node = root;
    for (const key of [null, ...path, category]) {
      if (key !== null) node = childOf(node, key);
      node.bytes += bytes;
      node.mix[category] = (node.mix[category] ?? 0) + bytes;
    }
    node.kinds.push(kind);
  }
  return root;
}

/** Nodes of a tree that are shown as one, with what lies below them put together by name. */
export class Branch {
  /** @type {Branch[]|null} */
  #children = null;

  /**
   * @param {string|null} name
   * @param {Tree[]} parts
   * @param {Arrange} arrange
   * @param {Meaning} meaning
   * @param {Branch[]} members what it stands for; empty where it is one
   */
  constructor(name, parts, arrange, meaning = "one", members = []) {
    this.name = name;
    this.parts = parts;
    this.arrange = arrange;
    this.meaning = meaning;
    this.members = members;
    this.bytes = parts.reduce((sum, part) => sum + part.bytes, 0);
    /** The category of a leaf. */
    this.category = meaning === "rest" ? null : parts[0].category;
  }

  /** What lies below, arranged. */
  get children() {
    if (this.#children) return this.#children;
    if (this.meaning === "rest") return (this.#children = this.members);
    /** @type {Map<string|number, Tree[]>} */
    const groups = new Map();
    for (const part of this.parts) {
      for (const [key, child] of part.children) {
        const group = groups.get(key);
        if (group) group.push(child);
        else groups.set(key, [child]);
      }
    }
    const found = Array.from(groups.values(), (parts) => new Branch(parts[0].name, parts, this.arrange));
    this.#children = this.arrange(found.filter((child) => child.bytes > 0));
    return this.#children;
  }

  /** What is shown below it once it is opened. */
  get inside() {
    if (this.meaning === "run") return this.members.slice(0, 1);
    return this.members.length ? this.members : this.children;
  }

  /** Its bytes by category. */
  get mix() {
    /** @type {number[]} */
    const sums = [];
    for (const { mix } of this.parts) mix.forEach((bytes, category) => (sums[category] = (sums[category] ?? 0) + bytes));
    return sums;
  }

  /** The kinds of allocations that it is made of. */
  get kinds() {
    /** @type {Set<number>} */
    const found = new Set();
    const nodes = [...this.parts];
    for (let node = nodes.pop(); node; node = nodes.pop()) {
      for (const kind of node.kinds) found.add(kind);
      for (const child of node.children.values()) nodes.push(child);
    }
    return found;
  }
}

/** A heap of nodes, largest first. */
class LargestFirst {
  /** @type {Drawn[]} */
  #items = [];

  get size() {
    return this.#items.length;
  }

  /** @param {Drawn} node */
  push(node) {
    const items = this.#items;
    let at = items.push(node) - 1;
    while (at > 0) {
      const above = (at - 1) >> 1;
      if (items[above].branch.bytes >= items[at].branch.bytes) break;
      [items[above], items[at]] = [items[at], items[above]];
      at = above;
    }
  }

  /** The largest; there must be one. */
  pop() {
    const items = this.#items;
    const top = items[0];
    const last = items.pop();
    if (last && items.length) {
      items[0] = last;
      let at = 0;
      for (;;) {
        let largest = at;
        for (const below of [2 * at + 1, 2 * at + 2]) {
          if (below < items.length && items[below].branch.bytes > items[largest].branch.bytes) largest = below;
        }
        if (largest === at) break;
        [items[largest], items[at]] = [items[at], items[largest]];
        at = largest;
      }
    }
    return top;
  }
}

/**
 * What is left out when `kept` are the largest also takes those with it that are as large and as deep: of branches that
 * are alike all have a box or none has.
 * @param {Set<Drawn>} kept
 * @param {LargestFirst} left
 */
function dropAlike(kept, left) {
  const first = left.pop();
  let { depth } = first;
  while (left.size) {
    const next = left.pop();
    if (next.branch.bytes < first.branch.bytes) break;
    depth = Math.min(depth, next.depth);
  }
  // The first level stays: what was opened has not come to show nothing.
  const deepest = Math.max(depth, 2);
  for (const node of kept) if (node.depth >= deepest && node.branch.bytes === first.branch.bytes) kept.delete(node);
}

/**
 * The `limit` largest branches of a tree, or some less, in its order, with what is left out of one as its last child,
 * the rest. Below a branch only what is at most as large can be, so the largest are always a tree. One of which nothing
 * below is kept has no children.
 * @param {Branch} top the tree: what is inside of it is shown, of the others their children
 */
export function prunedTree(top, limit = MAX_BOXES) {
  /** @type {Drawn} */
  const root = { branch: top, depth: 0, parent: null, children: [] };
  const heap = new LargestFirst();
  /** @type {Set<Drawn>} */
  const kept = new Set();
  heap.push(root);
  while (heap.size && kept.size < limit) {
    const node = heap.pop();
    kept.add(node);
    for (const branch of node === root ? top.inside : node.branch.children) {
      const child = { branch, depth: node.depth + 1, parent: node, children: [] };
      node.children.push(child);
      heap.push(child);
    }
  }
  if (heap.size) dropAlike(kept, heap);
  for (const node of kept) node.children = withRest(node, kept);
  return root;
}

/**
 * The children of `node` that are kept, and one for all others.
 * @param {Drawn} node
 * @param {Set<Drawn>} kept
 */
function withRest(node, kept) {
  const left = node.children.filter((child) => !kept.has(child));
  if (left.length === node.children.length) return [];
  // One alone takes no more room than a rest of one.
  if (left.length < 2) return node.children;
  const members = left.map((child) => child.branch);
  const rest = new Branch(null, members.flatMap(({ parts }) => parts), node.branch.arrange, "rest", members);
  return [
    ...node.children.filter((child) => kept.has(child)),
    { branch: rest, depth: node.depth + 1, parent: node, children: [] },
  ];
}

/**
 * All nodes below and with `node`, parents first.
 * @param {Drawn} node
 */
export function nodesOf(node) {
  const found = [node];
  for (let i = 0; i < found.length; i += 1) found.push(...found[i].children);
  return found;
}

/**
 * The nodes below the root that stand for a name which holds `query`.
 * @param {Drawn} root
 * @param {string} query
 */
export function matchedNodes(root, query) {
  const wanted = query.toLowerCase();
  /** @param {Branch} branch */
  const holds = ({ name }) => name !== null && name.toLowerCase().includes(wanted);
  return new Set(
    nodesOf(root).filter(
      ({ branch, parent }) => parent && (holds(branch) || (branch.meaning === "run" && branch.members.some(holds))),
    ),
  );
}
