/** The order of siblings in a tree, and which of them are shown as one. */
import { Branch } from "./tree.js";
/** @import { Tree } from "./tree.js" */

// At least so many siblings whose names differ by a number only are shown as one, if the largest of them is at most
// a quarter larger than the smallest.
const FEWEST_ALIKE = 4;
const ALIKE = 1.25;
const FEWEST_IN_RUN = 3;
const LONGEST_NUMBER = 15;

/** @typedef {{head: string, digits: string, tail: string}} Numbered */
/** @typedef {{branch: Branch, name: Numbered|null, number: number}} Sibling */

/**
 * A name in three: what is before its last number, the number, and what is behind it; null where it has none.
 * @param {string} name
 * @returns {Numbered|null}
 */
export function numbered(name) {
  /** @param {number} at */
  const isDigit = (at) => name[at] >= "0" && name[at] <= "9";
  let end = name.length;
  while (end > 0 && !isDigit(end - 1)) end -= 1;
  let start = end;
  while (start > 0 && isDigit(start - 1)) start -= 1;
  if (start === end || end - start > LONGEST_NUMBER) return null;
  return { head: name.slice(0, start), digits: name.slice(start, end), tail: name.slice(end) };
}

/**
 * Siblings as one: `0–199`, or `0 … 198` where numbers between them are missing.
 * @param {Sibling[]} siblings by number
 */
function foldOf(siblings) {
  const [first, last] = [siblings[0], siblings[siblings.length - 1]];
  const whole = last.number - first.number + 1 === siblings.length;
  const range = `${first.name?.digits}${whole ? "–" : " … "}${last.name?.digits}`;
  const members = siblings.map(({ branch }) => branch);
  const parts = members.flatMap((member) => member.parts);
  return new Branch(`${first.name?.head}${range}${first.name?.tail}`, parts, first.branch.arrange, "alike", members);
}

/**
 * Siblings whose names differ by a number only, by that number; those whose sizes are alike are one.
 * @param {Sibling[]} siblings
 */
function foldedSiblings(siblings) {
  if (siblings.length < FEWEST_ALIKE) return siblings.sort(byNumber).map(({ branch }) => branch);
  /** @type {Sibling[][]} */
  const groups = [];
  for (const sibling of siblings.sort((one, two) => two.branch.bytes - one.branch.bytes)) {
    const group = groups[groups.length - 1];
    if (group && group[0].branch.bytes <= ALIKE * sibling.branch.bytes) group.push(sibling);
    else groups.push([sibling]);
  }
  return groups
    .flatMap((group) => {
      group.sort(byNumber);
      if (group.length < FEWEST_ALIKE) return group;
      return [{ ...group[0], branch: foldOf(group) }];
    })
    .sort(byNumber)
    .map(({ branch }) => branch);
}

/**
 * @param {Sibling} one
 * @param {Sibling} two
 */
function byNumber(one, two) {
  return one.number - two.number;
}

/**
 * Modules: in the order in which they are first met, but numbered ones by their numbers, and those that are alike as
 * one; what is a module's own comes behind what is below it, by category.
 * @param {Branch[]} children
 */
function modulesArranged(children) {
  /** @type {Map<string, Sibling[]>} */
  const patterns = new Map();
  /** @type {Branch[]} */
  const leaves = [];
  for (const branch of children) {
    if (branch.name === null) {
      leaves.push(branch);
      continue;
    }
    const name = numbered(branch.name);
    const pattern = JSON.stringify(name ? [name.head, name.tail] : branch.name);
    const sibling = { branch, name, number: Number(name?.digits ?? 0) };
    const siblings = patterns.get(pattern);
    if (siblings) siblings.push(sibling);
    else patterns.set(pattern, [sibling]);
  }
  leaves.sort((one, two) => (one.category ?? 0) - (two.category ?? 0));
  return [...Array.from(patterns.values(), foldedSiblings).flat(), ...leaves];
}

/** @param {Branch[]} children */
function largestFirst(children) {
  return children.sort((one, two) => two.bytes - one.bytes);
}

/**
 * A frame that calls one frame only, which calls one frame only, and so on, as one.
 * @param {Branch} first
 */
function foldedRun(first) {
  const run = [first];
  for (let [next, ...more] = first.children; next && !more.length && next.name !== null; [next, ...more] = next.children) {
    run.push(next);
  }
  if (run.length < FEWEST_IN_RUN) return first;
  const { name, parts, arrange } = run[run.length - 1];
  return new Branch(name, parts, arrange, "run", run);
}

/**
 * Modules in the model's order.
 * @param {Tree} tree
 */
export function moduleBranch(tree) {
  return new Branch(tree.name, [tree], modulesArranged);
}

/**
 * Stacks, the largest first; frames at the root that do nothing but call one another are one.
 * @param {Tree} tree
 */
export function stackBranch(tree) {
  const root = new Branch(tree.name, [tree], largestFirst);
  return new Branch(tree.name, [tree], largestFirst, "one", root.children.map(foldedRun));
}
