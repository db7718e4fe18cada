/**
 * Converts spans to rectangles: the part of a lane in a window, as single bars if they are wide enough, otherwise as
 * shares of each pixel column. Pure functions; timeline_draw.js draws them. Sizes are CSS pixels.
 */

import { COMMUNICATION, COMPUTE, FAILED, MOST_SLOTS } from "../data/lanes.js";
import { COLLECTIVE, EXECUTION, KINDS, REMOTE_CALL } from "../data/tables.js";

/** @typedef {import("../data/lanes.js").Lane} Lane */
/** @typedef {{x: number, y: number, width: number, h: number, slots: number, slotH: number, column?: number}} Box  of a lane */
/**
 * @typedef {{lane: Lane, at: number, x: number, y: number, w: number, h: number, meaning: number}} Wide  a bar with enough space for text
 */

/** The width of the columns into which short operations are merged; twice that in thin rows. */
export const MERGE_PX = 2;
/** The height of a host's name above its ranks. */
export const HEADING = 14;
const CROWDED_PX = 6, ROOMY_PX = 9; // per operation of a lane: crowded below CROWDED_PX, roomy above ROOMY_PX
const LEAST_SINGLE_PX = 40; // minimum width of a single bar in a crowded lane

/**
 * Minimum width of a single bar. In a crowded lane nearly all operations are merged, because a mixture of bars and
 * shares is hard to read. Between the two limits the previous value is kept, to avoid flicker.
 *
 * @param {number} pixels
 * @param {number} count operations in these pixels
 * @param {number} before
 */
export function leastWidth(pixels, count, before) {
  const each = pixels / Math.max(count, 1);
  const isCrowded = each < (before === LEAST_SINGLE_PX ? ROOMY_PX : CROWDED_PX);
  return isCrowded ? LEAST_SINGLE_PX : MERGE_PX;
}

/** Meanings of rectangles. `WAITING` is drawn as an empty rectangle with an outline. */
export const TRANSFER = COLLECTIVE, WAITING = KINDS.length, FAILURE = WAITING + 1, UNDER_WAY = WAITING + 2;
/** Names of the meanings by number. The kinds of spans come first. */
export const MEANINGS = [...KINDS.slice(0, TRANSFER), "transfer", ...KINDS.slice(TRANSFER + 1), "waiting", "failed", "under way"];
const N = MEANINGS.length;
const FIRST_OF = [0, 1, TRANSFER, N]; // first meaning of each lane

/** Rectangles by meaning, in arrays that are reused for each picture. */
export class Rectangles {
  constructor() {
    this.counts = new Int32Array(N);
    this.quads = Array.from({ length: N }, () => new Float32Array(4 * 256)); // x, y, width, height
    this.single = 0; // spans drawn as single bars
    this.merged = 0; // spans drawn as shares of columns
    this.columns = 0; // number of these columns
    /** @type {Wide[]} */
    this.wide = [];
    /** @type {{x: number, y: number, h: number}[]} */
    this.open = []; // right ends of open bars
  }

  clear() {
    this.counts.fill(0);
    this.single = this.merged = this.columns = 0;
    this.wide = [];
    this.open = [];
  }

  /** @param {number} meaning @param {number} x @param {number} y @param {number} w @param {number} h */
  push(meaning, x, y, w, h) {
    const n = this.counts[meaning];
    let quads = this.quads[meaning];
    if (4 * n === quads.length) {
      const grown = new Float32Array(2 * quads.length);
      grown.set(quads);
      this.quads[meaning] = quads = grown;
    }
    const i = 4 * n;
    quads[i] = x;
    quads[i + 1] = y;
    quads[i + 2] = w;
    quads[i + 3] = h;
    this.counts[meaning] = n + 1;
  }

  get total() {
    return this.counts.reduce((sum, count) => sum + count, 0);
  }
}

/**
 * Positions of rows and their lanes. Rows fill the height, between a minimum, below which they scroll, and a maximum.
 * If there are several hosts, the ranks of each host have a heading.
 *
 * @param {number} rows
 * @param {number} height for all of them
 * @param {number[]} depths slots of each lane
 * @param {string[]} [hosts] of the rows; empty: all are on one machine
 */
export function layoutRows(rows, height, depths, hosts = []) {
  const slots = depths[COMPUTE] + depths[COMMUNICATION];
  const firsts = [...hosts.keys()].filter((at) => !at || hosts[at - 1] !== hosts[at]);
  const free = height - HEADING * firsts.length;
  const row = Math.min(Math.max(Math.floor(free / Math.max(rows, 1)), 7), 26 + 18 * slots);
  const gap = row >= 40 ? 6 : row >= 16 ? 3 : 1;
  const cell = row >= 40 ? 3 : row >= 16 ? 2 : 1;
  const inner = row - gap - cell;
  // Communication gets more space if it has several slots.
  const parts = 1 + Math.min(1.5, 0.5 * (depths[COMMUNICATION] - 1) + 0.4);
  const compute = Math.max(2, Math.round(inner / parts));
  const lanes = [
    { y: 0, h: cell, slots: 1, slotH: 0 },
    { y: cell, h: compute, slots: depths[COMPUTE], slotH: 0 },
    { y: cell + compute, h: inner - compute, slots: depths[COMMUNICATION], slotH: 0 },
  ];
  for (const lane of lanes) {
    lane.h -= row >= 16 && lane !== lanes[0] ? 1 : 0; // gap between lanes
    if (lane.h / lane.slots < 3) lane.slots = 1; // too thin: draw the slots over each other
    lane.slotH = lane.h / lane.slots;
  }
  const tops = Array.from({ length: rows }, (_, at) => row * at + HEADING * firsts.filter((first) => first <= at).length);
  const headings = firsts.map((at) => ({ host: hosts[at], y: tops[at] - HEADING }));
  return { row, gap, lanes, tops, headings, total: row * rows + HEADING * firsts.length };
}

/**
 * Add the visible part of a lane.
 *
 * @param {Rectangles} into
 * @param {Lane} lane
 * @param {{t0: number, t1: number}} view
 * @param {Box} box
 * @param {number} now end of open spans
 * @param {number} [pixel] smallest visible size
 * @param {number} [least] the width of the narrowest bar
 */
export function collect(into, lane, view, box, now, pixel = 1, least = MERGE_PX) {
  const { t0, t1 } = view;
  const scale = box.width / (t1 - t0);
  const right = box.x + box.width;
  const until = lane.until(t1);
  const { start, end, kind, wait, state, slot } = lane;
  const air = box.slotH >= 6 ? 1 : 0;
  let merging = false;
  roomEnds.fill(-Infinity);
  lastWide.fill(undefined);
  for (let i = lane.from(t0); i < until; i++) {
    const stop = end[i] === Infinity ? Math.max(now, start[i]) : end[i];
    if (stop < t0) continue;
    const length = (stop - start[i]) * scale;
    const isWaitKnown = wait[i] > 0;
    if (length < least && end[i] !== Infinity && state[i] !== FAILED) {
      if (!merging) {
        merging = true;
        openShares(box);
      }
      const waited = isWaitKnown ? Math.min(wait[i], stop - start[i]) : 0;
      if (waited) share(WAITING, (start[i] - t0) * scale, (start[i] + waited - t0) * scale);
      share(kind[i], (start[i] + waited - t0) * scale, (stop - t0) * scale);
      into.merged++;
      continue;
    }
    into.single++;
    let x = box.x + (start[i] - t0) * scale;
    let w = length;
    if (x < box.x - 2) {
      w -= box.x - 2 - x; // an edge outside of the picture stays outside
      x = box.x - 2;
    }
    w = Math.min(w, right + 2 - x);
    // A gap of one pixel separates two neighbours.
    if (length >= 4) w -= pixel;
    w = Math.max(w, pixel);
    const y = box.y + (box.slots > 1 ? slot[i] * box.slotH : 0);
    const h = Math.max(box.slotH - air, 1);
    let meaning = kind[i];
    // A call under way may be waiting or moving data. This is known only after it has ended.
    if (meaning >= EXECUTION) meaning = state[i] === FAILED ? FAILURE : end[i] === Infinity ? UNDER_WAY : meaning;
    let bodyX = x, bodyW = w;
    if (isWaitKnown && meaning === kind[i]) {
      const edge = Math.min(box.x + (start[i] + wait[i] - t0) * scale, x + w);
      if (edge > x) {
        into.push(WAITING, x, y, edge - x, h);
        bodyX = edge;
        bodyW = x + w - edge;
      }
    }
    // A send is drawn in the upper half of its slot, a receive in the lower half.
    const isHalf = h >= 6 && kind[i] > TRANSFER && kind[i] < REMOTE_CALL;
    const bodyY = isHalf && kind[i] === TRANSFER + 2 ? y + h * 0.35 : y;
    const bodyH = isHalf ? h * 0.65 : h;
    if (bodyW > 0) into.push(meaning, bodyX, bodyY, bodyW, bodyH);
    if (end[i] === Infinity) into.open.push({ x: x + w, y, h });
    // Bars that share a slot may overlap. Text is placed in the part that belongs to one bar only.
    const place = box.slots > 1 ? slot[i] : 0;
    const before = lastWide[place];
    if (before) before.w = Math.min(before.w, x - before.x);
    if (w >= 16 && bodyH >= 9) {
      const isBody = bodyW >= w - bodyW;
      const from = Math.max(isBody ? bodyX : x, roomEnds[place]);
      const wide = { lane, at: i, x: from, y: isBody ? bodyY : y, w: (isBody ? x + w : bodyX) - from, h: isBody ? bodyH : h, meaning: isBody ? meaning : WAITING };
      if (wide.w > 0) into.wide.push((lastWide[place] = wide));
    }
    roomEnds[place] = Math.max(roomEnds[place], x + w);
  }
  if (merging) closeShares(into, box, pixel, FIRST_OF[lane.which], FIRST_OF[lane.which + 1]);
}

/** By slot: the end of the bars so far, and the last bar with space for text. */
const roomEnds = new Float64Array(MOST_SLOTS);
/** @type {(Wide|undefined)[]} */
const lastWide = new Array(MOST_SLOTS).fill(undefined);

// ---- columns of merged spans: the share of each meaning in the column's time

let shares = new Float32Array(0); // (columns, N)
let firstColumn = 0, lastColumn = -1, columnCount = 0, columnWidth = MERGE_PX;

/** @param {Box} box */
function openShares({ width, column = MERGE_PX }) {
  columnWidth = column;
  columnCount = Math.ceil(width / columnWidth);
  if (shares.length < columnCount * N) shares = new Float32Array(columnCount * N);
  firstColumn = columnCount;
  lastColumn = -1;
}

/** Add a share to the columns from x0 to x1. @param {number} meaning @param {number} x0 @param {number} x1 */
function share(meaning, x0, x1) {
  const a = Math.max(x0, 0) / columnWidth;
  const b = Math.min(x1 / columnWidth, columnCount);
  let column = Math.min(Math.floor(a), columnCount - 1);
  if (column < firstColumn) firstColumn = column;
  // A span without length must be visible too.
  shares[column * N + meaning] += Math.max(Math.min(b, column + 1) - a, 1e-6);
  while (++column < b) shares[column * N + meaning] += Math.min(b - column, 1);
  if (column - 1 > lastColumn) lastColumn = column - 1;
}

/**
 * Merge adjacent stacks of equal height into one rectangle. Meanings are those from `k0` to before `k1`.
 * @param {Rectangles} into @param {Box} box @param {number} pixel @param {number} k0 @param {number} k1
 */
function closeShares(into, box, pixel, k0, k1) {
  const steps = Math.max(1, Math.round(box.h / pixel)); // heights are whole pixels
  const heights = new Int32Array(N), before = new Int32Array(N);
  let runStart = firstColumn;
  for (let column = firstColumn; column <= lastColumn + 1; column++) {
    const isInside = column <= lastColumn;
    if (isInside && stack(column, steps, heights, k0, k1)) into.columns++;
    let isSame = isInside && column > firstColumn;
    for (let k = k0; k < k1 && isSame; k++) isSame = heights[k] === before[k];
    if (isSame) continue;
    if (column > firstColumn) emit(into, box, before, runStart, column, steps, k0, k1);
    runStart = column;
    before.set(heights);
  }
  shares.fill(0, firstColumn * N, (lastColumn + 1) * N);
}

/**
 * Compute the heights of the parts of a column. Return whether there are any.
 * @param {number} column @param {number} steps @param {Int32Array} heights filled in @param {number} k0 @param {number} k1
 */
function stack(column, steps, heights, k0, k1) {
  let sum = 0, largest = k0, used = 0;
  const at = column * N;
  for (let k = k0; k < k1; k++) {
    sum += shares[at + k];
    if (shares[at + k] > shares[at + largest]) largest = k;
  }
  const scale = sum > 1 ? steps / sum : steps; // overlapping spans: scale to their sum
  for (let k = k0; k < k1; k++) used += heights[k] = Math.round(shares[at + k] * scale);
  if (sum && !used) heights[largest] = 1; // smallest visible height
  else if (used > steps) heights[largest] -= used - steps; // rounding error
  return sum > 0;
}

/**
 * @param {Rectangles} into @param {Box} box @param {Int32Array} heights @param {number} from column @param {number} to
 * @param {number} steps @param {number} k0 @param {number} k1
 */
function emit(into, box, heights, from, to, steps, k0, k1) {
  const x = box.x + from * columnWidth;
  const w = Math.min(to * columnWidth, box.width) - from * columnWidth;
  let top = steps;
  for (let k = k0; k < k1; k++) {
    if (heights[k] < 1) continue;
    top -= heights[k];
    into.push(k, x, box.y + (top * box.h) / steps, w, (heights[k] * box.h) / steps);
  }
}

/**
 * The span at a position of a lane, and the number of other spans in its pixel column.
 *
 * @param {Lane} lane
 * @param {number} time
 * @param {number} slot -1: any
 * @param {number} msPerPixel
 * @param {number} now
 * @param {number} [least] the width of the narrowest bar
 * @returns {{at: number, count: number} | null}
 */
export function hit(lane, time, slot, msPerPixel, now, least = MERGE_PX) {
  const reach = 2 * msPerPixel;
  const until = lane.until(time + reach);
  let best = -1, bestAway = Infinity, count = 0;
  for (let i = lane.from(time - reach); i < until; i++) {
    const stop = lane.end[i] === Infinity ? now : lane.end[i];
    if (stop < time - reach) continue;
    if (stop - lane.start[i] < least * msPerPixel) count++;
    const away = Math.max(lane.start[i] - time, time - stop, 0) + (slot >= 0 && lane.slot[i] !== slot ? 3 * reach : 0);
    // For nested spans, the innermost one, which starts last.
    if (away <= bestAway && away <= reach) {
      best = i;
      bestAway = away;
    }
  }
  return best < 0 ? null : { at: best, count };
}
