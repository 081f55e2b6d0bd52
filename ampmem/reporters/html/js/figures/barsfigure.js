/** Tables of bars, as they stand on the page, as one plotly figure. */
import { plotlyText } from "../common/format.js";
/** @import { Picture } from "./figures.js" */

const LINE_HEIGHT = 26;
const HEAD_HEIGHT = 40;
const FOOT = 60;
const SIDES = { l: 250, r: 210 };

/** @param {Element} element whose small print is left out */
function plainTextOf(element) {
  const parts = [...element.childNodes].filter((each) => each.nodeName !== "SMALL");
  return plotlyText(parts.map((each) => each.textContent).join("").trim().replace(/\s+/g, " "));
}

/**
 * @param {Element} piece
 * @param {number} y
 */
function pieceOf(piece, y) {
  const style = piece instanceof HTMLElement ? piece.style : null;
  const hatch = piece.classList.contains("slashes") ? "/" : piece.classList.contains("dots") ? "." : "";
  const [left, width] = [style?.left, style?.width].map((each) => Number.parseFloat(each ?? "0"));
  return { y, left, width, hatch, color: getComputedStyle(piece).backgroundColor };
}

/**
 * A category in the legend.
 * @param {Element} swatch
 */
function entryOf(swatch) {
  const { color, hatch } = pieceOf(swatch, 0);
  const marker = { color, pattern: { shape: hatch, size: 6, solidity: 0.3, fillmode: "overlay" } };
  return { type: "bar", x: [null], y: [null], marker, name: plainTextOf(swatch.closest(".legend li") ?? swatch) };
}

/**
 * @param {HTMLTableElement[]} tables
 * @param {Element[]} swatches of their legend
 * @param {number} above the free height above them
 * @param {{color: string}} font
 * @returns {Picture}
 */
export function barsFigure(tables, swatches, above, font) {
  let y = 0;
  /** @type {Array<ReturnType<typeof pieceOf>>} */
  const pieces = [];
  /** @type {object[]} */
  const annotations = [];
  /**
   * @param {string} text
   * @param {number} x
   * @param {"left"|"right"} xanchor
   */
  const write = (text, x, xanchor, xshift = 0) =>
    annotations.push({ x, y, text, xanchor, xshift, yanchor: "middle", showarrow: false });
  for (const table of tables) {
    const head = table.closest(".block")?.querySelector("h2, h3");
    if (head) {
      y -= HEAD_HEIGHT - LINE_HEIGHT;
      write(`<b>${plainTextOf(head)}</b>`, 0, "left", 8 - SIDES.l);
      y -= LINE_HEIGHT;
    }
    for (const row of table.rows) {
      const [name, bar, ...numbers] = row.cells;
      write(plainTextOf(name), 0, "right", -8);
      const found = [...bar.querySelectorAll(".piece")].map((piece) => pieceOf(piece, y));
      pieces.push(...found);
      const texts = (bar.matches(".track") ? numbers : [bar]).map(plainTextOf);
      write(texts.filter(Boolean).join("  "), bar.matches(".track") ? 100 : 0, "left", 8);
      y -= LINE_HEIGHT;
    }
  }
  const bars = {
    type: "bar",
    orientation: "h",
    x: pieces.map(({ width }) => width),
    base: pieces.map(({ left }) => left),
    y: pieces.map((piece) => piece.y),
    width: 0.7 * LINE_HEIGHT,
    showlegend: false,
    marker: {
      color: pieces.map(({ color }) => color),
      pattern: { shape: pieces.map(({ hatch }) => hatch), size: 6, solidity: 0.3, fillmode: "overlay" },
      line: { color: font.color, width: 0.5 },
    },
  };
  return {
    data: [bars, ...swatches.map(entryOf)],
    layout: {
      width: 0,
      height: above - y + FOOT,
      margin: { ...SIDES, t: above, b: FOOT },
      plot_bgcolor: "rgba(0,0,0,0)",
      barmode: "overlay",
      showlegend: swatches.length > 0,
      legend: { orientation: "h", x: 0, y: 0, yanchor: "top" },
      xaxis: { range: [0, 100], visible: false },
      yaxis: { range: [y + LINE_HEIGHT / 2, LINE_HEIGHT / 2], visible: false },
      annotations,
    },
  };
}
