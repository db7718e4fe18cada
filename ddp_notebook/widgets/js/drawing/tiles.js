/**
 * Positions of tensors: a tile per rank with the input above the output, and a cell per element. Pure functions; CSS
 * pixels.
 *
 * @typedef {{x: number, y: number, width: number, height: number, rows: number, columns: number, cell: number, cellHeight: number, asDigits: boolean, isWrapped: boolean}} Block
 * @typedef {import("../data/tensor_source.js").Told & {block: Block, changed: Uint8Array|null, differs: Uint8Array|null}} Placed
 * @typedef {{rank: number, x: number, y: number, width: number, height: number, sides: (Placed|null)[]}} Tile
 */

import { differences, range } from "../data/values.js";
import { gridOf } from "./heat.js";

const LABEL = 17; // height of a tile's name
export const LINE = 13; // height of a line of text
export const NARROW = 150; // width below which a tile has its tensors side by side, without text
export const MARGIN = 26; // space for "in" and "out"
export const SCALE = 26; // height of the scale
export const SCALE_WIDTH = 128, BESIDE_SCALE = 28; // distance to the text next to it
const GAP = 12; // between tiles
const LETTER = 5.7; // width of a letter in the text below a tensor

const DIGITS = 32; // most elements that are written as numbers
const LEAST_DIGITS_PX = 30, DIGITS_HEIGHT = 20;

/**
 * Number of tiles per row: all ranks if they are few, otherwise a block that is nearly square.
 *
 * @param {number} ranks
 * @param {number} width
 */
export function tilesAcross(ranks, width) {
  const fitting = Math.max(1, Math.floor(width / 96));
  if (ranks <= Math.min(8, Math.floor(width / 130))) return Math.max(ranks, 1);
  const square = ranks > 16 ? Math.ceil(Math.sqrt(ranks)) : Math.ceil(ranks / Math.ceil(ranks / 8));
  return Math.min(square, fitting);
}

/**
 * The cells of one tensor in a tile.
 *
 * @param {number[]} shape
 * @param {number} count available elements
 * @param {number} width
 * @param {number} height the most
 * @returns {Block} at 0, 0
 */
export function block(shape, count, width, height) {
  if (count <= DIGITS) {
    const last = shape.length > 1 && shape.reduce((product, size) => product * size, 1) === count ? shape[shape.length - 1] : count;
    const most = Math.max(1, Math.floor(width / LEAST_DIGITS_PX));
    const even = last <= most ? last : [...Array(most).keys()].map((k) => most - k).find((k) => k > most / 2 && last % k === 0) ?? most;
    const rows = Math.ceil(count / even);
    const cellHeight = Math.min(DIGITS_HEIGHT, height / rows);
    if (cellHeight >= 13) {
      const cell = Math.min(Math.floor(width / even), 64);
      return { x: 0, y: 0, width: cell * even, height: cellHeight * rows, rows, columns: even, cell, cellHeight, asDigits: true, isWrapped: even < last };
    }
  }
  const { rows, columns, isWrapped } = gridOf(shape, count, width / height);
  const fit = Math.min(width / columns, height / rows);
  const cell = fit >= 2 ? Math.min(Math.floor(fit), 24) : fit;
  return { x: 0, y: 0, width: cell * columns, height: cell * rows, rows, columns, cell, cellHeight: cell, asDigits: false, isWrapped };
}

/**
 * The element at a position of a block, -1 if there is none.
 *
 * @param {Block} block
 * @param {number} count
 * @param {number} x
 * @param {number} y
 */
export function elementAt({ x: left, y: top, width, height, columns, cell, cellHeight }, count, x, y) {
  if (x < left || y < top || x >= left + width || y >= top + height) return -1;
  const at = Math.floor((y - top) / cellHeight) * columns + Math.min(Math.floor((x - left) / cell), columns - 1);
  return at < count ? at : -1;
}

/**
 * The index of an element in its tensor: `[2, 3]`.
 *
 * @param {number} at flat index
 * @param {number[]} shape
 */
export function indexOf(at, shape) {
  const index = [];
  for (let k = shape.length - 1; k > 0; k--) {
    index.unshift(at % shape[k]);
    at = Math.floor(at / shape[k]);
  }
  return [at, ...index];
}

/**
 * The tiles of all ranks in rows, and their total height.
 *
 * @param {Map<number, (import("../data/tensor_source.js").Told|null)[]>} found by rank: input and output
 * @param {(import("../data/values.js").Across|null)[]} across by side: differences between ranks
 * @param {number} width
 * @returns {{tiles: Tile[], height: number}}
 */
export function placeTiles(found, across, width) {
  const columns = tilesAcross(found.size, width);
  const tileWidth = Math.floor((width + GAP) / columns) - GAP;
  const rows = Math.ceil(found.size / columns);
  const isNarrow = tileWidth < NARROW;
  // Both sides of all ranks fit on a screen for any number of rows.
  const room = Math.max(24, isNarrow ? Math.max(52, 480 / rows - LABEL) : Math.min(tileWidth - MARGIN, rows > 1 ? Math.max(40, 560 / rows / 2 - LABEL) : 190));
  const margin = isNarrow ? 0 : MARGIN;
  const sideWidth = isNarrow ? (tileWidth - 4) / 2 : tileWidth - MARGIN;
  /** @type {Tile[]} */
  const tiles = [];
  let y = 0, rowHeight = 0;
  [...found].sort(([a], [b]) => a - b).forEach(([rank, [input, output]], i) => {
    if (i && i % columns === 0) {
      y += rowHeight + GAP;
      rowHeight = 0;
    }
    const x = (i % columns) * (tileWidth + GAP);
    let top = y + LABEL, bottom = top;
    const sides = [input, output].map((tensor, side) => {
      if (!tensor) return null;
      const own = block(tensor.data.length === tensor.numel ? tensor.shape : [tensor.data.length], tensor.data.length, sideWidth, room);
      // Narrow tiles have their tensors side by side. Other tiles have the output below the input and its text.
      own.x = x + margin + (isNarrow && side ? sideWidth + 4 : 0);
      own.y = isNarrow ? y + LABEL : top;
      top = own.y + Math.max(own.height, isNarrow ? 0 : 16) + (isNarrow ? 2 : LINE * linesOf(tensor, tileWidth - MARGIN) + 10);
      bottom = Math.max(bottom, top);
      return { ...tensor, block: own, changed: side ? differences(tensor, input) : null, differs: across[side]?.marks ?? null };
    });
    rowHeight = Math.max(rowHeight, bottom - y);
    tiles.push({ rank, x, y, width: tileWidth, height: bottom - y, sides });
  });
  return { tiles, height: y + rowHeight };
}

/**
 * Number of text lines below a tensor.
 * @param {import("../data/tensor_source.js").Told} tensor
 * @param {number} width
 */
const linesOf = (tensor, width) => inLines(range(tensor), width, (words) => words.length * LETTER).length;

/**
 * Break a text into lines that fit, but not inside of brackets.
 * @param {string} words
 * @param {number} width
 * @param {(words: string) => number} measure
 */
export function inLines(words, width, measure) {
  const lines = [""];
  for (const word of words.split(/ (?![^[(]*[\])])/)) {
    const line = lines[lines.length - 1];
    const longer = line ? `${line} ${word}` : word;
    if (line && measure(longer) > width) lines.push(word);
    else lines[lines.length - 1] = longer;
  }
  return lines;
}

/**
 * The explanations of the marks: in one line to the right of the scale if they fit, otherwise in lines below it.
 *
 * @param {string[]} parts
 * @param {number} width
 * @returns {{isBelow: boolean, lines: string[], height: number}} `height`: of the scale and the text
 */
export function placeLegend(parts, width) {
  const words = parts.map((part) => part.replaceAll(" ", "\u00a0"));
  const line = words.join("\u00a0\u00a0 ");
  const measure = /** @param {string} text */ (text) => text.trimEnd().length * LETTER;
  if (MARGIN + SCALE_WIDTH + BESIDE_SCALE + measure(line) <= width) return { isBelow: false, lines: [line], height: SCALE };
  const lines = inLines(line, width - MARGIN, measure).map((text) => text.trimEnd());
  return { isBelow: true, lines, height: SCALE + LINE * lines.length + 4 };
}

/** The share of marked elements. @param {Uint8Array} marks */
export const shareOf = (marks) => marks.reduce((sum, one) => sum + one, 0) / Math.max(marks.length, 1);

/**
 * Remove the marks if nearly all elements have one, because they would hide the values. The text still reports the
 * differences.
 * @param {Tile[]} tiles
 */
export function hideCrowdedMarks(tiles) {
  const wanted = /** @type {const} */ ([["changed", 1], ["differs", 0], ["differs", 1]]);
  for (const [name, side] of wanted) {
    const marked = tiles.map((tile) => tile.sides[side]).filter((tensor) => !!tensor?.[name] && tensor.data.length > 4);
    const shares = marked.map((tensor) => shareOf(tensor?.[name] ?? new Uint8Array(0)));
    if (shares.reduce((sum, one) => sum + one, 0) / Math.max(marked.length, 1) <= 0.5) continue;
    for (const tensor of marked) if (tensor) tensor[name] = null;
  }
}
