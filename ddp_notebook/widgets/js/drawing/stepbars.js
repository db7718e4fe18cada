/**
 * Where the stacked bars of the steps lie. Pure; CSS pixels.
 */

import { duration } from "../data/format.js";
import { PARTS } from "../data/tables.js";

/** @typedef {{part: string, bar: number, x: number, y: number, width: number, height: number}} Rectangle */
/**
 * @typedef {{left: number, top: number, width: number, height: number, high: number, pitch: number, gap: number}} Frame
 *   pitch: from bar to bar; gap: between two; high: the value at the top
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
 * The value at the top of the axis. A first step that is much longer than all others does not flatten them: it is cut,
 * and labelled.
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
 * How long the bars are that the axis cuts, in words: behind each bar, at the right edge before it; where there is no
 * room, not at all.
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
