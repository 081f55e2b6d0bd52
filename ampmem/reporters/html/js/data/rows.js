/** The rows of the allocation table: what each column says of a kind, and in which order they come. */
import { ownFrame, shortFrame, together } from "./alive.js";
/** @import { Kinds, LayerRow } from "./alive.js" */

/** @typedef {"size"|"count"|"category"|"dtype"|"shape"|"module"|"what"|"code"|"made"} Field */
/** @typedef {{field: Field, reversed: boolean}} Order `reversed` is against the way that is natural for the column */

/** The columns in which the largest comes first; in the others texts ascend. */
const NUMBERS = new Set(["size", "count"]);

/** @type {Order} */
export const LARGEST_FIRST = { field: "size", reversed: false };

/**
 * Whether values of the column ascend in this order.
 * @param {Order} order
 */
export function ascends({ field, reversed }) {
  return NUMBERS.has(field) === reversed;
}

/** Says what is in each column, and remembers what takes long to find. */
export class Cells {
  /** @type {Map<number, string>} */
  #own = new Map();

  /** @param {Kinds} kinds */
  constructor(kinds) {
    this.kinds = kinds;
  }

  /**
   * The frame of a kind that is the script's own; empty where no stack is known.
   * @param {number} kind
   */
  ownFrame(kind) {
    const stack = this.kinds.header.kinds.stack[kind];
    let found = this.#own.get(stack);
    if (found === undefined) {
      found = ownFrame(this.kinds.frames(kind));
      this.#own.set(stack, found);
    }
    return found;
  }

  /**
   * What is in a column; empty where it is not known.
   * @param {Field} field
   * @param {LayerRow} row
   * @returns {string|number}
   */
  value(field, { rows, count, bytes }) {
    const { kinds } = this;
    const { kind } = rows[0];
    /** @param {(each: number) => string} text */
    const ofAll = (text) => together(rows.map((each) => text(each.kind)));
    switch (field) {
      case "size":
        return bytes;
      case "count":
        return count;
      case "category":
        return kinds.categories[kinds.category(kind)]?.label ?? "";
      case "shape":
        return kinds.shape(kind);
      case "what":
        return ofAll((each) => kinds.what(each));
      case "module":
        return ofAll((each) => kinds.text("module", each));
      case "code":
        return shortFrame(this.ownFrame(kind));
      case "made":
        return kinds.phase(kind);
      default:
        return kinds.text(field, kind);
    }
  }

  /**
   * `rows`, the largest first, in another order; those that are equal in it stay, and what is not known is last.
   * @param {LayerRow[]} rows
   * @param {Order} order
   */
  sorted(rows, order) {
    const values = rows.map((row) => this.value(order.field, row));
    const ranks = ranksOf(values);
    const sign = ascends(order) ? 1 : -1;
    const places = rows.map((_, i) => i);
    places.sort((one, two) => {
      if (values[one] === values[two]) return one - two;
      if (values[one] === "" || values[two] === "") return values[one] === "" ? 1 : -1;
      return sign * (ranks[one] - ranks[two]);
    });
    return places.map((i) => rows[i]);
  }
}

/**
 * Numbers that compare as `values` do: of texts the place of each, digits in them taken as numbers.
 * @param {Array<string|number>} values
 * @returns {number[]}
 */
function ranksOf(values) {
  const texts = [...new Set(values.filter((value) => typeof value === "string"))];
  texts.sort(new Intl.Collator("en", { numeric: true }).compare);
  const ranks = new Map(texts.map((text, rank) => [text, rank]));
  return values.map((value) => (typeof value === "string" ? (ranks.get(value) ?? 0) : value));
}
