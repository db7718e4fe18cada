/**
 * Colours for numbers: centred on zero, for any colour vision, with separate colours for values that are not finite.
 * Pure functions.
 *
 * Blue is below zero, red above, and the background of the page is zero. NaN, infinities and clipped values also have
 * marks, so that no information depends on colour alone.
 */

import { channels, textOn } from "./colours.js";
import { abgr } from "./pixels.js";
import { statistics } from "../data/values.js";

const STEPS = 128; // colours on each side of zero
const SIGMAS = 3;
const SMALL = 32; // most elements of a small tensor

/**
 * The common scale of tensors that are compared.
 *
 * @param {ArrayLike<number>[]} all
 * @returns {{limit: number, isClipped: boolean}} values at ±limit have the full colour; isClipped: larger values exist
 */
export function scaleOf(all) {
  let largest = 0, sum = 0, count = 0;
  for (const data of all) {
    const { low, high, mean, deviation, count: finite } = statistics(data);
    if (!finite) continue;
    largest = Math.max(largest, Math.abs(low), Math.abs(high));
    sum += finite * (deviation ** 2 + mean ** 2); // deviation from zero, which is the centre of the colours
    count += finite;
  }
  const limit = SIGMAS * Math.sqrt(sum / count);
  // Few values have no outliers, and small tensors are written as numbers.
  if (!(limit > 0) || limit >= largest || all.every((data) => data.length <= SMALL)) return { limit: largest || 1, isClipped: false };
  return { limit, isClipped: true };
}

/** @typedef {ReturnType<typeof colourMap>} ColourMap */

/**
 * The colours of a palette as a table, followed by the colours of values that are not finite.
 * @param {import("./colours.js").Palette} colours
 */
export function colourMap(colours) {
  const [low, zero, high] = [colours.diverging.low, colours.diverging.zero, colours.diverging.high].map((one) => channels(one) ?? [128, 128, 128]);
  const mix = /** @param {number[]} a @param {number[]} b @param {number} part */ (a, b, part) => a.map((value, at) => value + (b[at] - value) * part);
  const rgb = [];
  for (let i = -STEPS; i <= STEPS; i++) rgb.push(mix(zero, i < 0 ? low : high, Math.abs(i / STEPS) ** 0.8));
  // Two colours that the map does not contain: the text colour for NaN, green for infinities.
  const nan = channels(colours.ink) ?? [0, 0, 0];
  const inf = channels(colours.fill.optimizer) ?? [0, 158, 115];
  const pixels = Uint32Array.from([...rgb, nan, inf], (one) => abgr(one));
  const css = [...rgb, nan, inf].map((one) => `#${one.map((value) => Math.round(value).toString(16).padStart(2, "0")).join("")}`);
  return { pixels, css, text: css.map(textOn) };
}

/** Index of a value in the table of `colourMap`. @param {number} value @param {number} limit */
export function placeOf(value, limit) {
  if (Number.isNaN(value)) return 2 * STEPS + 1;
  if (!Number.isFinite(value)) return 2 * STEPS + 2;
  const part = Math.max(-1, Math.min(1, value / limit));
  return STEPS + Math.round(part * STEPS);
}

/**
 * The mark of a cell in a heat map: X, I, -I, + or - for clipped values, "" otherwise.
 * @param {number} value
 * @param {number} limit
 */
export function markOf(value, limit) {
  if (Number.isNaN(value)) return "X";
  if (!Number.isFinite(value)) return value > 0 ? "I" : "-I";
  return value > limit ? "+" : value < -limit ? "-" : "";
}

/**
 * Rows and columns of a drawn tensor: the last dimension across, all others down. A flat or very long tensor is wrapped
 * to fill its tile.
 *
 * @param {number[]} shape
 * @param {number} count available elements
 * @param {number} aspect width over height of the tile
 * @returns {{rows: number, columns: number, isWrapped: boolean}}
 */
export function gridOf(shape, count, aspect = 1) {
  const last = shape[shape.length - 1] ?? 1;
  const numel = shape.reduce((product, size) => product * size, 1);
  const ratio = (last * last) / Math.max(count, 1); // columns divided by rows
  if (numel === count && shape.length > 1 && ratio > aspect / 12 && ratio < aspect * 12) {
    return { rows: Math.ceil(count / last), columns: last, isWrapped: false };
  }
  if (count <= 4) return { rows: 1, columns: Math.max(count, 1), isWrapped: false };
  const wanted = Math.max(1, Math.round(Math.sqrt(count * aspect)));
  // A divisor of the row length keeps rows together.
  const columns = [...Array(wanted).keys()].map((k) => wanted - k).find((k) => k > wanted / 2 && count % k === 0) ?? wanted;
  return { rows: Math.ceil(count / columns), columns, isWrapped: columns < count };
}

/**
 * A heat map in pixels. A pixel with several elements shows the largest of them, or NaN if there is one, so that no
 * outlier is lost.
 *
 * @param {ArrayLike<number>} data
 * @param {{rows: number, columns: number}} grid
 * @param {number} limit
 * @param {Uint32Array} palette of `colourMap`
 * @param {number} width pixels
 * @param {number} height pixels
 * @returns {{pixels: Uint32Array<ArrayBuffer>, width: number, height: number, perPixel: number}} of at most this size
 */
export function heatMap(data, { rows, columns }, limit, palette, width, height) {
  const across = Math.min(columns, Math.max(1, Math.floor(width))), down = Math.min(rows, Math.max(1, Math.floor(height)));
  const pixels = new Uint32Array(across * down);
  for (let y = 0; y < down; y++) {
    const row0 = Math.floor((y * rows) / down), row1 = Math.max(row0 + 1, Math.floor(((y + 1) * rows) / down));
    for (let x = 0; x < across; x++) {
      const column0 = Math.floor((x * columns) / across), column1 = Math.max(column0 + 1, Math.floor(((x + 1) * columns) / across));
      let shown = 0, isAny = false;
      for (let row = row0; row < row1; row++) {
        for (let at = row * columns + column0; at < row * columns + column1 && at < data.length; at++) {
          const value = data[at];
          if (!isAny || Number.isNaN(value) || Math.abs(value) > Math.abs(shown)) shown = value;
          isAny = true;
          if (Number.isNaN(shown)) break;
        }
        if (Number.isNaN(shown)) break;
      }
      if (isAny) pixels[y * across + x] = palette[placeOf(shown, limit)];
    }
  }
  return { pixels, width: across, height: down, perPixel: (rows * columns) / (across * down) };
}
