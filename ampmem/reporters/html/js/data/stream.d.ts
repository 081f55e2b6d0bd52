/** The events of a run: as they are packed, and as what lives when. */

/**
 * One entry per kind of allocation: indices into `texts`, `stacks` and `shapes`, bytes, and numbers of categories and
 * phases. `what` says what an unnamed tensor is. `dtype` and `shape` are those of the tensor that fills the allocation.
 */
export interface KindColumns {
  category: number[];
  bytes: number[];
  name: number[];
  module: number[];
  op: number[];
  what: number[];
  stack: number[];
  phase: number[];
  dtype: number[];
  shape: number[];
}

/** Segments that come and go: `since` is the first position at which a row counts, and bytes are below 0 in a release. */
export interface SegmentColumns {
  since: number[];
  bytes: number[];
  address: number[];
  pages: number[];
}

/** What every packed stream begins with; `stacks` are indices into `frames`, outermost first; shapes are `[8, 128]`. */
export interface KindsHeader {
  texts: string[];
  frames: string[];
  stacks: number[][];
  shapes: string[];
  kinds: KindColumns;
}

export interface ExactHeader extends KindsHeader {
  code_bytes: number;
  time_bytes: number;
  time_unit_ns: number;
  start_ns: number;
  segments?: SegmentColumns;
  block_bytes?: number[];
  addresses?: number[];
  place_bytes?: number;
}

export interface ReducedHeader extends KindsHeader {
  count: number;
  layered: boolean;
  peak_kinds?: [kind: number, count: number][];
}

export type Integers = Uint32Array | Float64Array;

/** Every event: twice the kind of its allocation, and one more for a free. */
export interface ExactStream {
  mode: "exact";
  events: number;
  categories: number;
  header: ExactHeader;
  codes: Integers;
  times: Float64Array;
  places: Integers | null;
}

/** Some positions, and the bytes of every category there. */
export interface ReducedStream {
  mode: "reduced";
  events: number;
  categories: number;
  header: ReducedHeader;
  positions: Float64Array;
  times: Float64Array;
  series: Float64Array[];
}

/** A block that lives; `category` is its number, `kind` that of its allocation, `born` the event that made it. */
export interface Block {
  address: number;
  bytes: number;
  category: number;
  kind: number;
  born: number;
}

/** An alloc or a free of an allocation of this kind. */
export interface LiveEvent {
  kind: number;
  free: boolean;
}

/** What lives when; `data/live.js` says what an instant is. */
export interface Live {
  exact: boolean;
  times: Float64Array;
  categories: number;
  /** How many series there are above those of the categories. */
  layers: number;
  length: number;
  totals: Float64Array;
  /** The most that each series reaches. */
  most: ArrayLike<number> & Iterable<number>;
  reserved: Float64Array;
  /** The instants at which `reserved` changes. */
  changes: number[];
  segments: SegmentColumns | null;

  position(index: number): number;
  indexOf(position: number): number;
  sample(indices: ArrayLike<number> & Iterable<number>): Float64Array[];
  totalsOf(shown: boolean[]): Float64Array;
  /** By kind; null where it is not known. */
  aliveAt(index: number): Int32Array | null;
  blocksAt(index: number): Block[] | null;
  /** The event that led to an instant; null where that is not known. */
  eventBefore(index: number): LiveEvent | null;
  made(): Int32Array | null;
}
