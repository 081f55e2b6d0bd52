/** Where the ticks of an axis are, and what they say. */
import { formatCount } from "../common/format.js";
/** @import { View } from "./figures.js" */

/**
 * The least of 1, 2, 5, 10, 20, … (and 0.5, 0.2, …) that is not below `rough`.
 * @param {number} rough above 0
 */
function roundStep(rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5].map((factor) => factor * power).find((each) => each >= rough) ?? 10 * power;
}

/**
 * Values and labels of the ticks of a time axis, all in one unit: seconds, or a smaller one where all times are small.
 * @param {View} view in seconds
 */
export function timeTicks({ low, high }, atMost = 8) {
  const span = high - low;
  const [unit, size] = high >= 1 ? ["s", 1] : high >= 1e-3 ? ["ms", 1e-3] : ["µs", 1e-6];
  const step = roundStep(Number((span / size / atMost).toPrecision(12)) || 1);
  const digits = Math.max(0, -Math.floor(Math.log10(step)));
  const values = [];
  const labels = [];
  for (let i = Math.ceil(low / size / step - 1e-9); i * step * size <= high + step * size * 1e-9; i += 1) {
    const [whole, part] = (i * step).toFixed(digits).split(".");
    values.push(i * step * size);
    labels.push(`${formatCount(Number(whole))}${part ? `.${part}` : ""} ${unit}`);
  }
  return { values, labels };
}

/**
 * Values and labels of the ticks of a byte axis from `low` to `most`.
 * @param {number} most
 */
export function byteTicks(most, atMost = 6, low = 0) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  while (most / 1024 ** unit >= 1024 && unit < units.length - 1) unit += 1;
  const size = 1024 ** unit;
  const step = roundStep((most - low) / size / atMost || 1);
  const values = [];
  const labels = [];
  for (let i = Math.ceil(low / size / step - 1e-9); i * step * size <= most * 1.000001; i += 1) {
    values.push(i * step * size);
    labels.push(`${Number((i * step).toPrecision(6))} ${units[unit]}`);
  }
  return { values, labels };
}
