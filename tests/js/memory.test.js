import assert from "node:assert/strict";
import { COLLECTIVE } from "../../ddp_notebook/widgets/js/data/tables.js";
import { test } from "node:test";
import { Series } from "../../ddp_notebook/widgets/js/data/courses.js";
import { Store } from "../../ddp_notebook/widgets/js/data/store.js";
import { Table } from "../../ddp_notebook/widgets/js/data/table.js";
import { TEXTS, deliver, metric, span, step } from "./messages.js";

const RANKS = 64;

/** The rows of one step of 64 ranks in a message. @param {number} at */
function rowsOfStep(at) {
  const ranks = Array.from({ length: RANKS }, (_, rank) => rank);
  const more = { step: at, cell: 1 };
  return {
    metric: ranks.map((rank) => metric(rank, at, 1 / (at + 1) + rank / 1e4)),
    step: ranks.map((rank) => step(rank, at)),
    bucket: ranks.flatMap((rank) => [0, 1].map((bucket) => ({ rank, ...more, bucket, nbytes: 1e6, start: at * 100, end: at * 100 + 20, model: 4 }))),
    span: ranks.flatMap((rank) => [1, 2, 3, COLLECTIVE].map((kind) => span(rank, kind, at * 100 + kind, at * 100 + kind + 9, { ...more, call: at, number: at, op: 2, group: 3, wait: 1 }))),
    value: ranks.slice(0, 8).map((rank) => ({ rank, op: 2, group: 3, number: at, side: 0, count: 2, first: [1, 2] })),
  };
}

function bytesOf(store) {
  return Object.values(store.tables).reduce((sum, table) => sum + Object.values(table.columns).reduce((all, column) => all + column.byteLength, 0), 0);
}

test("half an hour of 64 ranks is kept in bounded memory", { timeout: 120_000 }, () => {
  const store = new Store();
  const messages = 30 * 60 * 10;
  const sizes = [];
  for (let seq = 1; seq <= messages; seq++) {
    // Each tenth message contains a step: 1800 steps, 920 000 rows.
    const rows = seq % 10 === 0 ? rowsOfStep(seq / 10) : {};
    deliver(store, { seq, texts: seq === 1 ? TEXTS : [], world_size: RANKS, now_ms: seq * 100 }, rows);
    if (seq % (messages / 6) === 0) {
      sizes.push({ bytes: bytesOf(store), collectives: store.collectiveIndex.size, steps: store.steps().length, own: store.spansOfRank[5].length });
    }
  }
  assert.ok(sizes[5].bytes <= 70e6, `${sizes[5].bytes} bytes of tables`);
  // From the fourth of six measurements on, the tables no longer grow.
  assert.equal(sizes[5].bytes, sizes[3].bytes);
  assert.ok(sizes[5].steps <= 65536 / RANKS + 1, `${sizes[5].steps} steps`);
  assert.ok(sizes[5].own <= 1.4 * (131072 / RANKS), `${sizes[5].own} rows of a rank`);
  const series = store.pointsOf(store.shownRuns("loss")[0]);
  assert.equal(series.size, RANKS);
  assert.equal(series.get(0).steps[0], 1, "the whole course is kept");
  assert.equal(store.stepOf(1, 1), undefined, "old steps are let go");
  assert.equal(store.rowsOf(store.stepOf(1, 1800)).length, RANKS);
});

test("a table keeps its newest rows, and their numbers find them", () => {
  const table = new Table([["x", Float64Array]], 100);
  for (let at = 0; at < 1000; at += 10) {
    const x = Float64Array.from({ length: 10 }, (_, more) => at + more);
    table.append({ rows: 10, columns: { x }, widths: { x: 1 } });
  }
  assert.equal(table.length, 100);
  assert.equal(table.total, 1000);
  assert.equal(table.find(899), -1);
  assert.equal(table.columns.x[table.find(900)], 900);
  assert.equal(table.columns.x[table.find(999)], 999);
  assert.ok(table.capacity <= 150);
});

test("a message with more rows than a table keeps leaves its newest", () => {
  const table = new Table([["x", Float64Array]], 8);
  table.append({ rows: 20, columns: { x: Float64Array.from({ length: 20 }, (_, at) => at) }, widths: { x: 1 } });
  assert.deepEqual([...table.columns.x.slice(table.first, table.end)], [12, 13, 14, 15, 16, 17, 18, 19]);
});

test("a series outlives its limit: every point was logged, spikes and numbers that are none stay", () => {
  const series = new Series(256);
  const logged = new Map();
  for (let at = 0; at < 5000; at++) {
    const value = at === 17 ? 1000 : at === 1203 ? NaN : at === 4300 ? -1000 : Math.sin(at / 30);
    logged.set(at, value);
    series.add(at, value, at * 10);
  }
  const { steps, values } = series.until(Infinity);
  assert.ok(series.length <= 256);
  assert.equal(series.length + series.thinned, 5000);
  steps.forEach((at, index) => assert.ok(Object.is(values[index], logged.get(at)), `step ${at}`));
  assert.deepEqual([...steps], [...steps].sort((a, b) => a - b));
  const first = steps.filter((at) => at < 1000).length;
  assert.ok(first > 10 && first < 40, `${first} points of the first 1000 steps: the course is equally dense`);
  for (const at of [17, 1203, 4300, 4999]) assert.ok(steps.includes(at), `step ${at} is kept`);
});
