/** How the time of each step was spent, and when its buckets were under way. Pure functions. */

import { GOING_ON } from "./run.js";
import { COLLECTIVE, KINDS, PARTS } from "./tables.js";

/** @typedef {{cell: number, step: number, parts: number[], duration: number, ranks: number[]}} Bar parts: ms, in the order of PARTS */
/** @typedef {ReturnType<typeof bucketsOf>["buckets"][number]} Bucket */

const SAME_MS = 5e-3; // times in messages are rounded
const BACKWARD = KINDS.indexOf("backward");

/**
 * The parts of a row of the table of steps, in the order of PARTS, in ms. They add up to the duration of the step:
 * compute during communication is `overlapped`.
 * @param {Record<string, any>} columns
 * @param {number} index
 * @returns {number[]}
 */
function partsOf(columns, index) {
  const compute = columns.compute[index];
  const hidden = Math.min(columns.overlapped[index], compute);
  return PARTS.map((part) => (part === "compute" ? compute - hidden : part === "overlapped" ? hidden : columns[part][index]));
}

/**
 * Request once the steps that did not fit the snapshot. When no cell runs any more, request those that were left out
 * during the cell.
 * @param {import("./store.js").Store} store
 * @param {{canSend: boolean, ask: (message: Record<string, any>) => number}} env
 */
export function askForSteps(store, env) {
  const leftOut = store.notes.rows_left_out ?? 0;
  const isThinned = leftOut > store.rowsLeftOutAsked && !GOING_ON.has(store.state);
  if (!env.canSend || store.state === "gone" || store.stepsAsked || !(store.stepsLeftOut || isThinned)) return;
  store.stepsAsked = true;
  store.rowsLeftOutAsked = leftOut;
  env.ask({ kind: "ask", what: "steps" });
}

/**
 * Mean of the ranks that have finished the step.
 * @param {import("./store.js").Store} store
 * @param {import("./tables.js").StepEntry} entry
 * @param {Set<number>|null} ranks
 * @returns {Bar|null} null if no rank has finished it
 */
export function barOf(store, entry, ranks) {
  const known = entry.bar;
  if (known && known.revision === entry.revision && known.ranks === ranks && known.frozen === store.frozen) return known.value;
  const value = newBar(store, entry, ranks);
  // Cached, because the bars of all ranks, or of the same choice, are drawn repeatedly.
  entry.bar = { revision: entry.revision, ranks, frozen: store.frozen, value };
  return value;
}

/**
 * The same without the cache.
 * @param {import("./store.js").Store} store
 * @param {import("./tables.js").StepEntry} entry
 * @param {Set<number>|null} ranks
 * @returns {Bar|null}
 */
export function newBar(store, entry, ranks) {
  const { columns } = store.tables.step;
  const sum = PARTS.map(() => 0);
  const found = [];
  let duration = 0;
  for (const [rank, index] of store.indexesOf("step", entry.numbers)) {
    if (ranks && !ranks.has(rank)) continue;
    found.push(rank);
    duration += columns.duration[index];
    partsOf(columns, index).forEach((part, at) => (sum[at] += part));
  }
  if (!found.length) return null;
  const count = found.length;
  return { cell: entry.cell, step: entry.step, parts: sum.map((part) => part / count), duration: duration / count, ranks: found };
}

/**
 * The buckets of a step on one rank: their times, and which part was waiting, hidden by compute, or exposed. After the
 * last bucket was issued, the backward pass only waits, so from then on all communication is exposed.
 * @param {import("./store.js").Store} store
 * @param {{cell: number, step: number}} step
 * @param {number} rank
 */
export function bucketsOf(store, step, rank) {
  const rows = store.bucketsOf(step.cell, step.step).filter((row) => row.rank === rank);
  if (!rows.length) return { backward: null, buckets: [], lastIssue: 0, from: 0, to: 0 };
  const first = Math.min(...rows.map((row) => row.start));
  const last = Math.max(...rows.map((row) => (Number.isNaN(row.end) ? row.start : row.end)));
  /** @type {[number, number]|null} */
  let backward = null;
  const lastIssue = Math.max(...rows.map((row) => row.start));
  /** @type {[number, number][]} */
  const waits = [];
  const { kind, start, end, wait } = store.tables.span.columns;
  for (const index of store.spansIn(first - 1e-3, last + 1e-3, rank)) {
    if (kind[index] === BACKWARD) {
      const to = Number.isNaN(end[index]) ? store.now : end[index];
      backward = backward ? [Math.min(backward[0], start[index]), Math.max(backward[1], to)] : [start[index], to];
    } else if (kind[index] === COLLECTIVE) waits.push([start[index], wait[index]]);
  }
  const buckets = rows
    .sort((a, b) => a.start - b.start || a.bucket - b.bucket)
    .map((row) => {
      const isOpen = Number.isNaN(row.end);
      const to = isOpen ? Math.max(store.now, row.start) : row.end;
      const known = nearest(waits, row.start);
      const arrived = Math.min(to, row.start + (known !== undefined && known > 0 ? known : 0));
      const hidden = Math.min(Math.max(arrived, lastIssue), to);
      return {
        bucket: row.bucket,
        nbytes: row.nbytes,
        names: store.parametersOf(row.model, row.bucket, row.start),
        start: row.start,
        end: to,
        isOpen,
        wait: known === undefined ? NaN : known,
        arrived,
        hidden,
      };
    });
  return { backward, buckets, lastIssue, from: Math.min(backward?.[0] ?? first, first), to: Math.max(backward?.[1] ?? last, ...buckets.map((one) => one.end)) };
}

/** The wait of the call that starts with the bucket. @param {[number, number][]} waits @param {number} start */
function nearest(waits, start) {
  return waits.find(([its]) => Math.abs(its - start) < SAME_MS)?.[1];
}
