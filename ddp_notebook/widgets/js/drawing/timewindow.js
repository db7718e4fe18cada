/**
 * The time window of a timeline, and its axis. Pure functions; times are milliseconds of the recording.
 *
 * @typedef {{t0: number, t1: number}} TimeWindow
 */

import { niceStep } from "./axis.js";

/** The smallest window: two microseconds, near the resolution of the clocks. */
export const LEAST_MS = 0.002;

/**
 * The window zoomed by a factor, with the time under the pointer staying under the pointer.
 *
 * @param {TimeWindow} view
 * @param {number} at fixed time
 * @param {number} factor above 1 to zoom in
 * @param {TimeWindow} limits time range of the data
 * @returns {TimeWindow}
 */
export function zoom(view, at, factor, limits) {
  const length = view.t1 - view.t0;
  const wanted = Math.min(Math.max(length / factor, LEAST_MS), Math.max(limits.t1 - limits.t0, LEAST_MS));
  const t0 = at - (at - view.t0) * (wanted / length);
  return within({ t0, t1: t0 + wanted }, limits);
}

/**
 * The window moved, within the limits.
 *
 * @param {TimeWindow} view
 * @param {number} by milliseconds
 * @param {TimeWindow} limits
 * @returns {TimeWindow}
 */
export function pan(view, by, limits) {
  return within({ t0: view.t0 + by, t1: view.t1 + by }, limits);
}

/**
 * Move a window inside the limits. A longer window is centred.
 *
 * @param {TimeWindow} view
 * @param {TimeWindow} limits
 * @returns {TimeWindow}
 */
export function within(view, limits) {
  const length = view.t1 - view.t0;
  if (length >= limits.t1 - limits.t0) {
    const middle = (limits.t0 + limits.t1) / 2;
    return { t0: middle - length / 2, t1: middle + length / 2 };
  }
  const t0 = Math.min(Math.max(view.t0, limits.t0), limits.t1 - length);
  return { t0, t1: t0 + length };
}

/**
 * The newest `length` milliseconds. It moves in whole pixels, so that the edges of bars stay stable. With reduced
 * motion it moves in pages, like an oscilloscope.
 *
 * @param {number} newest
 * @param {number} length
 * @param {number} pixels width of the picture
 * @param {boolean} [inPages]
 * @returns {TimeWindow}
 */
export function follow(newest, length, pixels, inPages = false) {
  const grain = inPages ? length / 2 : length / Math.max(pixels, 1);
  const t1 = Math.max(Math.ceil(newest / grain) * grain, length);
  return { t0: t1 - length, t1 };
}

const UNITS = [
  { ms: 60000, name: "min" },
  { ms: 1000, name: "s" },
  { ms: 1, name: "ms" },
  { ms: 0.001, name: "µs" },
];

/**
 * Positions of the axis marks. At high zoom, full times would not fit, so marks are relative to `base`, a time with few
 * digits.
 *
 * @param {TimeWindow} view
 * @param {number} pixels
 * @returns {{base: number, baseLabel: string, step: number, marks: {time: number, label: string}[]}}
 */
export function axis(view, pixels) {
  const length = view.t1 - view.t0;
  const step = niceStep(length, pixels / 90);
  const isRelative = length < 500 && Math.abs(view.t1) > 20 * length;
  const grain = step * 10;
  const base = isRelative ? Math.floor(view.t0 / grain) * grain : 0;
  const reach = isRelative ? view.t1 - base : Math.max(Math.abs(view.t0), Math.abs(view.t1));
  const unit = UNITS.find((one) => (one.name === "min" ? reach >= 600000 && step >= 30000 : reach >= one.ms && step >= one.ms / 1000)) ?? UNITS[3];
  const places = Math.max(0, -Math.floor(Math.log10(step / unit.ms) + 1e-9));
  const marks = [];
  for (let k = Math.ceil((view.t0 - base) / step - 1e-9); base + k * step <= view.t1; k++) {
    const text = ((k * step) / unit.ms).toFixed(places);
    marks.push({ time: base + k * step, label: `${isRelative && k >= 0 ? "+" : ""}${text} ${unit.name}` });
  }
  return { base, baseLabel: isRelative ? seconds(base, grain) : "", step, marks };
}

/** A time in seconds with as many digits as `grain` (ms) needs. @param {number} ms @param {number} grain */
export function seconds(ms, grain) {
  return `${(ms / 1000).toFixed(Math.max(0, Math.min(9, 3 - Math.floor(Math.log10(grain) + 1e-9))))} s`;
}
