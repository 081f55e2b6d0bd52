/** The packed event stream: base64 of gzip of a header and binary planes. */
import { cleaned } from "../common/format.js";
/** @import { ExactHeader, ExactStream, Integers, ReducedHeader, ReducedStream } from "./stream.js" */

/** @param {string} text */
export function bytesOfBase64(text) {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i += 1) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

/** @param {Uint8Array<ArrayBuffer>} bytes in gzip */
export async function inflated(bytes) {
  if (typeof DecompressionStream === "undefined") {
    throw new Error("this browser cannot unpack gzip (DecompressionStream is missing); use a newer browser");
  }
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/**
 * Unsigned little-endian numbers from byte planes; `planes[0]` is the least significant.
 * @param {Uint8Array} bytes
 * @param {number} offset
 * @param {number} planes
 * @param {number} count
 * @returns {Integers}
 */
export function joinPlanes(bytes, offset, planes, count) {
  const wide = planes > 4;
  const values = wide ? new Float64Array(count) : new Uint32Array(count);
  for (let plane = 0; plane < planes; plane += 1) {
    const at = offset + plane * count;
    const factor = 256 ** plane;
    for (let i = 0; i < count; i += 1) values[i] += bytes[at + i] * factor;
  }
  return values;
}

/** @param {Uint8Array} bytes */
function readHeader(bytes) {
  const length = new DataView(bytes.buffer, bytes.byteOffset).getUint32(0, true);
  const header = cleaned(JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + length))));
  return { header, offset: 4 + length };
}

/**
 * @param {Uint8Array<ArrayBuffer>} bytes
 * @param {number} offset
 * @param {number} count
 */
function readFloats(bytes, offset, count) {
  // A copy, because a Float64Array must start at a multiple of eight.
  return new Float64Array(bytes.slice(offset, offset + 8 * count).buffer);
}

/**
 * @param {Uint8Array} bytes
 * @param {number} offset
 * @param {ExactHeader} header
 * @param {number} events
 */
function readExact(bytes, offset, header, events) {
  const codes = joinPlanes(bytes, offset, header.code_bytes, events);
  const steps = joinPlanes(bytes, offset + header.code_bytes * events, header.time_bytes, events);
  const times = new Float64Array(events + 1);
  times[0] = header.start_ns;
  for (let i = 0; i < events; i += 1) times[i + 1] = times[i] + steps[i] * header.time_unit_ns;
  const behind = offset + (header.code_bytes + header.time_bytes) * events;
  const places = header.place_bytes ? joinPlanes(bytes, behind, header.place_bytes, events) : null;
  return { codes, times, places };
}

/**
 * @param {Uint8Array<ArrayBuffer>} bytes
 * @param {number} offset
 * @param {ReducedHeader} header
 * @param {number} categories
 */
function readReduced(bytes, offset, header, categories) {
  const columns = [];
  const series = categories + (header.layered ? 2 : 0);
  for (let column = 0; column < 2 + series; column += 1) {
    columns.push(readFloats(bytes, offset + 8 * header.count * column, header.count));
  }
  return { positions: columns[0], times: columns[1], series: columns.slice(2) };
}

/**
 * No events, as of a run that was given as JSON.
 * @param {number} categories how many categories there are
 * @returns {ExactStream}
 */
function noStream(categories) {
  const kinds = { category: [], bytes: [], name: [], module: [], op: [], what: [], stack: [], phase: [], dtype: [], shape: [] };
  const header = { texts: [], frames: [], stacks: [], shapes: [], kinds, code_bytes: 0, time_bytes: 0, time_unit_ns: 1, start_ns: 0 };
  return { mode: "exact", events: 0, categories, header, codes: new Uint32Array(0), times: new Float64Array(1), places: null };
}

/**
 * The stream of a run, unpacked; one without events where there is none.
 * @param {{mode: string, events: number, packed: string}|null} stream
 * @param {number} categories how many categories there are
 * @returns {Promise<ExactStream|ReducedStream>}
 */
export async function unpackStream(stream, categories) {
  if (!stream) return noStream(categories);
  const bytes = await inflated(bytesOfBase64(stream.packed));
  const { header, offset } = readHeader(bytes);
  const { events } = stream;
  if (stream.mode === "exact") {
    const exact = /** @type {ExactHeader} */ (header);
    return { mode: "exact", events, categories, header: exact, ...readExact(bytes, offset, exact, events) };
  }
  const reduced = /** @type {ReducedHeader} */ (header);
  return { mode: "reduced", events, categories, header: reduced, ...readReduced(bytes, offset, reduced, categories) };
}
