/** What the pages are drawn from: the JSON that commands print, by its schemas, and the views in Python. Made by tests/support/page_types.py. */

export interface RunWords {
  summary: Summary;
  said: Said;
}

export interface Summary {
  schema: "ampmem.summary/1";
  ampmem: string;
  torch: string;
  source: "cuda" | "cpu" | "simulated" | "snapshot";
  device: DeviceSummary;
  rank: number;
  world_size: number;
  local_rank: number | null;
  mesh: Array<MeshAxis>;
  stages: Array<number>;
  arm: PrecisionSummary;
  parameters: Parameters;
  optimizer: Array<Optimizer>;
  steps: Array<Step>;
  out_of_memory: FailedRequest | null;
  plain_step_ns: Array<number>;
  peak: RunPeak;
  outside_steps: OutsidePeak | null;
  whole_peak: WholePeak;
  most: Record<"parameters" | "untrained" | "gradients" | "optimizer_state" | "master_copies" | "cast_copies" | "activations" | "buffers" | "inputs" | "temporaries" | "workspace" | "communication" | "kept_predictions" | "other", number>;
  allocator: Allocator;
  caching_allocator: AllocatorRecord | null;
  prediction: Prediction | null;
  conservation: Conservation;
  inferred: Record<"parameters" | "untrained" | "gradients" | "optimizer_state" | "master_copies" | "cast_copies" | "activations" | "buffers" | "inputs" | "temporaries" | "workspace" | "communication" | "kept_predictions" | "other", number>;
  static_recipe: StaticRecipe | null;
  static_model: Array<StaticComponent>;
  static_problem: string | null;
  activations: Array<ActivationGroup>;
  casts: Casts;
  modules: Array<ModuleMemory>;
  top: Array<LargeAllocation>;
  held: Array<Held>;
  holders: Array<Held>;
  findings: Array<Finding>;
  warnings: Array<string>;
  notes: Array<string>;
}

export interface DeviceSummary {
  type: string;
  name: string;
}

export interface MeshAxis {
  name: string;
  size: number;
  coordinate: number;
}

export interface PrecisionSummary {
  name: "as-is" | "fp32" | "amp" | "amp-nocache" | "bf16";
  dtype: string | null;
  cache: boolean | null;
  scaler: boolean;
  forced: boolean;
  wrapped: boolean;
}

export interface Parameters {
  count: number;
  trainable: number;
  bytes: number;
  cast_eligible: number | null;
  global_count: number | null;
  global_bytes: number | null;
  untrained_count: number;
  untrained_bytes: number;
}

export interface Optimizer {
  class: string;
  implementation: "foreach" | "fused" | "for-loop";
}

export interface Step {
  index: number;
  finished: boolean;
  skipped_update: boolean;
  loss: number | null;
  loss_not_finite: "nan" | "inf" | "-inf" | null;
  backwards: number;
  loss_scale: number | null;
  batch_size: number | null;
  batch_loaded: boolean;
  autocast_in_backward: boolean;
  duration_ns: number;
  marks: Marks;
  peak: Peak;
  peak_reserved: number | null;
}

export interface Marks {
  after_forward: Record<"parameters" | "untrained" | "gradients" | "optimizer_state" | "master_copies" | "cast_copies" | "activations" | "buffers" | "inputs" | "temporaries" | "workspace" | "communication" | "kept_predictions" | "other", number> | null;
  after_backward: Record<"parameters" | "untrained" | "gradients" | "optimizer_state" | "master_copies" | "cast_copies" | "activations" | "buffers" | "inputs" | "temporaries" | "workspace" | "communication" | "kept_predictions" | "other", number> | null;
  after_optimizer: Record<"parameters" | "untrained" | "gradients" | "optimizer_state" | "master_copies" | "cast_copies" | "activations" | "buffers" | "inputs" | "temporaries" | "workspace" | "communication" | "kept_predictions" | "other", number> | null;
}

export interface Peak {
  bytes: number;
  phase: "setup" | "data" | "forward" | "backward" | "optimizer" | "between" | "evaluation";
  categories: Record<"parameters" | "untrained" | "gradients" | "optimizer_state" | "master_copies" | "cast_copies" | "activations" | "buffers" | "inputs" | "temporaries" | "workspace" | "communication" | "kept_predictions" | "other", number>;
  temporaries_by_phase: Record<"setup" | "data" | "forward" | "backward" | "optimizer" | "between" | "evaluation", number>;
  communication_by_part: Record<"reduce_buckets" | "all_gather" | "reduce_scatter" | "unsharded_parameters" | "unsharded_gradients" | "receive_buffers" | "broadcast" | "all_reduce" | "all_to_all", number>;
  op: string | null;
  module: string | null;
  allocated: number | null;
}

export interface FailedRequest {
  step: number | null;
  phase: "setup" | "data" | "forward" | "backward" | "optimizer" | "between" | "evaluation";
  ended_the_run: boolean;
  failures: number;
  asked: number;
  segment: number;
  lacking: number;
  device: number;
  recorded: boolean;
  device_total: number | null;
  device_free: number;
  allowed: number | null;
  op: string | null;
  module: string | null;
  stack: Array<string>;
  alive: Record<"parameters" | "untrained" | "gradients" | "optimizer_state" | "master_copies" | "cast_copies" | "activations" | "buffers" | "inputs" | "temporaries" | "workspace" | "communication" | "kept_predictions" | "other", number>;
  temporaries_by_phase: Record<"setup" | "data" | "forward" | "backward" | "optimizer" | "between" | "evaluation", number>;
  to_come: ToCome | null;
  largest: Array<LargeAllocation>;
  reserved: number;
  cached: number;
  outside: number | null;
  largest_free: LargestFree;
  reason: "oversize" | "wrong stream" | "wrong pool" | "limited" | "fragmented" | "exhausted";
  explanation: string;
  changes: Array<string>;
  levers: Array<Lever>;
  next_commands: Array<string>;
  residual_bytes: number;
  later: boolean;
  parameters_there: number | null;
}

export interface ToCome {
  gradients: number;
  parameters: number;
  optimizer_state: number | null;
  optimizers: Array<string>;
}

export interface LargeAllocation {
  bytes: number;
  category: "parameters" | "untrained" | "gradients" | "optimizer_state" | "master_copies" | "cast_copies" | "activations" | "buffers" | "inputs" | "temporaries" | "workspace" | "communication" | "kept_predictions" | "other";
  name: string | null;
  module: string | null;
  op: string | null;
  stack: Array<string>;
  dtype: string | null;
  shape: Array<number> | null;
}

export interface LargestFree {
  usable: number;
  other_streams: number;
  other_pools: number;
}

export interface Lever {
  change: string;
  option: string;
  bytes: number;
}

export interface RunPeak {
  bytes: number;
  phase: "setup" | "data" | "forward" | "backward" | "optimizer" | "between" | "evaluation";
  categories: Record<"parameters" | "untrained" | "gradients" | "optimizer_state" | "master_copies" | "cast_copies" | "activations" | "buffers" | "inputs" | "temporaries" | "workspace" | "communication" | "kept_predictions" | "other", number>;
  temporaries_by_phase: Record<"setup" | "data" | "forward" | "backward" | "optimizer" | "between" | "evaluation", number>;
  communication_by_part: Record<"reduce_buckets" | "all_gather" | "reduce_scatter" | "unsharded_parameters" | "unsharded_gradients" | "receive_buffers" | "broadcast" | "all_reduce" | "all_to_all", number>;
  op: string | null;
  module: string | null;
  allocated: number | null;
  step: number;
}

export interface OutsidePeak {
  bytes: number;
  phase: "setup" | "data" | "forward" | "backward" | "optimizer" | "between" | "evaluation";
  categories: Record<"parameters" | "untrained" | "gradients" | "optimizer_state" | "master_copies" | "cast_copies" | "activations" | "buffers" | "inputs" | "temporaries" | "workspace" | "communication" | "kept_predictions" | "other", number>;
  temporaries_by_phase: Record<"setup" | "data" | "forward" | "backward" | "optimizer" | "between" | "evaluation", number>;
  communication_by_part: Record<"reduce_buckets" | "all_gather" | "reduce_scatter" | "unsharded_parameters" | "unsharded_gradients" | "receive_buffers" | "broadcast" | "all_reduce" | "all_to_all", number>;
  op: string | null;
  module: string | null;
  allocated: number | null;
  after: boolean;
}

export interface WholePeak {
  bytes: number;
  at_most: number;
  requested: number;
  where: "step" | "before-steps" | "after-steps" | "not-recorded";
  step: number | null;
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

export interface AllocatorRecord {
  variable: string;
  settings: string;
  expandable_segments: boolean;
  streams: number;
  private_pools: number;
  device: number;
  peaks: Array<number>;
}

export interface Prediction {
  gpu_bytes: number;
  fit: "fits" | "may-not-fit" | "does-not-fit" | "not-known";
  margin: number | null;
  at_peak_allocated: Terms;
  at_peak_reserved: Terms;
  highest: HighestPeaks | null;
  not_modelled: Array<string>;
  stopped: string;
  allowed: number | null;
}

export interface Terms {
  tensors: number;
  workspaces: Record<string, number>;
  scratch: Record<string, number>;
  rounding: number;
  allocated: number;
  cached: number;
  reserved: number;
  outside: number;
  libraries: Record<string, number>;
  total: number;
}

export interface HighestPeaks {
  allocated: number;
  reserved: number;
  total: number;
  bounds: Record<string, number>;
  outside: number;
  least_reserved: number | null;
  likely_reserved: number | null;
  unfilled_allocated: number | null;
  unfilled_reserved: number | null;
}

export interface Conservation {
  events: number;
  residual_bytes: number | null;
  reserved_residual_bytes: number | null;
  other_threads_bytes: number;
}

export interface StaticRecipe {
  precision: string;
  title: string;
  optimizer: Array<string>;
  bytes_per_param: number;
  peak_bytes_per_param: number;
}

export interface StaticComponent {
  mark: "after_forward" | "after_backward" | "after_optimizer";
  component: string;
  model_bytes_per_param: number;
  model_bytes: number;
  measured_bytes: number;
  measured_bytes_per_param: number;
  residual_bytes: number;
  terms: Array<Term>;
  explained: boolean;
  holds: boolean;
}

export interface Term {
  why: string;
  bytes: number;
  tensors: number;
  names: Array<string>;
}

export interface ActivationGroup {
  kind: string;
  dtype: string | null;
  tensors: number;
  bytes: number;
  parts: Array<ActivationPart>;
}

export interface ActivationPart {
  saved_for: string | null;
  made_by: string | null;
  module: string | null;
  tensors: number;
  bytes: number;
}

export interface Casts {
  copies: number;
  bytes: number;
  peak_bytes: number;
  cache_hits: number | null;
  by_parameter: Array<ParameterCasts>;
  steps: Array<StepCasts>;
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

export interface ModuleMemory {
  name: string;
  parameters: number;
  activations: number;
  cast_copies: number;
  gradients: number;
}

export interface Held {
  holder: string | null;
  bytes: number;
  tensors: number;
  category: "parameters" | "untrained" | "gradients" | "optimizer_state" | "master_copies" | "cast_copies" | "activations" | "buffers" | "inputs" | "temporaries" | "workspace" | "communication" | "kept_predictions" | "other";
  place: string;
}

export interface Finding {
  code: string;
  severity: "info" | "advice" | "warning";
  message: string;
  bytes: number | null;
  change: string;
  evidence: Array<string>;
  off_peak: number | null;
  off_failure: number | null;
  off_reserved: number | null;
  proof: string;
}

export interface Said {
  facts: Array<string>;
  notes: Array<string>;
  warnings: Array<string>;
  headlines: Array<Headline>;
  findings: Array<FindingView>;
  parameters: number;
  peak: string;
  steps: Array<StepWords>;
  out_of_memory: ShortageWords | null;
  static_model: StaticWords | null;
  activations: ActivationsView | null;
  copies: Array<ParameterCasts>;
  copies_left_out: number;
}

export interface Headline {
  label: string;
  value: string;
  detail: string;
  bytes: number | null;
}

export interface FindingView {
  code: string;
  meaning: Array<string>;
  severity: string;
  message: string;
  change: string;
  evidence: Array<string>;
  saves: string;
  jump: string;
}

export interface StepWords {
  peak: string;
  loss: string;
  loss_scale: string;
  update: string;
  took: string;
}

export interface ShortageWords {
  headline: string;
  available: number | null;
  used: number;
  block: string;
  largest: Array<LargeTensorRow>;
  commands: Array<string>;
  hint: string;
  facts: Array<[string, string]>;
  frames: Array<string>;
  remedies: Array<RemedyView>;
}

export interface LargeTensorRow {
  bytes: number;
  count: string;
  kind: string;
  category: string;
  name: string;
}

export interface RemedyView {
  change: string;
  why: string;
  bytes: number | null;
  evidence: Array<string>;
  code: string;
  meaning: Array<string>;
  jump: string;
}

export interface StaticWords {
  head: string;
  verdict: string;
}

export interface ActivationsView {
  when: string;
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

export interface PageView {
  ampmem: string;
  config: Record<string, boolean | string>;
  title: string;
  categories: Array<CategoryView>;
  precision_copies: Array<string>;
  autocast_precisions: Array<string>;
  marks: Record<string, string>;
  layers: Array<CategoryView>;
  runs: Array<RunView>;
  opens: number;
  comparison: ComparedRuns | null;
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
  precision: string;
  title: string;
  packed: string;
  events: RunEvents | null;
}

export interface RunEvents {
  timed: boolean;
  steps: Array<StepPositions>;
  peak: number | null;
  instant: ShownAtView | null;
  failure: number | null;
  activations: number;
  phase_runs: Array<[number, string]>;
  address_map: Array<SegmentView>;
  stream: StreamView;
}

export interface StepPositions {
  first: number;
  last: number;
  peak: number;
}

export interface ShownAtView {
  position: number;
  name: string;
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

export interface ComparedRuns {
  labels: Array<string>;
  steps: Array<Step | null>;
  baseline: number | null;
  waterfalls: Array<[number, string]>;
  figures: Array<Array<string>>;
  losses: Array<Array<string>>;
  loss_differences: Array<string>;
  remarks: Array<string>;
  failures: Array<string>;
  compiling: Array<[string, Array<Array<string>>]>;
}

export interface ChangesView {
  note: string;
  rows: Array<ChangeView>;
}

export interface ChangeView {
  largest: GroupChange;
  kind: string;
  what: string;
  module: string;
  name: string;
  tensors: string;
  changes: number;
  before: number;
  after: number;
}

export interface GroupChange {
  category: "parameters" | "untrained" | "gradients" | "optimizer_state" | "master_copies" | "cast_copies" | "activations" | "buffers" | "inputs" | "temporaries" | "workspace" | "communication" | "kept_predictions" | "other";
  module: string | null;
  name: string | null;
  op: string | null;
  source_line: string | null;
  stack: Array<string>;
  lines_of: "before" | "after";
  before: number;
  after: number;
  count_before: number;
  count_after: number;
  tensor_before: Tensor;
  tensor_after: Tensor;
}

export interface Tensor {
  dtype: string | null;
  shape: Array<number> | null;
}

export interface FitView {
  ampmem: string;
  config: Record<string, boolean | string>;
  title: string;
  fit: FitResult;
  facts: Array<[string, string]>;
  fitting: Array<string>;
  break_even: Array<string>;
  remarks: Array<string>;
  capacity: number | null;
  may: number | null;
  capacity_text: string;
  may_text: string;
  room: string;
  curves: Array<CurveView>;
  columns: Array<string>;
  table: Array<Array<string>>;
}

export interface FitResult {
  schema: "ampmem.fit/1";
  ampmem: string;
  script: string;
  steps: number;
  runs: number;
  vary: Vary;
  gpu: SimulatedGpu;
  arms: Array<PrecisionFit>;
  break_even: Array<BreakEven>;
  notes: Array<string>;
}

export interface Vary {
  argument: string;
  low: number;
  high: number | null;
  separator: string;
}

export interface SimulatedGpu {
  name: string;
  total_bytes: number;
  outside_bytes: number | null;
  outside_at_most_bytes: number | null;
  allowed_bytes: number | null;
}

export interface PrecisionFit {
  arm: "as-is" | "fp32" | "amp" | "amp-nocache" | "bf16";
  largest_fitting: number | null;
  smallest_not_fitting: number | null;
  largest_that_may_fit: number | null;
  points: Array<Point>;
}

export interface Point {
  value: number;
  fits: boolean;
  may_fit: boolean;
  allocated_bytes: number | null;
  reserved_bytes: number | null;
  device_used_bytes: number | null;
  highest_device_used_bytes: number | null;
  outside_at_most_bytes: number;
  allowed_bytes: number | null;
}

export interface BreakEven {
  arm: "as-is" | "fp32" | "amp" | "amp-nocache" | "bf16";
  against: "as-is" | "fp32" | "amp" | "amp-nocache" | "bf16";
  verdict: "crosses" | "always" | "never" | "reversed" | "unknown";
  costs_at: number | null;
  saves_at: number | null;
  differences: Array<PeakDifference>;
}

export interface PeakDifference {
  value: number;
  bytes: number;
}

export interface CurveView {
  label: string;
  light: string;
  dark: string;
  symbol: string;
  texts: Array<Array<string>>;
}

export interface WatchedView {
  ampmem: string;
  config: Record<string, boolean | string>;
  title: string;
  command: string;
  lines: Array<string>;
  curves: Array<WatchedLine>;
  categories: Array<CategoryView>;
  limit: number | null;
  limit_text: string;
  failed: number | null;
  shortage: Array<string>;
  held_columns: Array<string>;
  held: Array<Array<string>>;
  full_columns: Array<string>;
  full: Array<FullView>;
  commands: Array<string>;
  notes: Array<string>;
}

export interface WatchedLine {
  name: string;
  steps: Array<number>;
  bytes: Array<number>;
  texts: Array<string>;
}

export interface FullView {
  cells: Array<string>;
  page: string | null;
  first: number;
  last: number;
  categories: Record<string, number>;
}

export interface AdviceView {
  ampmem: string;
  config: Record<string, boolean | string>;
  title: string;
  facts: Array<[string, string]>;
  change: string;
  code: Array<string>;
  pages: Array<[string, string]>;
  axis: string;
  series: Array<AdviceSeries>;
  limit: number | null;
  limit_text: string;
  columns: Array<string>;
  table: Array<Array<string>>;
  refused: Array<string>;
  proven: Array<string>;
  computed: Array<string>;
  block_columns: Array<string>;
  blocks: Array<Array<string>>;
}

export interface AdviceSeries {
  name: string;
  joined: boolean;
  light: string;
  dark: string;
  symbol: string;
  points: Array<AdvicePoint>;
}

export interface AdvicePoint {
  cost: number;
  most: number;
  allocated: number;
  meets: boolean;
  unbeaten: boolean;
  text: Array<string>;
}
