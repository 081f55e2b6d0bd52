"use strict";
// Draws one stacked chart per recording from the JSON block of the page.
(function () {
  const page = JSON.parse(document.getElementById("page-data").textContent);
  const darkness = window.matchMedia("(prefers-color-scheme: dark)");
  const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

  // The same text as ampmem's own formatter.
  function formatBytes(count) {
    let size = Math.abs(count);
    let unit = 0;
    while (size >= 1023.95 && unit < UNITS.length - 1) {
      size /= 1024;
      unit += 1;
    }
    const sign = count < 0 ? "-" : "";
    return sign + (unit === 0 ? String(size) : size.toFixed(1)) + " " + UNITS[unit];
  }

  // About five round ticks in a binary unit.
  function byteTicks(peak) {
    let step = 1;
    while (step * 5 < peak) step *= 2;
    const values = [];
    for (let value = 0; value <= peak + step; value += step) values.push(value);
    return values;
  }

  function traces(view, dark) {
    return view.series.map((series) => ({
      type: "scatter", mode: "lines", stackgroup: "live", name: series.category,
      x: view.instants, y: series.bytes, customdata: series.bytes.map(formatBytes),
      hovertemplate: "%{customdata}",
      line: { shape: "hv", width: 0.5, color: dark ? "#e8e9eb" : "#1b1e23" },
      fillcolor: dark ? series.dark : series.light,
      fillpattern: {
        shape: series.pattern, size: 6, fillmode: "overlay", fgcolor: dark ? "#e8e9eb" : "#1b1e23",
        bgcolor: dark ? series.dark : series.light,
      },
    }));
  }

  function phaseStrip(view, dark) {
    return view.phases.map((phase, number) => ({
      type: "rect", xref: "x", yref: "paper", x0: phase.start, x1: phase.end, y0: 1.0, y1: 1.05, layer: "below",
      line: { width: 0 }, fillcolor: dark ? ["#3a3e45", "#50555e"][number % 2] : ["#d7d7d8", "#ebebec"][number % 2],
      label: phase.wide ? { text: phase.name, font: { size: 10 } } : undefined,
    }));
  }

  function layout(view, dark, narrow) {
    const ink = dark ? "#e8e9eb" : "#1b1e23";
    const ticks = byteTicks(view.peak.bytes);
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: ink },
      margin: { l: 80, r: 16, t: 56, b: 48 }, hovermode: "x unified", shapes: phaseStrip(view, dark),
      hoverlabel: { bgcolor: dark ? "#1d2025" : "#ffffff" }, legend: narrow ? { orientation: "h", y: -0.25 } : { traceorder: "reversed" },
      xaxis: { title: { text: "allocator event" }, showgrid: false },
      yaxis: { tickvals: ticks, ticktext: ticks.map(formatBytes), rangemode: "tozero", gridcolor: dark ? "#3a3e45" : "#d7d7d8" },
      annotations: [{
        x: view.peak.instant, y: view.peak.bytes, text: "peak " + formatBytes(view.peak.bytes),
        showarrow: true, arrowhead: 0, ax: 40, ay: -12, font: { color: ink },
      }],
    };
  }

  function draw() {
    const dark = darkness.matches;
    return Promise.all(page.timelines.map((view) => {
      const place = document.getElementById(view.element);
      return Plotly.react(place, traces(view, dark), layout(view, dark, place.clientWidth < 700), page.config);
    }));
  }

  draw().then(() => document.documentElement.setAttribute("data-ready", ""));
  darkness.addEventListener("change", draw);
  window.addEventListener("resize", draw);
})();
