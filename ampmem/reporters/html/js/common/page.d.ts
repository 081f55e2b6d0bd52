/** What the pages are drawn from. Made from the views in Python by tests/browser/page_types.py. */

export interface PageView {
  ampmem: string;
  config: Record<string, boolean | string>;
  categories: Array<CategoryView>;
  layers: Array<CategoryView>;
  runs: Array<RunView>;
  opens: number;
  comparison: ComparisonView | null;
  changes: ChangesView | null;
}

export interface CategoryView {
  key: string;
  label: string;
  light: string;
  dark: string;
  pattern: string;
}

export interface RunView {
  label: string;
  arm: string;
  title: string;
  facts: Array<string>;
  notes: Array<string>;
  warnings: Array<string>;
  headlines: Array<Headline>;
  out_of_memory: OutOfMemoryView | null;
  findings: Array<FindingView>;
  parameters: number;
  source: string;
  timed: boolean;
  steps: Array<StepView>;
  peak: PeakView | null;
  instant: ShownAtView | null;
  phase_runs: Array<[number, string]>;
  marks: Array<MarkView>;
  composition: CompositionView | null;
  breakdown: BreakdownView;
  static_model: StaticModelView | null;
  activations: ActivationsView | null;
  casts: CastsView | null;
  allocator: Allocator;
  conservation: Conservation;
  address_map: AddressMapView | null;
  stream: StreamView;
}

export interface Headline {
  label: string;
  value: string;
  detail: string;
  bytes: number | null;
}

export interface OutOfMemoryView {
  headline: string;
  position: number;
  later: boolean;
  available: number | null;
  used: number;
  segment: number;
  block: string;
  largest: Array<LargeTensorView>;
  commands: Array<string>;
  hint: string;
  facts: Array<FactView>;
  frames: Array<string>;
  remedies: Array<RemedyView>;
  alive: CompositionView;
}

export interface LargeTensorView {
  bytes: number;
  count: string;
  kind: string;
  category: string;
  name: string;
}

export interface FactView {
  label: string;
  text: string;
}

export interface RemedyView {
  change: string;
  why: string;
  bytes: number | null;
  evidence: Array<string>;
  code: string;
  jump: string;
}

export interface CompositionView {
  rows: Array<SizeRow>;
  temporaries_by_phase: Record<string, number>;
  communication_by_part: Record<string, number>;
  total: number;
}

export interface SizeRow {
  key: string;
  bytes: number;
}

export interface FindingView {
  code: string;
  severity: string;
  message: string;
  change: string;
  evidence: Array<string>;
  saves: string;
  jump: string;
}

export interface StepView {
  index: number;
  finished: boolean;
  first: number;
  last: number;
  peak: number;
  peak_bytes: number;
  said: string;
  rounded: boolean;
  peak_reserved: number | null;
  phase: string;
  loss: string;
  loss_scale: string;
  update: string;
  took: string;
}

export interface PeakView {
  position: number;
  bytes: number;
  said: string;
  rounded: boolean;
  step: number;
  phase: string;
}

export interface ShownAtView {
  position: number;
  name: string;
}

export interface MarkView {
  step: number;
  name: string;
  position: number;
}

export interface BreakdownView {
  step: number;
  columns: Array<string>;
  rows: Array<CellRow>;
}

export interface CellRow {
  key: string;
  cells: Array<number | null>;
}

export interface StaticModelView {
  head: string;
  verdict: string;
  holds: boolean;
  marks: Array<MarkComponents>;
}

export interface MarkComponents {
  name: string;
  rows: Array<ComponentView>;
}

export interface ComponentView {
  component: string;
  told: number;
  measured: number;
  terms: Array<Term>;
  residual: number;
  explained: boolean;
  holds: boolean;
}

export interface Term {
  why: string;
  bytes: number;
  tensors: number;
  names: Array<string>;
}

export interface ActivationsView {
  when: string;
  position: number;
  by: string;
  words: PrecisionWords;
  whole: PrecisionBar;
  kinds: Array<PrecisionBar>;
  modules: Array<PrecisionBar>;
  modules_rest: PrecisionBar | null;
  savings: Array<Saving>;
  savings_left_out: number;
}

export interface PrecisionWords {
  full: string;
  low: string;
  other: string;
}

export interface PrecisionBar {
  label: string;
  detail: string;
  full: number;
  low: number;
  other: number;
  ops: Array<[string | null, string | null]>;
  module: string | null;
}

export interface Saving {
  saved_for: string | null;
  made_by: string | null;
  dtype: string | null;
  tensors: number;
  bytes: number;
}

export interface CastsView {
  copies: number;
  bytes: number;
  peak_bytes: number;
  cache_hits: number | null;
  by_parameter: Array<ParameterCasts>;
  parameters_left_out: number;
  steps: Array<StepCasts>;
  steps_left_out: number;
}

export interface ParameterCasts {
  name: string;
  copies: number;
  bytes: number;
  cache_hits: number | null;
  held_by_cache: number | null;
  held_by_autograd: number | null;
  held_by_both: number | null;
}

export interface StepCasts {
  index: number;
  phases: Record<string, PhaseCasts>;
  after_forward: Holders | null;
  peak_bytes: number;
  recomputed: CopyCount;
  views: CopyCount | null;
  others: CopyCount;
  surviving: CopyCount;
}

export interface PhaseCasts {
  copies: number;
  bytes: number;
  cache_hits: number | null;
}

export interface Holders {
  cache: CopyCount | null;
  autograd: CopyCount | null;
  both: CopyCount | null;
  neither: CopyCount | null;
}

export interface CopyCount {
  copies: number;
  bytes: number;
}

export interface Allocator {
  requested: number;
  rounding: number;
  allocated: number;
  cached: number | null;
  reserved: number | null;
  outside: number | null;
  outside_process: number | null;
}

export interface Conservation {
  events: number;
  residual_bytes: number | null;
  reserved_residual_bytes: number | null;
  other_threads_bytes: number;
}

export interface AddressMapView {
  segments: Array<SegmentView>;
}

export interface SegmentView {
  address: number;
  bytes: number;
  blocks: Array<[number, number, string]>;
}

export interface StreamView {
  mode: string;
  events: number;
  note: string;
  addresses: boolean;
  packed: string;
}

export interface ComparisonView {
  baseline: string | null;
  labels: Array<string>;
  steps: Array<number | null>;
  instants: Array<InstantView>;
  waterfall: Array<WaterfallView>;
  peak_difference: Array<number | null>;
  peak_reserved: Array<number | null>;
  step_time: Array<StepTimeView | null>;
  losses: Array<LossView>;
  loss_difference: Array<number | null>;
  loss_difference_texts: Array<string>;
  activation_ratio: Array<number | null>;
  activation_ratio_texts: Array<string>;
  remarks: Array<string>;
  failures: Array<FailureView>;
}

export interface InstantView {
  name: string;
  rows: Array<CellRow>;
  totals: Array<number | null>;
}

export interface WaterfallView {
  from: string;
  to: string;
  instant: string;
  start: number;
  end: number;
  terms: Array<SizeRow>;
}

export interface StepTimeView {
  median_ns: number;
  min_ns: number;
  max_ns: number;
  text: string;
  ratio_text: string;
}

export interface LossView {
  step: number;
  values: Array<number | null>;
  texts: Array<string>;
}

export interface FailureView {
  label: string;
  failure: string;
}

export interface ChangesView {
  note: string;
  rows: Array<ChangeView>;
}

export interface ChangeView {
  kind: string;
  category: string;
  what: string;
  module: string;
  name: string;
  op: string;
  source_line: string;
  line_before: boolean;
  stack: Array<string>;
  tensors: string;
  changes: number;
  before: number;
  after: number;
  grown: number;
}

export interface FitView {
  ampmem: string;
  config: Record<string, boolean | string>;
  title: string;
  argument: string;
  facts: Array<[string, string]>;
  fitting: Array<string>;
  break_even: Array<string>;
  remarks: Array<string>;
  capacity: number | null;
  may: number | null;
  capacity_text: string;
  may_text: string;
  room: string;
  columns: Array<string>;
  curves: Array<CurveView>;
  crossings: Array<CrossingView>;
  table: Array<Array<string>>;
}

export interface CurveView {
  arm: string;
  label: string;
  light: string;
  dark: string;
  symbol: string;
  values: Array<number>;
  reserved: Array<number>;
  allocated: Array<number>;
  texts: Array<Array<string>>;
  surely: Array<boolean>;
  failing: Array<number>;
}

export interface CrossingView {
  arm: string;
  costs_at: number;
  saves_at: number;
}
