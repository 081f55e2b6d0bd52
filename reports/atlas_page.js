"use strict";
const FILTERS = ["precision", "optimizer", "checkpointing", "family", "size"];
const OPEN_FILTERS = ["family", "size"];
const ALL = "all";
const PRECISION_ORDER = ["amp", "amp-nocache", "bf16"];
const COLOURS = ["#3958d1", "#ec6f00", "#0d8a5a", "#a03fb0", "#c43c3c", "#129684", "#8a6d00", "#5a5e65"];
const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "x"];
const SIZE_ORDER = ["under 50 M", "50 to 200 M", "200 M to 1 B", "over 1 B"];
const HEIGHT = 560;
const ROW_HEIGHT = 17;

const byId = (id) => document.getElementById(id);
const data = JSON.parse(byId("page-data").textContent);
const models = [...new Set(data.lines.map((line) => line.model))];

function make(tag, text, className) {
  const element = document.createElement(tag);
  element.textContent = text ?? "";
  if (className) element.className = className;
  return element;
}

function table(heads, rows, numbersFrom) {
  const made = make("table");
  const classOf = (i) => (i >= numbersFrom ? "n" : "");
  const head = made.createTHead().insertRow();
  heads.forEach((text, i) => {
    const cell = make("th", text, classOf(i));
    cell.scope = "col";
    head.append(cell);
  });
  const body = made.createTBody();
  for (const row of rows) {
    const line = body.insertRow();
    row.forEach((text, i) => line.append(make("td", text, classOf(i))));
  }
  return made;
}

function percent(share) {
  const text = (100 * share).toFixed(1);
  return `${text === "-0.0" ? "0.0" : text} %`;
}

/** Families and sizes can be shown together; two precisions or optimizers in one chart could not be told apart. */
function fillFilters(changed) {
  for (const name of FILTERS) {
    const values = [...new Set(data.lines.map((line) => line[name]))];
    if (name === "precision") values.sort((a, b) => PRECISION_ORDER.indexOf(a) - PRECISION_ORDER.indexOf(b));
    if (name === "size") values.sort((a, b) => SIZE_ORDER.indexOf(a) - SIZE_ORDER.indexOf(b));
    const select = byId(name);
    for (const value of OPEN_FILTERS.includes(name) ? [ALL, ...values] : values) select.append(new Option(value, value));
    select.addEventListener("change", changed);
  }
}

function shown() {
  return data.lines.filter((line) => FILTERS.every((name) => [ALL, line[name]].includes(byId(name).value)));
}

function traceOf(line) {
  const place = models.indexOf(line.model);
  const colour = COLOURS[place % COLOURS.length];
  return {
    type: "scatter",
    mode: "lines+markers",
    name: line.model,
    x: line.batches,
    y: line.shares.map((share) => 100 * share),
    line: { color: colour, width: 2 },
    marker: { color: colour, size: 8, symbol: SYMBOLS[Math.floor(place / COLOURS.length) % SYMBOLS.length] },
    error_y: { ...interval(line, line.batches.map((_, i) => i)), color: colour },
    text: line.batches.map((_, i) => spoken(line, i)),
    hoverinfo: "text",
  };
}

function spoken(line, i) {
  const certain = line.least[i] === line.most[i];
  const range = certain ? "" : ` (${percent(line.least[i])} to ${percent(line.most[i])} with cuDNN's workspaces)`;
  return `${line.model}, batch ${line.batches[i]}: ${percent(line.shares[i])}${range}`;
}

/** How far the workspaces of convolutions may move each of these points, in percent of the peak. */
function interval(line, places) {
  return intervals(places.map((i) => [line, i]));
}

function intervals(pairs) {
  return {
    type: "data",
    symmetric: false,
    array: pairs.map(([line, i]) => 100 * Math.max(line.most[i] - line.shares[i], 0)),
    arrayminus: pairs.map(([line, i]) => 100 * Math.max(line.shares[i] - line.least[i], 0)),
    thickness: 1,
    width: 0,
  };
}

/** The marks of the first chart: of each line the smallest batch, or the largest; sorted as the chart is. */
function endsOf(lines, name, symbol, placeOf) {
  const pairs = lines.map((line) => [line, placeOf(line)]);
  return {
    type: "scatter",
    mode: "markers",
    name,
    x: pairs.map(([line, i]) => 100 * line.shares[i]),
    y: lines.map((line) => line.model),
    customdata: pairs.map(([, i]) => i),
    error_x: { ...intervals(pairs), color: COLOURS[0] },
    marker: { color: COLOURS[0], size: 9, symbol, line: { color: COLOURS[0], width: 1.5 } },
    text: pairs.map(([line, i]) => spoken(line, i)),
    hoverinfo: "text",
  };
}

function endsSorted(lines) {
  const last = (line) => line.shares[line.shares.length - 1];
  return [...lines].sort((a, b) => last(a) - last(b));
}

function endsTraces(lines, grid) {
  const between = {
    type: "scatter",
    mode: "lines",
    x: lines.flatMap((line) => [100 * line.shares[0], 100 * line.shares[line.shares.length - 1], null]),
    y: lines.flatMap((line) => [line.model, line.model, null]),
    line: { color: grid, width: 4 },
    hoverinfo: "skip",
    showlegend: false,
  };
  return [
    between,
    endsOf(lines, "batch size 1", "circle-open", () => 0),
    endsOf(lines, "largest batch size that fits in FP32", "circle", (line) => line.shares.length - 1),
  ];
}

function endsLayout(lines, width) {
  const { xaxis, yaxis, ...rest } = layoutOf(lines, width);
  const half = { type: "line", x0: 50, x1: 50, yref: "paper", y0: 0, y1: 1, line: { color: yaxis.zerolinecolor, width: 1.5, dash: "dot" } };
  return {
    ...rest,
    height: 110 + ROW_HEIGHT * lines.length,
    margin: { l: 190, r: 16, t: 36, b: 48 },
    legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom" },
    shapes: [half],
    xaxis: { ...yaxis, title: { text: "saved share of FP32's peak, % (the dotted line: half)" } },
    yaxis: { gridcolor: xaxis.gridcolor, fixedrange: true, type: "category", dtick: 1, range: [-0.7, lines.length - 0.3] },
  };
}

function layoutOf(lines, width) {
  const style = getComputedStyle(document.documentElement);
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const [ink, grid] = dark ? ["#eef2f8", "#2b3441"] : ["#17202e", "#e3e7ee"];
  const batches = [...new Set(lines.flatMap((line) => line.batches))].sort((a, b) => a - b);
  const axis = { gridcolor: grid, zerolinecolor: ink, zerolinewidth: 1.5, fixedrange: true };
  return {
    width,
    height: HEIGHT,
    margin: { l: 64, r: 16, t: 10, b: 48 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: style.fontFamily || "sans-serif", size: 12, color: ink },
    hovermode: "closest",
    dragmode: false,
    xaxis: { ...axis, type: "log", title: { text: "batch size" }, tickvals: batches, ticktext: batches.map(String) },
    yaxis: { ...axis, title: { text: "saved share of FP32's peak, %" } },
  };
}

function showPoint(line, i) {
  const point = line.points[i];
  byId("point").hidden = false;
  const settings = `${line.optimizer}, ${line.checkpointing}, batch ${line.batches[i]} (${line.sample} each)`;
  byId("point-title").textContent = `${line.model}, ${settings}: ${line.precision} saves ${percent(line.shares[i])}`;
  const rows = [...point.rows, point.total, point.phase];
  byId("breakdown").replaceChildren(table(["at the peak", "fp32", line.precision], rows, 1));
  byId("command").textContent = point.command;
}

function rowOf(line) {
  const last = line.shares.length - 1;
  return [
    line.model + (line.published ? " *" : ""),
    line.family,
    line.phases[0] === line.phases[1] ? line.phases[0] : line.phases.join(", "),
    line.break_even,
    `${(line.parameters / 1e6).toFixed(1)} M`,
    percent(line.shares[0]),
    percent(line.shares[last]),
    String(line.batches[last]),
    line.largest === null ? "" : String(line.largest),
    line.activations === null ? "" : line.activations.toFixed(2),
    line.copies === null ? "" : line.copies.toFixed(2),
    line.compiled,
    line.in_fp32 ?? "",
  ];
}

const HEADS = [
  "model",
  "family",
  "peak in (FP32, this precision)",
  "batch sizes at which it saves",
  "parameters",
  "saved at batch 1",
  "saved at the largest batch",
  "which is",
  "largest batch that fits in this precision",
  "activations, of FP32's",
  "weight copies, bytes per parameter",
  "compiled: change of the peak at batch 1, at the largest batch that fits in FP32",
  "activations that are FP32 (share of all)",
];

const TABLES = {
  rules: [
    ["optimizer", "precision", "rule", "peak at batch 1", "peak at the largest batch", "under 10 % above the rule at batch 1"],
    2,
  ],
  published: [["model", "run", "GPU", "precision", "what", "published", "predicted", "error"], 5],
  compiled: [
    [
      "model",
      "AMP, batch 1",
      "compiled",
      "change",
      "largest batch",
      "AMP",
      "compiled",
      "change",
      "AMP saves, of FP32's peak",
      "both compiled",
      "not compiled because",
    ],
    1,
  ],
  emulated: [["model", "precision", "batch", "simulated", "CUDA build", "difference", "why"], 7],
  findings: [["finding", "runs"], 1],
};

function fillTables() {
  for (const [name, [heads, numbersFrom]] of Object.entries(TABLES)) {
    const made = data[name].length ? table(heads, data[name], numbersFrom) : make("p", "none yet");
    byId(name).replaceChildren(made);
  }
}

async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

async function loadPlotly() {
  const packed = byId("plotly-packed");
  const script = document.createElement("script");
  script.textContent = await unpacked(packed.textContent.trim());
  document.head.append(script);
  packed.remove();
}

async function start() {
  const [chart, ends] = [byId("chart"), byId("ends")];
  let [lines, sorted] = [[], []];
  const draw = async () => {
    lines = shown();
    sorted = endsSorted(lines);
    byId("lines").replaceChildren(table(HEADS, lines.map(rowOf), 4));
    const layout = endsLayout(sorted, ends.clientWidth);
    await window.Plotly.react(ends, endsTraces(sorted, layout.yaxis.gridcolor), layout, data.config);
    await window.Plotly.react(chart, lines.map(traceOf), layoutOf(lines, chart.clientWidth), data.config);
  };
  fillFilters(draw);
  fillTables();
  await loadPlotly();
  await draw();
  chart.on("plotly_click", (event) => showPoint(lines[event.points[0].curveNumber], event.points[0].pointIndex));
  ends.on("plotly_click", (event) => showPoint(sorted[event.points[0].pointIndex], event.points[0].customdata));
  window.addEventListener("resize", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  document.documentElement.dataset.drawn = "";
}

start().catch((error) => {
  byId("trouble").hidden = false;
  byId("trouble").textContent = `This page could not be drawn: ${error.message}`;
});
