/**
 * Connections between rows: the ribbon of a collective, which joins its calls on all ranks, and the arrows of a remote
 * call.
 *
 * The left edge of a ribbon shows when each rank arrived, the right edge when each was done. A rank that all others
 * wait for is a dent to the right.
 *
 * One arrow goes from the caller's bar to the start of its callee, one from the end of the callee back to the caller.
 * Some calls have no recorded callee (an operator, a fetch), so their execution time is not known. Their arrows are
 * dashed and meet half way.
 */

import { isSameName, nameAt } from "../data/names.js";
import { COMMUNICATION, COMPUTE, lowerBound } from "../data/lanes.js";
import { COLLECTIVE, EXECUTION, REMOTE_CALL } from "../data/tables.js";

/** If more collectives are visible, only the chosen one and the one under the pointer have a ribbon. */
export const MOST_RIBBONS = 16;

const NEAR = 256; // spans on both sides that are searched for the other end
const MOST_ARROWS = 48; // if more calls are visible, only the chosen one and the one under the pointer have arrows
const LEAST_ROW_PX = 12; // minimum row height for all arrows
const FAR_PX = 2000; // coordinates are clamped to this distance, because canvases lose precision far outside

/** @typedef {import("../data/names.js").Name} Name */
/** @typedef {{rank: number, row: number, lane: import("../data/lanes.js").Lane, at: number}} Call */
/** @typedef {{row: number, x0: number, x1: number, top: number, bottom: number}} Bar  of a call: CSS pixels */
/** @typedef {{caller: Call, callee: Call|null, row: number}} Ends  row: the callee's */
/** @typedef {{x0: number, y0: number, x1: number, y1: number, isLoose: boolean, isChosen: boolean}} Arrow  CSS pixels */

/**
 * The calls of a collective by rank. A rank that has not called it is left out.
 *
 * @param {import("../data/lanes.js").Lanes} lanes
 * @param {import("../data/table.js").Table} table spans
 * @param {Name} name
 * @param {number[]} ranks
 * @param {number} [around] time of one of the calls, near which the others are searched
 * @returns {Call[]}
 */
export function callsOf(lanes, table, name, ranks, around) {
  /** @type {Call[]} */
  const found = [];
  ranks.forEach((rank, row) => {
    const lane = lanes.of(rank)[COMMUNICATION];
    const is = /** @param {number} i */ (i) => {
      if (lane.kind[i] !== COLLECTIVE) return false;
      const at = table.find(lane.row[i]);
      return at >= 0 && isSameName(nameAt(table.columns, at), name);
    };
    const at = nearest(lane, is, around);
    if (at >= 0) found.push({ rank, row, lane, at });
  });
  return found;
}

/**
 * Index of the span of a lane that matches, searched outwards from a likely time, or backwards from the newest span. -1
 * if no near span matches.
 *
 * @param {import("../data/lanes.js").Lane} lane
 * @param {(at: number) => boolean} is
 * @param {number} [around] likely time of the span
 */
export function nearest(lane, is, around) {
  const begin = around === undefined ? lane.length - 1 : lowerBound(lane.start, lane.length, around);
  const most = around === undefined ? lane.length : NEAR;
  const isIt = /** @param {number} at */ (at) => at >= 0 && at < lane.length && is(at);
  for (let away = 0; away < most && (begin - away >= 0 || begin + away < lane.length); away++) {
    if (isIt(begin - away)) return begin - away;
    if (isIt(begin + away)) return begin + away;
  }
  return -1;
}

/**
 * The collectives that begin in the window on this rank, up to `most` of them; null if there are more.
 *
 * @param {import("../data/lanes.js").Lane} lane of communication
 * @param {import("../data/table.js").Table} table
 * @param {{t0: number, t1: number}} view
 * @param {number} most
 * @returns {(Name & {around: number})[] | null}
 */
export function collectivesIn(lane, table, { t0, t1 }, most) {
  const found = [];
  const until = lane.until(t1);
  for (let i = lane.from(t0); i < until; i++) {
    if (lane.kind[i] !== COLLECTIVE || lane.end[i] < t0) continue;
    if (found.length === most) return null;
    const at = table.find(lane.row[i]);
    if (at >= 0) found.push({ ...nameAt(table.columns, at), around: lane.start[i] });
  }
  return found;
}

/**
 * The parts of a ribbon, one between each two calls: left and right edge above, right and left edge below. A part that
 * crosses a row without the call is loose: that rank is not in the group, or has not called yet.
 *
 * @param {Bar[]} bars of one collective, in the order of the rows
 * @returns {{corners: number[], isLoose: boolean}[]} corners: x, y of the four
 */
export function ribbon(bars) {
  const parts = [];
  for (let i = 1; i < bars.length; i++) {
    const above = bars[i - 1], below = bars[i];
    const corners = [above.x0, above.bottom, above.x1, above.bottom, below.x1, below.top, below.x0, below.top];
    parts.push({ corners, isLoose: below.row - above.row > 1 });
  }
  return parts;
}

// ---- remote calls

/**
 * Both ends of a remote call, from either end. null if the span is not a remote call, or if its callee is hidden,
 * unknown or the caller itself.
 *
 * @param {import("../data/lanes.js").Lanes} lanes
 * @param {import("../data/table.js").Table} table spans
 * @param {number[]} ranks
 * @param {Call} one of its bars
 * @returns {Ends|null}
 */
export function endsOf(lanes, table, ranks, one) {
  const isCaller = one.lane.kind[one.at] === REMOTE_CALL;
  if (!isCaller && one.lane.kind[one.at] !== EXECUTION) return null;
  const index = table.find(one.lane.row[one.at]);
  const peer = index < 0 ? -1 : table.columns.peer[index];
  const row = ranks.indexOf(peer);
  if (row < 0 || peer === one.rank) return null;
  const lane = lanes.of(peer)[isCaller ? COMPUTE : COMMUNICATION];
  const kind = isCaller ? EXECUTION : REMOTE_CALL, call = one.lane.call[one.at];
  const at = nearest(lane, (i) => lane.kind[i] === kind && lane.call[i] === call, one.lane.start[one.at]);
  const other = at < 0 ? null : { rank: peer, row, lane, at };
  if (isCaller) return { caller: one, callee: other, row };
  return other && { caller: other, callee: one, row: one.row };
}

/**
 * The remote calls of these rows in the window; empty if there are more than `most`.
 *
 * @param {import("../data/lanes.js").Lanes} lanes
 * @param {import("../data/table.js").Table} table spans
 * @param {number[]} ranks
 * @param {{t0: number, t1: number}} view
 * @param {number} most
 * @returns {Ends[]}
 */
function callsBetween(lanes, table, ranks, { t0, t1 }, most) {
  const found = [];
  for (const [row, rank] of ranks.entries()) {
    const lane = lanes.of(rank)[COMMUNICATION];
    const until = lane.until(t1);
    for (let at = lane.from(t0); at < until; at++) {
      if (lane.kind[at] !== REMOTE_CALL || lane.end[at] < t0) continue;
      if (found.length === most) return [];
      const ends = endsOf(lanes, table, ranks, { rank, row, lane, at });
      if (ends) found.push(ends);
    }
  }
  return found;
}

/**
 * All arrows of a picture.
 *
 * @param {import("./timeline_draw.js").Scene} scene
 * @param {import("../data/lanes.js").Lanes} lanes
 * @param {import("../data/table.js").Table} table spans
 * @param {(Ends|null)[]} chosen highlighted calls, such as the one under the pointer
 * @param {number} now end of open spans
 * @returns {Arrow[]}
 */
export function arrowsIn(scene, lanes, table, chosen, now) {
  const all = scene.layout.row < LEAST_ROW_PX ? [] : callsBetween(lanes, table, scene.ranks, scene.view, MOST_ARROWS);
  /** @type {Ends[]} */
  const told = [];
  const isIn = /** @param {Ends[]} some @param {Ends} one */ (some, { caller }) => some.some((other) => other.caller.lane === caller.lane && other.caller.at === caller.at);
  for (const one of chosen) if (one && !isIn(told, one)) told.push(one);
  const others = all.filter((one) => !isIn(told, one));
  return [...others.flatMap((one) => arrowsOf(scene, one, now, false)), ...told.flatMap((one) => arrowsOf(scene, one, now, true))];
}

/**
 * The two arrows of a call: there and back.
 *
 * @param {import("./timeline_draw.js").Scene} scene
 * @param {Ends} ends
 * @param {number} now
 * @param {boolean} isChosen
 * @returns {Arrow[]}
 */
function arrowsOf(scene, { caller, callee, row }, now, isChosen) {
  const { view, left, width } = scene;
  const x = /** @param {number} time */ (time) => Math.min(Math.max(left + ((time - view.t0) / (view.t1 - view.t0)) * (width - left), -FAR_PX), width + FAR_PX);
  const sent = caller.lane.start[caller.at], returned = Math.min(caller.lane.end[caller.at], now);
  const begun = callee ? callee.lane.start[callee.at] : (sent + returned) / 2;
  const ended = callee ? Math.min(callee.lane.end[callee.at], now) : begun;
  const its = edgesOf(scene, caller.row, COMMUNICATION, caller.lane.slot[caller.at]);
  const theirs = edgesOf(scene, row, COMPUTE, callee ? callee.lane.slot[callee.at] : 0);
  const [from, to] = row > caller.row ? [its.bottom, theirs.top] : [its.top, theirs.bottom];
  const of = { isLoose: !callee, isChosen };
  return [{ x0: x(sent), y0: from, x1: x(begun), y1: to, ...of }, { x0: x(ended), y0: to, x1: x(returned), y1: from, ...of }];
}

/**
 * Edges of a bar.
 * @param {import("./timeline_draw.js").Scene} scene
 * @param {number} row
 * @param {number} which lane
 * @param {number} slot
 */
function edgesOf({ layout, top, scroll }, row, which, slot) {
  const part = layout.lanes[which];
  const y = top + layout.tops[row] - scroll + part.y + (part.slots > 1 ? slot * part.slotH : 0);
  return { top: y, bottom: y + part.slotH };
}
