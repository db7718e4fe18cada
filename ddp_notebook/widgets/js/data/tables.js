/**
 * The tables of the store with their row limits, and indexes of the rows of a step or a collective.
 *
 * The limits hold half an hour of 64 ranks in about 50 MB. Older rows are dropped, and the view shows from which time
 * on it has data. Metrics are kept for the whole time (`courses.js`).
 */

import { Table } from "./table.js";

const [U8, U16, U32, I32, F32, F64] = [Uint8Array, Uint16Array, Uint32Array, Int32Array, Float32Array, Float64Array];

export const KINDS = [
  "cell", "forward", "backward", "optimizer", "input", "input gradient", "weight gradient", "pipeline", "block",
  "execution", "collective", "send", "recv", "remote call",
];
/**
 * Units of a metric's steps: steps of the training loop or step numbers of the program, values, or steps of several
 * optimizers.
 */
export const STEP_UNITS = ["step", "value", "optimizer step"];
export const CELL = KINDS.indexOf("cell");
export const COLLECTIVE = KINDS.indexOf("collective");
/** The two ends of a remote call: the execution on the callee, and the call on the caller. */
export const EXECUTION = KINDS.indexOf("execution"), REMOTE_CALL = KINDS.indexOf("remote call");

/** The parts of a step, in drawing order. They add up to its duration. */
export const PARTS = ["input", "compute", "overlapped", "exposed", "waiting", "optimizer", "rest"];

/** @returns {{step: Table, bucket: Table, span: Table, value: Table}} */
export function makeTables() {
  const part = /** @param {string} name */ (name) => /** @type {import("./table.js").ColumnType} */ ([name, F32]);
  return {
    step: new Table(
      [
        ["rank", U16], ["cell", U32], ["step", U32], ["start", F64], part("duration"), part("input"), part("forward"),
        part("backward"), part("optimizer"), part("compute"), part("overlapped"), part("exposed"), part("waiting"),
        part("rest"), ["samples", I32],
      ],
      65536,
    ),
    bucket: new Table(
      [
        ["rank", U16], ["cell", U32], ["step", U32], ["bucket", U16], ["nbytes", F64], ["start", F64], ["end", F64],
        ["model", U32],
      ],
      65536,
    ),
    span: new Table(
      [
        ["rank", U16], ["kind", U8], ["name", U32], ["cell", U32], ["step", U32], ["start", F64], ["end", F64],
        ["thread", U16], ["op", U32], ["group", U32], ["number", U32], ["call", F64], ["nbytes", F64], ["wait", F32],
        ["origin", U8], ["site", U32], ["state", U8], ["left_out", U8],
        ["peer", I32],
        // Not in the feed: the latest end among the rank's rows so far, and the row that replaced this one.
        ["latest", F64], ["replaced", F64],
      ],
      131072,
    ),
    value: new Table(
      [
        ["rank", U16], ["call", F64], ["kind", U8], ["cell", U32], ["group", U32], ["number", U32], ["op", U32], ["side", U8],
        ["dtype", U32], ["shape", U32], ["numel", F64], ["looked_at", F64], ["low", F32], ["high", F32], ["mean", F32], ["nans", F64],
        ["infs", F64], ["count", U8], ["first", F32, 32],
      ],
      32768,
    ),
  };
}

/** Entry of an index or a map: the rows of one key. */
export class Entry {
  /** @param {[number, number]} order */
  constructor(order) {
    this.order = order;
    this.newest = -1; // number of the newest row
    this.revision = 0; // incremented for each row
    this.since = -1; // number of the first row; an entry that is newer than the start of a pause is not shown
  }
}

/** A step: its row of each rank, or its rows of each rank's buckets. */
export class StepEntry extends Entry {
  /** @param {number} cell @param {number} step */
  constructor(cell, step) {
    super([cell, step]);
    this.cell = cell;
    this.step = step;
    /** @type {Map<number, number>} */
    this.numbers = new Map(); // row number by rank, or by 65536 * rank + bucket
    /** @type {{revision: number, ranks: Set<number>|null, frozen: object|null, value: import("./steps.js").Bar|null}|null} */
    this.bar = null; // result of barOf
  }
}

/** A collective, send or receive. */
export class CollectiveEntry extends Entry {
  /** @param {import("./names.js").Name} name @param {number} start */
  constructor({ kind, cell, group, number }, start) {
    super([start, number]);
    this.kind = kind;
    this.cell = cell;
    this.group = group;
    this.number = number;
    this.op = 0; // number of a text
    this.start = start; // start on the first rank
    /** @type {Map<number, number>} */
    this.spans = new Map(); // number of the span's row, by rank
    /** @type {Map<number, number>} */
    this.values = new Map(); // number of the value's row, by 2 * rank + side
  }
}

/** The steps in a table, in the order of their cells and numbers. A step is dropped with its newest row. */
export class Index {
  /** @param {Table} table */
  constructor(table) {
    this.table = table;
    /** @type {Map<string, StepEntry>} */
    this.map = new Map();
    /** @type {StepEntry[]} */
    this.list = [];
    this.sorted = true;
  }

  /** @param {number} cell @param {number} step */
  get(cell, step) {
    return this.map.get(`${cell}:${step}`);
  }

  /**
   * The step of a row; created for its first row.
   * @param {number} cell
   * @param {number} step
   * @param {number} rowNumber
   */
  entry(cell, step, rowNumber) {
    const key = `${cell}:${step}`;
    let found = this.map.get(key);
    if (!found) {
      found = new StepEntry(cell, step);
      found.since = rowNumber;
      this.map.set(key, found);
      this.list.push(found);
      this.sorted &&= this.list.length < 2 || before(this.list[this.list.length - 2], found);
    }
    found.newest = Math.max(found.newest, rowNumber);
    found.revision++;
    return found;
  }

  /** All steps that have rows, sorted. */
  all() {
    if (!this.sorted) {
      this.list.sort((a, b) => (before(a, b) ? -1 : 1));
      this.sorted = true;
    }
    return this.list;
  }

  prune() {
    const oldest = this.table.moved + this.table.first;
    if (!this.list.some((entry) => entry.newest < oldest)) return;
    for (const [key, entry] of this.map) if (entry.newest < oldest) this.map.delete(key);
    this.list = this.list.filter((entry) => entry.newest >= oldest);
  }
}

/** @param {Entry} a @param {Entry} b */
function before(a, b) {
  return a.order[0] < b.order[0] || (a.order[0] === b.order[0] && a.order[1] <= b.order[1]);
}
