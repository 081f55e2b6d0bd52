"use strict";
{
const FILTERS = ["precision", "optimizer", "checkpointing", "family", "size"];
const OPEN_FILTERS = ["family", "size"];
const ALL = "all";
const PRECISION_ORDER = ["amp", "amp-nocache", "bf16"];
let colour = "";
/** A family with fewer models has no picture of its own. */
const LEAST = 3;
const PANEL_HEIGHT = 300;
/** On a narrower page there is less room for words. */
const NARROW = 500;
/** Above and below a picture, and for the names beside it, in pixels. */
const PANEL_FREE = 84;
const NAMES_WIDTH = 165;
const LEFT = 34;
const NAME_HEIGHT = 13;
const SIZE_ORDER = ["under 50 M", "50 to 200 M", "200 M to 1 B", "over 1 B"];
const ROW_HEIGHT = 17;

const byId = (id) => document.getElementById(id);
const data = JSON.parse(byId("page-data").textContent);

function make(tag, text, className) {
  const element = document.createElement(tag);
  element.textContent = text ?? "";
  if (className) element.className = className;
  return element;
}

/** A table without its empty columns. */
function table(heads, rows, numbersFrom) {
  const made = make("table", "", "stacked");
  const places = heads.map((_, i) => i).filter((i) => rows.some((row) => row[i] !== ""));
  const classOf = (i) => (i >= numbersFrom ? "n" : "");
  const head = made.createTHead().insertRow();
  for (const i of places) {
    const cell = make("th", heads[i], classOf(i));
    cell.scope = "col";
    head.append(cell);
  }
  const body = made.createTBody();
  for (const row of rows) {
    const line = body.insertRow();
    for (const i of places) {
      const cell = make(i ? "td" : "th", row[i], classOf(i));
      if (i) cell.dataset.head = heads[i];
      else cell.scope = "row";
      line.append(cell);
    }
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

/** The families with a picture of their own, the largest first; the small ones together. */
function panelsOf(lines) {
  const families = Map.groupBy(data.lines, (line) => line.family);
  const models = (family) => new Set(families.get(family).map((line) => line.model)).size;
  const large = [...families.keys()].filter((family) => models(family) >= LEAST).sort((a, b) => models(b) - models(a));
  const panels = large.map((family) => ({ name: family, own: lines.filter((line) => line.family === family) }));
  panels.push({ name: large.length ? "others" : "all", own: lines.filter((line) => !large.includes(line.family)) });
  return panels.filter(({ own }) => own.length);
}

function traceOf(line, panel) {
  return {
    type: "scatter",
    mode: "lines+markers",
    name: line.model,
    ...axesOf(panel),
    x: line.batches,
    y: line.shares.map((share) => 100 * share),
    line: { color: colour, width: 1.5 },
    marker: { color: colour, size: 6 },
    error_y: { ...interval(line, line.batches.map((_, i) => i)), color: colour },
    text: line.batches.map((_, i) => spoken(line, i)),
    hoverinfo: "text",
    customdata: line.batches.map((_, i) => [data.lines.indexOf(line), i]),
  };
}

/** All other models, behind those of a picture. */
function behind(lines, own, panel, grid) {
  const others = lines.filter((line) => !own.includes(line));
  const joined = (each) => others.flatMap((line) => [...each(line), null]);
  return {
    type: "scatter",
    mode: "lines",
    ...axesOf(panel),
    x: joined((line) => line.batches),
    y: joined((line) => line.shares.map((share) => 100 * share)),
    line: { color: grid, width: 1 },
    hoverinfo: "skip",
  };
}

/** What plotly calls the axes of a picture: the first ones have no number. */
const numberOf = (panel) => (panel ? panel + 1 : "");
const axesOf = (panel) => ({ xaxis: `x${numberOf(panel)}`, yaxis: `y${numberOf(panel)}` });

/** The names of the models beside a picture, in the order of the ends of their lines. */
function namesOf(own, panel, { across, upwards, most }, ink, dim) {
  const last = (line) => 100 * line.shares[line.shares.length - 1];
  const { xaxis: xref, yaxis: yref } = axesOf(panel);
  let free = -Infinity;
  return [...own]
    .sort((a, b) => last(b) - last(a))
    .map((line) => {
      const at = -last(line) * upwards;
      free = Math.max(at, free + NAME_HEIGHT);
      const x = Math.log10(line.batches.at(-1));
      const leader = { ax: (most - x) * across + 8, ay: free - at, arrowhead: 0, arrowwidth: 0.8, arrowcolor: dim, standoff: 4 };
      const font = { size: 10.5, color: ink };
      return { xref, yref, x, y: last(line), xanchor: "left", yanchor: "middle", ...leader, text: line.model, font };
    });
}

function familiesFigure(lines, width, theme) {
  const panels = panelsOf(lines);
  const { ink, grid, dim, xaxis, yaxis, ...rest } = layoutOf(lines, width, theme);
  const columns = Math.min(panels.length, width < 700 ? 1 : width < 1100 ? 2 : 3);
  const rows = Math.ceil(panels.length / columns);
  const shares = lines.flatMap((line) => line.shares.map((share) => 100 * share));
  const range = [Math.min(0, ...shares) - 4, Math.max(0, ...shares) + 4];
  const plot = (width - LEFT) / columns - NAMES_WIDTH;
  const inner = PANEL_HEIGHT - PANEL_FREE;
  const batches = lines.flatMap((line) => line.batches);
  const [least, most] = [Math.min(...batches), Math.max(...batches)].map(Math.log10);
  const layout = { ...rest, height: rows * PANEL_HEIGHT, margin: { l: LEFT, r: 0, t: 0, b: 0 }, showlegend: false, annotations: [] };
  const scale = { across: plot / (most - least + 0.1), upwards: inner / (range[1] - range[0]), most: most + 0.05 };
  panels.forEach(({ name, own }, i) => {
    const [column, row] = [i % columns, Math.floor(i / columns)];
    const top = 1 - (row + 30 / PANEL_HEIGHT) / rows;
    const left = column / columns;
    const right = left + plot / (width - LEFT);
    const { xaxis: x, yaxis: y } = axesOf(i);
    layout[`xaxis${numberOf(i)}`] = {
      ...xaxis,
      title: { text: i + columns >= panels.length ? "batch size" : "" },
      domain: [left, right],
      anchor: y,
      range: [least - 0.05, most + 0.05],
    };
    layout[`yaxis${numberOf(i)}`] = { ...yaxis, title: { text: "" }, domain: [top - inner / PANEL_HEIGHT / rows, top], anchor: x, range };
    const title = { xref: "paper", yref: "paper", x: left, y: top, yshift: 14, xanchor: "left", showarrow: false };
    layout.annotations.push({ ...title, text: `<b>${name}</b>`, font: { size: 13, color: ink } });
    layout.annotations.push(...namesOf(own, i, scale, ink, dim));
  });
  const traces = panels.flatMap(({ own }, i) => [behind(lines, own, i, dim), ...own.map((line) => traceOf(line, i))]);
  return { traces, layout };
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
    error_x: { ...intervals(pairs), color: colour },
    marker: { color: colour, size: 9, symbol, line: { color: colour, width: 1.5 } },
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

function endsLayout(lines, width, theme) {
  const { xaxis, yaxis, grid, dim, ink, ...rest } = layoutOf(lines, width, theme);
  const title = width < NARROW ? "saved, %" : "saved share of FP32's peak, % (the dotted line: half)";
  const half = { type: "line", x0: 50, x1: 50, yref: "paper", y0: 0, y1: 1, line: { color: yaxis.zerolinecolor, width: 1.5, dash: "dot" } };
  return {
    ...rest,
    height: 110 + ROW_HEIGHT * lines.length,
    margin: { l: width < NARROW ? 158 : 190, r: 16, t: 36, b: 48 },
    legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom" },
    shapes: [half],
    xaxis: { ...yaxis, title: { text: title } },
    yaxis: { gridcolor: xaxis.gridcolor, fixedrange: true, type: "category", dtick: 1, range: [-0.7, lines.length - 0.3] },
  };
}

function layoutOf(lines, width, theme) {
  const dark = theme === "dark";
  const [ink, grid, dim] = dark ? ["#eef2f8", "#2b3441", "#465264"] : ["#17202e", "#e3e7ee", "#c3cad6"];
  const batches = [...new Set(lines.flatMap((line) => line.batches))].sort((a, b) => a - b);
  const ticks = batches.filter((_, i) => i % (width < NARROW ? 8 : 4) === 0);
  const axis = { gridcolor: grid, zerolinecolor: ink, zerolinewidth: 1.5, fixedrange: true, tickangle: 0 };
  return {
    ink,
    grid,
    dim,
    width,
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "inherit", size: 12, color: ink },
    hovermode: "closest",
    dragmode: false,
    xaxis: { ...axis, type: "log", title: { text: "batch size" }, tickvals: ticks, ticktext: ticks.map(String) },
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
    `${line.parameters < 1e9 ? (line.parameters / 1e6).toFixed(1) : Math.round(line.parameters / 1e6).toLocaleString("en")} M`,
    percent(line.shares[0]),
    percent(line.shares[last]),
    String(line.batches[last]),
    line.largest === null ? "" : String(line.largest),
    line.activations === null ? "" : line.activations.toFixed(2),
    line.copies === null ? "" : line.copies.toFixed(2),
    line.compiled,
    (line.in_fp32 ?? "").replaceAll(" %", "\u00a0%"),
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
  "that batch",
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

let [shownLines, sorted] = [[], []];

async function draw(theme, width) {
  colour = theme === "dark" ? "#7f9bff" : "#3958d1";
  const [chart, ends] = [byId("chart"), byId("ends")];
  shownLines = shown();
  sorted = endsSorted(shownLines);
  byId("lines").replaceChildren(table(HEADS, shownLines.map(rowOf), 4));
  const layout = endsLayout(sorted, width ?? ends.clientWidth, theme);
  await window.Plotly.react(ends, endsTraces(sorted, layout.yaxis.gridcolor), layout, data.config);
  const families = familiesFigure(shownLines, width ?? chart.clientWidth, theme);
  await window.Plotly.react(chart, families.traces, families.layout, data.config);
  return [chart, ends];
}

let started = false;

window.drawFigures = async (theme, width) => {
  if (!started) {
    fillFilters(() => draw(document.documentElement.dataset.theme ?? theme));
    fillTables();
  }
  const [chart, ends] = await draw(theme, width);
  if (started) return;
  started = true;
  chart.on("plotly_click", ({ points: [{ customdata }] }) => showPoint(data.lines[customdata[0]], customdata[1]));
  ends.on("plotly_click", ({ points: [point] }) => showPoint(sorted[point.pointIndex], point.customdata));
};
}
