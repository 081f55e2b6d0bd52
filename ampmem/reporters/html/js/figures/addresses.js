/** The allocator's segments at an instant, end to end in rows. */
import { byId, fill, make } from "../common/dom.js";
import { formatBytes, formatCount } from "../common/format.js";
import { given } from "../common/given.js";
import { INKS } from "../common/theme.js";
import { BlockPicker } from "./blocks.js";
/** @import { Theme } from "../common/theme.js" */
/** @import { Filled, Keyed } from "../data/segments.js" */
/** @import { Told } from "./blocks.js" */

/**
 * A block, or what is cached between two: `start` with all segments end to end, `offset` from that of its `segment`.
 * @typedef {{start: number, bytes: number, key: string, segment: number, offset: number, block?: Keyed}} Piece
 */
/** @typedef {{pieces: Piece[], starts: number[], total: number}} Layout `starts` are those of the segments */
/** @typedef {{row: number, left: number, width: number, key: string}} Cut a piece in one row, places in parts of it */

const MAX_PIECES = 5000;
const MAX_ROWS = 40;
const ROW_HEIGHT = 14;
const CELL = 3;

/**
 * All blocks end to end, and where each segment starts.
 * @param {Filled[]} segments
 * @returns {Layout}
 */
export function layoutOf(segments) {
  /** @type {Piece[]} */
  const pieces = [];
  /** @type {number[]} */
  const starts = [];
  let start = 0;
  for (const [segment, filled] of segments.entries()) {
    starts.push(start);
    for (const [offset, bytes, key, block] of filled.blocks) {
      pieces.push({ start: start + offset, bytes, key, segment, offset, block });
    }
    start += filled.bytes;
  }
  return { pieces, starts, total: start };
}

/**
 * Bytes in a row: the least power of two with which everything fits into the rows.
 * @param {number} total
 */
export function rowBytes(total) {
  let bytes = 512;
  while (bytes * MAX_ROWS < total) bytes *= 2;
  return bytes;
}

/**
 * Pieces cut at the ends of the rows: `{row, left, width, key}` with places in parts of a row.
 * @param {Array<Pick<Piece, "start"|"bytes"|"key">>} pieces
 * @param {number} width in bytes
 * @returns {Cut[]}
 */
export function cutPieces(pieces, width) {
  /** @type {Cut[]} */
  const cut = [];
  for (const { start, bytes, key } of pieces) {
    for (let at = start; at < start + bytes;) {
      const row = Math.floor(at / width);
      const end = Math.min(start + bytes, (row + 1) * width);
      cut.push({ row, left: (at - row * width) / width, width: (end - at) / width, key });
      at = end;
    }
  }
  return cut;
}

/**
 * For each cell of a grid the key that has most of its bytes.
 * @param {Cut[]} cut
 * @param {number} rows
 * @param {number} columns
 * @returns {Cut[]}
 */
export function heatmapCells(cut, rows, columns) {
  const cells = Array.from({ length: rows * columns }, () => /** @type {Map<string, number>} */ (new Map()));
  for (const { row, left, width, key } of cut) {
    const end = (left + width) * columns;
    for (let column = Math.floor(left * columns); column < Math.min(columns, Math.ceil(end)); column += 1) {
      const part = Math.min(end, column + 1) - Math.max(left * columns, column);
      const cell = cells[row * columns + column];
      cell.set(key, (cell.get(key) ?? 0) + part);
    }
  }
  return cells.flatMap((cell, i) => {
    if (!cell.size) return [];
    const [key] = [...cell].reduce((most, each) => (each[1] > most[1] ? each : most));
    return [{ row: Math.floor(i / columns), left: (i % columns) / columns, width: 1 / columns, key }];
  });
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {string} color
 * @param {string} ink
 */
function hatch(context, color, ink) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const brush = given(tile.getContext("2d"));
  brush.fillStyle = color;
  brush.fillRect(0, 0, 6, 6);
  brush.strokeStyle = ink;
  brush.globalAlpha = 0.45;
  brush.beginPath();
  brush.moveTo(0, 6);
  brush.lineTo(6, 0);
  brush.stroke();
  return given(context.createPattern(tile, "repeat"));
}

/**
 * Draws `segments`, of the instant that `where` names.
 * @param {Filled[]} segments
 * @param {string} where
 * @param {Told} told
 * @param {Theme} theme
 */
export function showAddresses(segments, where, told, theme) {
  byId("addresses-title").textContent = `Allocator address map ${where}`;
  const body = byId("addresses-body");
  const layout = layoutOf(segments);
  const { pieces, starts, total } = layout;
  const width = rowBytes(total);
  const rows = Math.ceil(total / width);
  const inner = Math.max(200, body.clientWidth);
  const canvas = make("canvas", {
    role: "img",
    "aria-label": `${segments.length} segments with ${pieces.length} blocks, ${formatBytes(total)}`,
    class: "addresses",
  });
  const scale = window.devicePixelRatio || 1;
  canvas.width = inner * scale;
  canvas.height = rows * ROW_HEIGHT * scale;
  canvas.style.height = `${rows * ROW_HEIGHT}px`;
  const context = given(canvas.getContext("2d"));
  context.scale(scale, scale);
  const few = pieces.length <= MAX_PIECES;
  const cut = few ? cutPieces(pieces, width) : heatmapCells(cutPieces(pieces, width), rows, Math.floor(inner / CELL));
  const cached = hatch(context, theme === "dark" ? "#44474b" : "#d7d7d8", INKS[theme].quiet);
  for (const { row, left, width: part, key } of cut) {
    const category = told.categoryOf(key);
    context.fillStyle = category ? category[theme] : cached;
    const gap = few && part * inner > 3 ? 0.5 : 0;
    context.fillRect(left * inner, row * ROW_HEIGHT, Math.max(0.4, part * inner - gap), ROW_HEIGHT - 2);
  }
  context.fillStyle = INKS[theme].outline;
  for (const start of starts) {
    context.fillRect(((start % width) / width) * inner, Math.floor(start / width) * ROW_HEIGHT, 1.5, ROW_HEIGHT - 2);
  }
  const free = pieces.reduce((sum, piece) => sum + (piece.key === "cached" ? piece.bytes : 0), 0);
  const kind = few ? "" : " There are too many blocks for bars: each cell has the color of what fills most of it.";
  byId("addresses-note").textContent =
    `All ${formatCount(starts.length)} segments end to end, ${formatBytes(width)} a row; ticks mark where a segment starts. Hatched gray is reserved but free: ${formatBytes(free)}.${kind}`;
  const drawn = { width, rowHeight: ROW_HEIGHT, cut: (/** @type {Piece} */ piece) => cutPieces([piece], width) };
  fill(body, new BlockPicker(canvas, layout, drawn, told).frame);
}
