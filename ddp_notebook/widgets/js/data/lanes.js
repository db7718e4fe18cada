/**
 * Spans sorted by start, in one lane per rank and purpose, so that a binary search finds the spans of a window.
 *
 * A lane is a struct of arrays. Deltas usually append to it. An answer of the kernel for a time that was left out
 * inserts spans in between. Overlapping spans of a lane get slots below each other.
 */

/** The lanes of a rank, and the lane of each kind of spans. */
export const CELL = 0, COMPUTE = 1, COMMUNICATION = 2;
const LANE_OF = [CELL, COMPUTE, COMPUTE, COMPUTE, COMPUTE, COMPUTE, COMPUTE, COMPUTE, COMPUTE, COMPUTE, COMMUNICATION, COMMUNICATION, COMMUNICATION, COMMUNICATION];
/** Further overlapping spans share the last slot. */
export const MOST_SLOTS = 4;
/** `state` of a span of communication. */
export const ISSUED = 0, FAILED = 2, UNWAITED = 3;

const SAME_MS = 0.01; // spans of one kind that differ by less are the same span
const COLUMNS = /** @type {const} */ (["start", "end", "row", "call", "wait", "kind", "state"]);
const SETTLED = /** @type {const} */ (["reach", "slot"]); // columns that `settle` fills

export class Lane {
  /** @param {number} which CELL, COMPUTE or COMMUNICATION */
  constructor(which = COMPUTE) {
    this.which = which;
    this.length = 0;
    this.depth = 1; // slots in use
    this.start = new Float64Array(32);
    this.end = new Float64Array(32); // Infinity: still open
    this.reach = new Float64Array(32); // latest end of this span and all earlier ones
    this.row = new Float64Array(32); // row number in the store's table
    this.call = new Float64Array(32);
    this.wait = new Float32Array(32); // NaN: unknown
    this.kind = new Uint8Array(32);
    this.state = new Uint8Array(32);
    this.slot = new Uint8Array(32);
    this._slotEnds = new Float64Array(MOST_SLOTS).fill(-Infinity);
    this._settled = 0;
    this._lastSettled = 0;
    this.openCount = 0;
  }

  /** Double the capacity. */
  _grow() {
    for (const name of /** @type {const} */ (["start", "end", "reach", "row", "call"])) this[name] = joined(this[name], new Float64Array(2 * this[name].length));
    this.wait = joined(this.wait, new Float32Array(2 * this.wait.length));
    for (const name of /** @type {const} */ (["kind", "state", "slot"])) this[name] = joined(this[name], new Uint8Array(2 * this[name].length));
  }

  /**
   * Insert a new span, or update a known one: an open span, or one that an answer of the kernel repeats, possibly with
   * differently rounded times.
   *
   * @param {{start: number, end: number, kind: number, wait: number, state: number, call: number, row: number}} span
   */
  insert({ start, end, kind, wait, state, call, row }) {
    // The end of an unwaited call is never known: it is drawn as a mark at its start.
    const known = Number.isNaN(end) ? (state === UNWAITED ? start : Infinity) : end;
    let at = this._find(start, known, kind, call);
    if (at < 0) at = this._make(start);
    else if (this.end[at] === Infinity && known !== Infinity) this.openCount--;
    if (known === Infinity && this.end[at] !== Infinity) this.openCount++;
    this.end[at] = known;
    this.kind[at] = kind;
    this.wait[at] = wait;
    this.state[at] = state;
    this.call[at] = call;
    this.row[at] = row;
    this._settled = Math.min(this._settled, at);
  }

  /**
   * Index of this span, -1 if it is new.
   * @param {number} start
   * @param {number} end
   * @param {number} kind
   * @param {number} call
   */
  _find(start, end, kind, call) {
    for (let i = this.length - 1; i >= 0 && this.start[i] >= start - SAME_MS; i--) {
      if (this.start[i] > start + SAME_MS || this.kind[i] !== kind) continue;
      const isOver = this.end[i] !== Infinity && end !== Infinity;
      if (call > 0 ? this.call[i] === call : !isOver || Math.abs(this.end[i] - end) <= SAME_MS) return i;
    }
    return -1;
  }

  /** Make space for a span that starts at this time. @param {number} start @returns {number} its index */
  _make(start) {
    if (this.length === this.start.length) this._grow();
    let at = this.length;
    while (at > 0 && this.start[at - 1] > start) at--;
    for (const name of at < this.length ? COLUMNS : []) this[name].copyWithin(at + 1, at, this.length);
    this.start[at] = start;
    this.end[at] = start; // until the caller sets it
    this.length++;
    return at;
  }

  /** Drop the oldest spans, whose rows are before this one. @param {number} row */
  forget(row) {
    let gone = 0;
    while (gone < this.length && this.row[gone] < row && this.end[gone] !== Infinity) gone++;
    for (const name of gone ? [...COLUMNS, ...SETTLED] : []) this[name].copyWithin(0, gone, this.length);
    this.length -= gone;
    this._settled = Math.max(0, this._settled - gone);
    this._lastSettled = Math.max(0, this._lastSettled - gone);
  }

  /** Update reach and slots after inserts. */
  settle() {
    if (this._settled === this.length) return;
    let i = this._settled;
    if (i < this._lastSettled) {
      // A span was inserted before others: slots depend on all spans before them.
      i = 0;
      this._slotEnds.fill(-Infinity);
    }
    for (; i < this.length; i++) {
      this.reach[i] = Math.max(i ? this.reach[i - 1] : -Infinity, this.end[i]);
      let slot = 0;
      while (slot < MOST_SLOTS - 1 && this._slotEnds[slot] > this.start[i]) slot++;
      this._slotEnds[slot] = Math.max(this._slotEnds[slot], this.end[i]);
      this.slot[i] = slot;
      if (slot >= this.depth) this.depth = slot + 1;
    }
    this._settled = this._lastSettled = this.length;
  }

  /** Index of the first span that may be visible after `t0`. @param {number} t0 */
  from(t0) {
    return lowerBound(this.reach, Math.min(this._lastSettled, this.length), t0);
  }

  /** Index after the last span that starts before `t1`. @param {number} t1 */
  until(t1) {
    return lowerBound(this.start, this.length, t1);
  }
}

/**
 * @template {Float64Array|Float32Array|Uint8Array} T
 * @param {T} old
 * @param {T} larger
 * @returns {T} the larger array, which starts with the old values
 */
function joined(old, larger) {
  larger.set(old);
  return larger;
}

/**
 * Index of the first element of ascending `values` that is not below `value`.
 *
 * @param {ArrayLike<number>} values
 * @param {number} length number of values
 * @param {number} value
 */
export function lowerBound(values, length, value) {
  let low = 0, high = length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** The lanes of all ranks, synchronised with the store's table of spans. */
export class Lanes {
  constructor() {
    /** @type {Map<number, Lane[]>} */
    this.ranks = new Map();
    this.count = 0;
    this.first = Infinity; // the earliest start
    this.last = 0; // latest known time
    this.depths = [1, 1, 1];
    /** @type {Set<number>} */
    this.kinds = new Set(); // kinds of spans so far
    this._end = 0;
    /** @type {number[]} */
    this._open = []; // row numbers
  }

  clear() {
    Object.assign(this, new Lanes());
  }

  /**
   * Add the new rows.
   *
   * @param {import("./table.js").Table} table
   * @returns {boolean} whether there were any
   */
  sync(table) {
    const { columns, moved } = table;
    // In another run, all known spans are gone. In a long run, the oldest rows are gone.
    const grown = this.count + table.total - this._end;
    if (moved + table.first >= this._end) this.clear();
    else if (grown > 1.1 * table.length + 1024) this._forget(moved + table.first);
    /** @type {Set<Lane>} */
    const touched = new Set();
    for (const number of this._open) {
      const at = table.find(number);
      if (at >= 0 && !Number.isNaN(columns.end[at])) this._take(columns, at, number, touched);
    }
    this._open = this._open.filter((number) => Number.isNaN(columns.end[table.find(number)]));
    for (let at = Math.max(this._end - moved, table.first); at < table.end; at++) {
      this._take(columns, at, moved + at, touched);
      this.count++;
      if (Number.isNaN(columns.end[at]) && columns.state[at] !== UNWAITED) this._open.push(moved + at);
    }
    this._end = moved + table.end;
    for (const lane of touched) {
      lane.settle();
      this.depths[lane.which] = Math.max(this.depths[lane.which], lane.depth);
    }
    return touched.size > 0;
  }

  /** Drop spans that the store has dropped. @param {number} row number of its first row */
  _forget(row) {
    this.first = Infinity;
    this.count = 0;
    for (const lanes of this.ranks.values()) {
      for (const lane of lanes) {
        lane.forget(row);
        this.count += lane.length;
        if (lane.length) this.first = Math.min(this.first, lane.start[0]);
      }
    }
  }

  /** @param {Record<string, any>} columns @param {number} at @param {number} row @param {Set<Lane>} touched */
  _take(columns, at, row, touched) {
    const kind = columns.kind[at];
    const start = columns.start[at], end = columns.end[at];
    const lane = this.of(columns.rank[at])[LANE_OF[kind] ?? COMPUTE];
    lane.insert({ start, end, kind, wait: columns.wait[at], state: columns.state[at], call: columns.call[at], row });
    touched.add(lane);
    this.kinds.add(kind);
    this.first = Math.min(this.first, start);
    this.last = Math.max(this.last, Number.isNaN(end) ? start : end);
  }

  /** @param {number} rank */
  of(rank) {
    let lanes = this.ranks.get(rank);
    if (!lanes) this.ranks.set(rank, (lanes = [CELL, COMPUTE, COMMUNICATION].map((which) => new Lane(which))));
    return lanes;
  }

  /** Whether a span is still open. */
  get hasOpen() {
    for (const lanes of this.ranks.values()) if (lanes.some((lane) => lane.openCount > 0)) return true;
    return false;
  }
}
