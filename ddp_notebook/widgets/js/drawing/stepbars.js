/** Positions of the stacked bars of the steps. Pure functions; CSS pixels. */

import { duration } from "../data/format.js";
import { PARTS } from "../data/tables.js";
import { niceStep, plainTicks } from "./axis.js";

/** @typedef {{words: string, x: number, width: number}} Label  x: its middle */
/** @typedef {{part: string, bar: number, x: number, y: number, width: number, height: number}} Rectangle */
/**
 * @typedef {{left: number, top: number, width: number, height: number, high: number, pitch: number, gap: number}} Frame
 *   pitch: distance between the left edges of bars; gap: space between bars; high: value at the top
 */

/**
 * Stacked rectangles, from the bottom up.
 * @param {{parts: number[]}[]} bars
 * @param {Frame} frame
 * @returns {Rectangle[]}
 */
export function stack(bars, { left, top, height, high, pitch, gap }) {
  /** @type {Rectangle[]} */
  const found = [];
  bars.forEach(({ parts }, bar) => {
    let base = 0;
    parts.forEach((part, at) => {
      if (!(part > 0)) return;
      const [from, to] = [Math.min(base, high), Math.min(base + part, high)];
      base += part;
      if (to <= from) return;
      const y = top + height * (1 - to / high);
      found.push({ part: PARTS[at], bar, x: left + bar * pitch + gap / 2, y, width: pitch - gap, height: (height * (to - from)) / high });
    });
  });
  return found;
}

/**
 * The value at the top of the axis. A first step that is much longer than all others is cut and labelled, so that the
 * others stay readable.
 * @param {number[]} durations
 */
export function highest(durations) {
  const sorted = durations.filter((one) => one > 0).sort((a, b) => a - b);
  if (!sorted.length) return 1;
  const largest = sorted[sorted.length - 1];
  const usual = sorted[Math.min(sorted.length - 1, Math.floor(0.9 * sorted.length))];
  return 1.08 * (sorted.length > 4 && largest > 1.6 * usual ? 1.15 * usual : largest);
}

/**
 * Labels with the lengths of cut bars: to the right of each bar, or to its left at the right edge. Without enough space
 * there is no label.
 * @param {{duration: number}[]} bars
 * @param {{left: number, pitch: number, high: number}} frame
 * @param {number} right
 * @param {(words: string) => number} widthOf
 * @returns {{words: string, x: number}[]}
 */
export function cutLabels(bars, { left, pitch, high }, right, widthOf) {
  /** @type {{words: string, x: number}[]} */
  const found = [];
  let free = -Infinity;
  bars.forEach((bar, at) => {
    if (bar.duration <= high) return;
    const words = `${duration(bar.duration)} ↑`;
    const width = widthOf(words);
    const before = left + at * pitch - 3 - width, behind = left + (at + 1) * pitch + 3;
    const x = behind + width <= right ? behind : before;
    if (x < free) return;
    free = x + width + 8;
    found.push({ words, x });
  });
  return found;
}

/**
 * The labels below the bars: step numbers, and the name of each cell at its first bar. Labels do not overlap; the name
 * of a cell has priority over a number.
 * @param {{cell: number, step: number}[]} bars
 * @param {Frame} frame
 * @param {number} right edge
 * @param {(cell: number) => string} cellName
 * @param {(words: string) => number} widthOf
 * @returns {Label[]}
 */
export function stepLabels(bars, { left, pitch }, right, cellName, widthOf) {
  const isOneCell = bars[0].cell === bars[bars.length - 1].cell;
  const wanted = isOneCell ? new Set(plainTicks(bars[0].step, bars[bars.length - 1].step, Math.max(2, (bars.length * pitch) / 70)).map(({ value }) => value)) : null;
  const every = Math.max(1, niceStep(70, pitch));
  /** @type {Label[]} */
  const names = [];
  /** @type {Label[]} */
  const numbers = [];
  bars.forEach((bar, at) => {
    const isNewCell = !isOneCell && (at === 0 || bars[at - 1].cell !== bar.cell);
    if (!isNewCell && (wanted ? !wanted.has(bar.step) && bars.length > 1 : bar.step % every)) return;
    const words = isNewCell ? `${cellName(bar.cell)}: ${bar.step}` : String(bar.step);
    const width = widthOf(words);
    const x = Math.min(Math.max(left + (at + 0.5) * pitch, left + width / 2), right - width / 2);
    (isNewCell ? names : numbers).push({ words, x, width });
  });
  /** @type {Label[]} */
  const found = [];
  const isFree = /** @param {Label} one */ (one) => found.every((other) => Math.abs(one.x - other.x) >= (one.width + other.width) / 2 + 8);
  // If two cells start next to each other, label the newer one.
  for (const one of [...names.reverse(), ...numbers]) if (isFree(one)) found.push(one);
  return found.sort((a, b) => a.x - b.x);
}
