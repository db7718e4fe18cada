/**
 * Where tensors lie: a tile per rank, in it the input above the output, in it a cell per element. Pure; CSS pixels.
 *
 * @typedef {{x: number, y: number, width: number, height: number, rows: number, columns: number, cell: number, cellHeight: number, asDigits: boolean, isWrapped: boolean}} Block
 */

import { gridOf } from "./heat.js";

const DIGITS = 32; // elements up to which they are written as numbers
const LEAST_DIGITS_PX = 30, DIGITS_HEIGHT = 20;

/**
 * How many tiles side by side: all ranks where they are few, else a block as near to a square as fits.
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
 * @param {number} count elements that are there
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
 * The element at a place of a block, -1 if there is none.
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
 * @param {number} at place in the order of the elements
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
