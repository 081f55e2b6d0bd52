/** The sections of one run that are tables: peak, steps, rule of thumb, casts. */
import { fill, make, named, tableOf } from "../common/dom.js";
import { formatBytes, formatCount, formatPerParameter, formatShare, formatSigned, worded } from "../common/format.js";
import { compositionBars } from "../figures/bars.js";
import { showSection } from "./section.js";
/** @import { Row, Table } from "../common/dom.js" */
/** @import { Allocator, Casts, Holders, StaticComponent, Term } from "../common/page.js" */
/** @import { Composition, Marked, MarkRows, Run } from "../data/run.js" */
/** @import { CategoryOf } from "../figures/bars.js" */

const FEW = 10;
/** So many steps of the cast ledger are shown, the last ones. */
const LEDGER_STEPS = 50;

/**
 * `table` without the columns that are empty in each row.
 * @param {Table} table
 * @returns {Table}
 */
function withoutEmpty(table) {
  const isShown = (/** @type {unknown} */ _, /** @type {number} */ i) => table.rows.some((row) => row[i] !== "-");
  return { ...table, columns: table.columns.filter(isShown), rows: table.rows.map((row) => row.filter(isShown)) };
}

/**
 * `rows` as a table that first shows a few of them.
 * @param {Table} table
 */
export function longTable(table, left = 0) {
  const box = make("div", {});
  const more = make("button", { type: "button", class: "show-all" }, `Show all ${formatCount(table.rows.length)}`);
  const note = left
    ? make("p", { class: "quiet" }, `${formatCount(left)} smaller or earlier ones are left out of this page.`)
    : null;
  /** @param {Row[]} rows */
  const draw = (rows) => fill(box, tableOf({ ...table, rows }), rows.length < table.rows.length ? more : note);
  more.addEventListener("click", () => draw(table.rows));
  draw(table.rows.slice(0, FEW));
  return box;
}

/**
 * The temporaries of a composition by phase, in words; null where there are none.
 * @param {Composition} composition
 */
export function temporariesOf(composition) {
  const parts = Object.entries(composition.temporaries_by_phase).filter(([, bytes]) => bytes);
  if (!parts.length) return null;
  return make(
    "p",
    { class: "quiet" },
    `Temporaries by the phase they were made in: ${parts.map(([phase, bytes]) => `${phase} ${formatBytes(bytes)}`).join(", ")}.`,
  );
}

/**
 * The communication of a composition by what it is for, in words; null where there is none.
 * @param {Composition} composition
 */
function communicationOf(composition) {
  const parts = Object.entries(composition.communication_by_part).filter(([, bytes]) => bytes);
  if (!parts.length) return null;
  const words = parts.map(([part, bytes]) => `${part.replaceAll("_", " ")} ${formatBytes(bytes)}`);
  return make("p", { class: "quiet" }, `Communication by what it is for: ${words.join(", ")}.`);
}

/** @param {Allocator} allocator */
function allocatorOf(allocator) {
  /** @type {Array<[key: keyof Allocator, label: string]>} */
  const layers = [
    ["requested", "Requested by tensors"],
    ["rounding", "Rounding"],
    ["allocated", "Allocated"],
    ["cached", "Cached, not in use"],
    ["reserved", "Reserved"],
    ["outside", "Outside the allocator"],
  ];
  const known = layers.filter(([key]) => allocator[key] !== null && allocator[key] !== undefined);
  if (known.length < 2 || (!allocator.rounding && allocator.reserved === null)) return null;
  return tableOf({
    caption: "The allocator's layers at the peak",
    columns: [{ head: "Layer" }, { head: "Size", number: true }, { head: "Bytes", number: true }],
    rows: known.map(([key, label]) => [label, formatBytes(allocator[key]), formatCount(allocator[key])]),
  });
}

/**
 * @param {Marked} breakdown
 * @param {CategoryOf} categoryOf
 */
function breakdownTable(breakdown, categoryOf) {
  /** @param {{key: string}} row */
  const name = ({ key }) => (categoryOf(key) ? named(categoryOf(key)) : worded(key));
  /** @param {number|null} bytes */
  const cell = (bytes) => (bytes === null ? "-" : make("span", { title: `${formatCount(bytes)} bytes` }, formatBytes(bytes)));
  const rows = breakdown.rows.map((row) => [name(row), ...row.cells.map(cell)]);
  const table = withoutEmpty({
    caption: `Live bytes at the marks of step ${breakdown.step}`,
    columns: [{ head: "Category" }, ...breakdown.columns.map((head) => ({ head, number: true }))],
    rows,
    foot: breakdown.rows.at(-1)?.key === "total",
    stacked: true,
  });
  return tableOf(table);
}

/**
 * @param {Run} run
 * @param {CategoryOf} categoryOf
 */
export function showPeak(run, categoryOf) {
  const { composition, peak } = run;
  const { allocator, conservation } = run.summary;
  if (!composition || !peak) return showSection("peak");
  const residual = conservation.residual_bytes;
  const check =
    residual === null
      ? "the allocator gave no total to check against"
      : `residual against the allocator's own total: ${formatBytes(residual)}`;
  const held = conservation.other_threads_bytes;
  const elsewhere = held ? `; other threads, which are not recorded, held up to ${formatBytes(held)} at once (counted in other)` : "";
  return showSection(
    "peak",
    make(
      "p",
      { class: "quiet" },
      `Step ${peak.step}, ${peak.phase}${run.stream ? `, event ${formatCount(peak.position)}` : ""}: ${peak.said}${peak.rounded ? " allocated" : ""}, ${formatCount(composition.total)} bytes${peak.rounded ? " of it requested" : ""}. Each bar starts where the one above ends.`,
    ),
    compositionBars(composition, categoryOf),
    temporariesOf(composition),
    communicationOf(composition),
    allocatorOf(allocator),
    make("p", { class: "quiet" }, `${formatCount(conservation.events)} allocator events, ${check}${elsewhere}.`),
  );
}

/**
 * @param {Run} run
 * @param {CategoryOf} categoryOf
 * @param {(step: number) => void} toStep
 */
export function showSteps(run, categoryOf, toStep) {
  const rows = run.steps.map((step, i) => {
    const { words } = step;
    const go = make(
      "button",
      { type: "button", class: "link", "aria-label": `Zoom the timeline to step ${step.index}` },
      String(step.index),
    );
    go.addEventListener("click", () => toStep(i));
    return [
      run.stream ? go : String(step.index),
      step.said,
      step.phase,
      (step.peak_reserved ?? null) === null ? "-" : formatBytes(step.peak_reserved),
      ...[words.loss, words.loss_scale, words.update, words.took].map((word) => word || "-"),
    ];
  });
  const columns = [
    { head: "Step" },
    { head: "Peak", number: true },
    { head: "In" },
    { head: "Peak reserved", number: true },
    { head: "Loss", number: true },
    { head: "Loss scale", number: true },
    { head: "Update" },
    { head: "Took", number: true },
  ];
  showSection(
    "steps",
    rows.length ? longTable(withoutEmpty({ caption: "Every step", columns, rows, stacked: true })) : null,
    breakdownTable(run.breakdown, categoryOf),
  );
}

/**
 * Which tensors a term is about, and how much of what the rule says; empty where they have no names and are one.
 * @param {StaticComponent} row
 * @param {Term} term
 */
function ofTensors(row, term) {
  const more = term.tensors - term.names.length;
  if (!term.names.length) return more > 1 ? `${formatCount(more)} tensors` : "";
  const names = term.names.join(", ") + (more > 0 ? ` and ${formatCount(more)} more` : "");
  return row.model_bytes ? `${names}; ${formatShare(Math.abs(term.bytes), row.model_bytes)} of the rule's` : names;
}

/** @param {StaticComponent} row */
function verdictOf(row) {
  if (row.holds) return make("span", { class: "chip good" }, "✓ explained");
  return make("span", { class: "chip bad" }, row.explained ? "✗ not proven" : "✗ not explained");
}

/** @param {StaticComponent} row */
function whyOf(row) {
  // The total's terms are those of the rows above it again, but for roundings.
  const own = row.terms.filter((term) => row.component !== "total" || term.why.startsWith("rounding"));
  const terms = own.map((term) =>
    make(
      "li",
      {},
      `${formatSigned(term.bytes)} ${term.why}`,
      ofTensors(row, term) ? make("span", { class: "quiet" }, ` (${ofTensors(row, term)})`) : null,
    ),
  );
  if (!row.explained) {
    const size = row.residual_bytes ? formatSigned(row.residual_bytes) : "differences that cancel out:";
    terms.push(make("li", { class: "bad" }, `${size} not explained`));
  }
  if (row.component === "total") terms.unshift(make("li", {}, "the sum of the above"));
  return terms.length ? make("ul", { class: "why" }, ...terms) : "";
}

/**
 * What is equal for two marks at which the same was found.
 * @param {MarkRows} mark
 */
const contentOf = ({ rows }) => JSON.stringify(rows, (key, value) => (key === "mark" ? null : value));

/**
 * @param {MarkRows} mark
 * @param {number} parameters
 * @param {CategoryOf} categoryOf
 */
function markTable(mark, parameters, categoryOf) {
  const columns = [
    { head: "Component" },
    { head: "Rule of thumb", number: true },
    { head: "B/param", number: true },
    { head: "Measured", number: true },
    { head: "B/param", number: true },
    { head: "Why they differ", wide: true },
    { head: "Verdict" },
  ];
  const rows = mark.rows.map((row) => [
    categoryOf(row.component) ? named(categoryOf(row.component)) : worded(row.component),
    formatBytes(row.model_bytes),
    formatPerParameter(row.model_bytes, parameters),
    formatBytes(row.measured_bytes),
    formatPerParameter(row.measured_bytes, parameters),
    whyOf(row),
    verdictOf(row),
  ]);
  return tableOf({ caption: mark.name, columns, rows, foot: mark.rows.at(-1)?.component === "total", class: "model", stacked: true });
}

/**
 * @param {Run} run
 * @param {CategoryOf} categoryOf
 */
export function showStatic(run, categoryOf) {
  const words = run.said.static_model;
  if (!words) return showSection("static");
  const { static_model: components } = run.summary;
  const holds = components.length > 0 && components.every((row) => row.holds);
  const marks = run.static_model;
  return showSection(
    "static",
    make(
      "p",
      { class: "quiet" },
      `The rule of thumb for ${words.head}. Below is what it says of the model and the optimizer, beside what was recorded.`,
    ),
    make(
      "p",
      {},
      make(
        "strong",
        { class: holds ? "verdict" : "verdict bad" },
        words.verdict.charAt(0).toUpperCase() + words.verdict.slice(1),
      ),
    ),
    ...marks.map((mark, i) =>
      i && contentOf(mark) === contentOf(marks[i - 1])
        ? make("p", { class: "same" }, make("b", {}, worded(mark.name)), ": the same")
        : markTable(mark, run.said.parameters, categoryOf),
    ),
  );
}

/** @param {Casts} casts */
function castSteps(casts) {
  const columns = [
    { head: "Step" },
    { head: "Copies", number: true },
    { head: "Reused", number: true },
    { head: "Peak", number: true },
    { head: "Kept by autograd", number: true },
    { head: "by the cache", number: true },
    { head: "by both", number: true },
    { head: "Alive at step end", number: true },
  ];
  /**
   * @param {Holders|null} holders
   * @param {"autograd"|"cache"|"both"} who
   */
  const held = (holders, who) => {
    const count = holders?.[who];
    return count ? formatBytes(count.bytes) : "-";
  };
  const rows = casts.steps.slice(-LEDGER_STEPS).map((step) => {
    const phases = Object.values(step.phases);
    /** @param {"copies"|"cache_hits"} key */
    const sum = (key) => phases.reduce((all, phase) => all + (phase[key] ?? 0), 0);
    return [
      String(step.index),
      formatCount(sum("copies")),
      casts.cache_hits === null ? "-" : formatCount(sum("cache_hits")),
      formatBytes(step.peak_bytes),
      held(step.after_forward, "autograd"),
      held(step.after_forward, "cache"),
      held(step.after_forward, "both"),
      formatBytes(step.surviving.bytes),
    ];
  });
  return rows.length
    ? longTable(
        withoutEmpty({ caption: "Cast copies step by step; who keeps them at the end of forward", columns, rows, stacked: true }),
        Math.max(0, casts.steps.length - LEDGER_STEPS),
      )
    : null;
}

/**
 * How many uses the cache served, where that is known.
 *
 * @param {Casts} casts
 */
const reused = ({ cache_hits: hits }) =>
  hits === null ? "" : `, and ${hits ? formatCount(hits) : "no"} ${hits === 1 ? "use" : "uses"} found a copy in autocast's cache`;

/** @param {Run} run */
export function showCasts(run) {
  const { casts } = run.summary;
  if (!casts.copies) return showSection("casts");
  const columns = [
    { head: "Parameter", wide: true },
    { head: "Copies", number: true },
    { head: "Bytes", number: true },
    { head: "Reused", number: true },
  ];
  const rows = run.said.copies.map((each) => [
    each.name,
    formatCount(each.copies),
    formatBytes(each.bytes),
    each.cache_hits === null ? "-" : formatCount(each.cache_hits),
  ]);
  return showSection(
    "casts",
    make(
      "p",
      { class: "quiet" },
      `Autocast made ${formatCount(casts.copies)} copies of parameters, ${formatBytes(casts.bytes)} over the whole run; at most ${formatBytes(casts.peak_bytes)} lived at once${reused(casts)}.`,
    ),
    castSteps(casts),
    longTable({ caption: "By parameter, largest first", columns, rows }, run.said.copies_left_out),
  );
}
