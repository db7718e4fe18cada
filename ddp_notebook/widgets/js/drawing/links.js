/**
 * The same collective on every rank: where its calls are, and the ribbon that joins them.
 *
 * A ribbon runs from row to row. Its left edge is when each rank arrived, its right edge when each was done: a rank that
 * all others wait for is a dent to the right.
 */

import { isSameName, nameAt } from "../data/names.js";
import { COMMUNICATION, lowerBound } from "../data/lanes.js";
import { COLLECTIVE } from "../data/tables.js";

/** With more collectives than this in sight, only the chosen and the one under the pointer have a ribbon. */
export const MOST_RIBBONS = 16;

const NEAR = 256; // calls to both sides among which the same collective of another rank is sought

/** @typedef {import("../data/names.js").Name} Name */
/** @typedef {{rank: number, row: number, lane: import("../data/lanes.js").Lane, at: number}} Call */
/** @typedef {{row: number, x0: number, x1: number, top: number, bottom: number}} Bar  of a call: CSS pixels */

/**
 * Its calls, by rank; a rank that has not called it is not there.
 *
 * @param {import("../data/lanes.js").Lanes} lanes
 * @param {import("../data/table.js").Table} table spans
 * @param {Name} name
 * @param {number[]} ranks
 * @param {number} [around] time at which one of the calls is: all others are sought from there
 * @returns {Call[]}
 */
export function callsOf(lanes, table, name, ranks, around) {
  /** @type {Call[]} */
  const found = [];
  ranks.forEach((rank, row) => {
    const lane = lanes.of(rank)[COMMUNICATION];
    const is = /** @param {number} i */ (i) => {
      if (i < 0 || i >= lane.length || lane.kind[i] !== COLLECTIVE) return false;
      const at = table.find(lane.row[i]);
      return at >= 0 && isSameName(nameAt(table.columns, at), name);
    };
    // Outwards from the likely place; without one, backwards from the newest call.
    const begin = around === undefined ? lane.length - 1 : lowerBound(lane.start, lane.length, around);
    const most = around === undefined ? lane.length : NEAR;
    for (let away = 0; away < most && (begin - away >= 0 || begin + away < lane.length); away++) {
      const at = is(begin - away) ? begin - away : is(begin + away) ? begin + away : -1;
      if (at < 0) continue;
      found.push({ rank, row, lane, at });
      break;
    }
  });
  return found;
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
 * passes by a row without the call is loose: that rank is not in the group, or has not come.
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
