/**
 * Time of each step over all ranks, and the steps whose spans are missing here. Above its rate limit, the feed leaves
 * out the spans of whole steps, but not their times.
 */

import { COMMUNICATION, COMPUTE, lowerBound } from "./lanes.js";

/** @typedef {{cell: number, step: number, start: number, end: number}} StepMark */

const SETTLED_MS = 500; // spans of a step can arrive a little later than the step

export class StepMarks {
  constructor() {
    /** @type {StepMark[]} by start */
    this.marks = [];
    /** @type {Map<string, StepMark>} */
    this._byName = new Map();
    this._end = 0;
  }

  clear() {
    Object.assign(this, new StepMarks());
  }

  /** Add the new rows. @param {import("./table.js").Table} table */
  sync(table) {
    if (table.moved + table.first >= this._end || this.marks.length > table.length + 64) this.clear();
    const { cell, step, start, duration } = table.columns;
    let isInOrder = true;
    for (let at = Math.max(this._end - table.moved, table.first); at < table.end; at++) {
      const name = `${cell[at]}.${step[at]}`;
      const end = start[at] + duration[at];
      const known = this._byName.get(name);
      if (known) {
        known.start = Math.min(known.start, start[at]);
        known.end = Math.max(known.end, end);
        continue;
      }
      const mark = { cell: cell[at], step: step[at], start: start[at], end };
      this._byName.set(name, mark);
      isInOrder &&= !this.marks.length || this.marks[this.marks.length - 1].start <= mark.start;
      this.marks.push(mark);
    }
    if (!isInOrder) this.marks.sort((a, b) => a.start - b.start);
    this._end = table.moved + table.end;
  }

  /** @param {number} cell @param {number} step */
  of(cell, step) {
    return this._byName.get(`${cell}.${step}`);
  }

  /** Steps that touch the window. @param {{t0: number, t1: number}} view @returns {StepMark[]} */
  within({ t0, t1 }) {
    const { marks } = this;
    let low = 0, high = marks.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (marks[middle].end <= t0) low = middle + 1;
      else high = middle;
    }
    const found = [];
    for (; low < marks.length && marks[low].start < t1; low++) found.push(marks[low]);
    return found;
  }
}

/**
 * The steps without any span in this view.
 *
 * @param {StepMark[]} steps
 * @param {import("./lanes.js").Lane[][]} ranks lanes of the shown ranks
 * @param {number} newest the latest time that is known
 */
export function leftOut(steps, ranks, newest) {
  return steps.filter((step) => step.end < newest - SETTLED_MS && !ranks.some((lanes) => hasWork(lanes, step)));
}

/** @param {import("./lanes.js").Lane[]} lanes @param {StepMark} step */
function hasWork(lanes, { start, end }) {
  // Ignore the edges: a span of the neighbouring step may extend a little into this one.
  const edge = (end - start) / 50;
  return [COMPUTE, COMMUNICATION].some((which) => {
    const { start: starts, length } = lanes[which];
    const at = lowerBound(starts, length, start - edge);
    return at < length && starts[at] < end - edge;
  });
}
