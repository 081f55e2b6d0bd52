"use strict";
const FILTERS = ["precision", "family", "optimizer", "checkpointing"];
const ALL = "all";
const PRECISION_ORDER = ["amp", "amp-nocache", "bf16"];
const COLOURS = ["#3958d1", "#ec6f00", "#0d8a5a", "#a03fb0", "#c43c3c", "#129684", "#8a6d00", "#5a5e65"];
const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "x"];
const HEIGHT = 520;

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
  return `${(100 * share).toFixed(1)} %`;
}

/** Families and checkpointing can be shown together; two precisions or optimizers in one chart could not be told apart. */
function fillFilters(changed) {
  for (const name of FILTERS) {
    const values = [...new Set(data.lines.map((line) => line[name]))];
    if (name === "precision") values.sort((a, b) => PRECISION_ORDER.indexOf(a) - PRECISION_ORDER.indexOf(b));
    const select = byId(name);
    for (const value of name === "family" ? [ALL, ...values] : values) select.append(new Option(value, value));
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
    text: line.batches.map((batch, i) => `${line.model}, batch ${batch}: ${percent(line.shares[i])}`),
    hoverinfo: "text",
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
  return [
    line.model,
    line.family,
    `${(line.parameters / 1e6).toFixed(1)} M`,
    line.break_even,
    percent(line.shares[0]),
    percent(line.shares[line.shares.length - 1]),
    String(line.batches[line.batches.length - 1]),
    String(line.largest),
    line.activations === null ? "" : line.activations.toFixed(2),
    line.copies === null ? "" : line.copies.toFixed(2),
  ];
}

const HEADS = [
  "model",
  "family",
  "parameters",
  "break-even",
  "saved at batch 1",
  "saved at the largest batch",
  "which is",
  "largest batch that fits in this precision",
  "activations, of FP32's",
  "weight copies, bytes per parameter",
];

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
  const chart = byId("chart");
  let lines = [];
  const draw = () => {
    lines = shown();
    byId("lines").replaceChildren(table(HEADS, lines.map(rowOf), 4));
    return window.Plotly.react(chart, lines.map(traceOf), layoutOf(lines, chart.clientWidth), data.config);
  };
  fillFilters(draw);
  await loadPlotly();
  await draw();
  chart.on("plotly_click", (event) => showPoint(lines[event.points[0].curveNumber], event.points[0].pointIndex));
  window.addEventListener("resize", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  document.documentElement.dataset.drawn = "";
}

start().catch((error) => {
  byId("trouble").hidden = false;
  byId("trouble").textContent = `This page could not be drawn: ${error.message}`;
});
