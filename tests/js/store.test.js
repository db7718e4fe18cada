import assert from "node:assert/strict";
import { test } from "node:test";
import { stateOf } from "../../ddp_notebook/widgets/js/parts/notices.js";
import { Store } from "../../ddp_notebook/widgets/js/data/store.js";
import { COLLECTIVE, KINDS } from "../../ddp_notebook/widgets/js/data/tables.js";
import { TEXTS, deliver, metric, span, step } from "./messages.js";

/** Return the points of the newest run of a metric, by rank. */
const points = (store, name) => store.pointsOf(store.shownRuns(name)[0]);
const RECV = KINDS.indexOf("recv");

const indexesOf = (store, t0, t1, rank) => [...store.spansIn(t0, t1, rank)];

test("metrics are kept by name and rank, loss first", () => {
  const store = new Store();
  deliver(store, { seq: 1, texts: [...TEXTS, [9, "accuracy"]] }, { metric: [metric(0, 0, 0.1, { name: 9 }), metric(0, 0, 4), metric(0, 1, 3), metric(1, 0, 5)] });
  assert.deepEqual(store.metricNames(), ["loss", "accuracy"]);
  const series = points(store, "loss");
  assert.deepEqual([...series.get(0).values], [4, 3]);
  assert.deepEqual([...series.get(1).steps], [0]);
});

test("a cell that counts its steps anew begins a new curve; one that goes on continues it", () => {
  const store = new Store();
  deliver(store, { seq: 1, texts: TEXTS }, { metric: [metric(0, 0, 4), metric(0, 1, 3)] });
  deliver(store, { seq: 2 }, { metric: [metric(0, 2, 2, { cell: 2 })] });
  assert.deepEqual([...points(store, "loss").get(0).steps], [0, 1, 2]);
  deliver(store, { seq: 3 }, { metric: [metric(0, 0, 9, { cell: 3 })] });
  assert.deepEqual([...points(store, "loss").get(0).values], [9]);
});

test("a missing message is noticed, asked for once, and a snapshot heals it", () => {
  const store = new Store();
  assert.equal(deliver(store, { seq: 1, texts: TEXTS }, { metric: [metric(0, 0, 4)] }), false);
  assert.equal(deliver(store, { seq: 3 }, { metric: [metric(0, 2, 2)] }), true);
  assert.equal(store.catchingUp, true);
  assert.equal(store.missed, 1);
  assert.equal(deliver(store, { seq: 4 }, { metric: [metric(0, 3, 1)] }), false, "asked twice within two seconds");
  deliver(store, { kind: "snapshot", seq: 4 }, { metric: [0, 1, 2, 3].map((at) => metric(0, at, 4 - at)) });
  assert.equal(store.catchingUp, false);
  assert.deepEqual([...points(store, "loss").get(0).values], [4, 3, 2, 1]);
});

test("who has seen everything takes nothing from a snapshot, and an old message changes nothing", () => {
  const store = new Store();
  deliver(store, { seq: 1, texts: TEXTS }, { metric: [metric(0, 0, 4)], step: [step(0, 0)] });
  deliver(store, { kind: "snapshot", seq: 1 }, { metric: [metric(0, 7, 7)] });
  deliver(store, { seq: 1 }, { metric: [metric(0, 8, 8)] });
  assert.deepEqual([...points(store, "loss").get(0).steps], [0]);
});

test("a view that is opened late is complete with the snapshot", () => {
  const store = new Store();
  assert.equal(deliver(store, { seq: 57, texts: TEXTS }), true);
  assert.equal(store.missed, 0, "what came before it was not lost");
  deliver(store, { kind: "snapshot", seq: 57 }, { step: [step(0, 3), step(1, 3)] });
  assert.equal(deliver(store, { seq: 58 }, { step: [step(0, 4), step(1, 4)] }), false);
  assert.deepEqual(store.steps().map((entry) => entry.step), [3, 4]);
});

test("another run starts anew", () => {
  const store = new Store();
  deliver(store, { seq: 5, texts: TEXTS }, { metric: [metric(0, 0, 4)] });
  deliver(store, { seq: 1, run: "another", texts: [[1, "perplexity"]] }, { metric: [metric(0, 0, 50)] });
  assert.deepEqual(store.metricNames(), ["perplexity"]);
  assert.equal(store.missed, 0);
});

test("steps come in order, the newest that all ranks have ended is chosen, and a row that comes again replaces", () => {
  const store = new Store();
  deliver(store, { seq: 1 }, { step: [step(0, 1), step(1, 1), step(0, 2), step(0, 0), step(1, 0)] });
  assert.deepEqual(store.steps().map((entry) => entry.step), [0, 1, 2]);
  assert.equal(store.chosenStep().step, 1);
  store.choose({ step: { cell: 1, step: 2 } });
  assert.equal(store.chosenStep().step, 2);
  deliver(store, { seq: 2 }, { step: [step(0, 2, { duration: 321 })] });
  assert.deepEqual(store.rowsOf(store.stepOf(1, 2)).map((row) => row.duration), [321]);
});

test("an open span is closed by the row that comes again, although times travel rounded", () => {
  const store = new Store();
  deliver(store, { seq: 1 }, { span: [span(0, 1, 10, 12), span(0, 0, 5.00499, NaN), span(0, COLLECTIVE, 20, NaN, { call: 8 })] });
  assert.equal(indexesOf(store, 100, 200, 0).length, 2, "both open ones");
  deliver(store, { seq: 2 }, { span: [span(0, 0, 5.00503, 30), span(0, COLLECTIVE, 20.01, 25, { call: 8 })] });
  assert.equal(indexesOf(store, 100, 200, 0).length, 0);
  const { end } = store.tables.span.columns;
  assert.deepEqual(indexesOf(store, 0, 50, 0).map((index) => end[index]), [25, 30, 12]);
});

test("spans of a window are found wherever a long one ended", () => {
  const store = new Store();
  const rows = Array.from({ length: 300 }, (_, at) => span(0, 1, at * 10, at * 10 + 9));
  rows.splice(150, 0, span(0, 0, 0, 2000));
  deliver(store, { seq: 1 }, { span: rows });
  const { start } = store.tables.span.columns;
  assert.deepEqual(indexesOf(store, 1985, 1995, 0).map((index) => start[index]).sort((a, b) => a - b), [0, 1980, 1990]);
});

test("a collective is one over all ranks, with its values", () => {
  const store = new Store();
  const call = { op: 2, group: 3, number: 7 };
  deliver(store, { seq: 1, texts: TEXTS }, {
    span: [0, 1].map((rank) => span(rank, COLLECTIVE, 50 + rank, 60, { ...call, call: 7 })),
    value: [0, 1].map((rank) => ({ rank, ...call, kind: COLLECTIVE, cell: 1, side: 1, count: 2, first: [1 + rank, 2] })),
  });
  const [found] = store.collectives();
  assert.equal(store.text(found.op), "all_reduce");
  assert.equal(found.start, 50);
  assert.deepEqual([...found.spans.keys()], [0, 1]);
  const [, second] = store.valuesOf(found);
  assert.deepEqual([...second.first.slice(0, 3)], [2, 2, NaN], "narrower than 32: the rest is not known");
});

test("a receive, and a collective of a group that counts anew, are others than those with their numbers", () => {
  const store = new Store();
  const call = { op: 2, group: 3, number: 1 };
  const value = (more) => ({ rank: 0, ...call, kind: COLLECTIVE, cell: 1, side: 1, count: 1, first: [1], ...more });
  deliver(store, { seq: 1, texts: TEXTS }, {
    span: [span(0, COLLECTIVE, 50, 60, { ...call, call: 1 }), span(0, COLLECTIVE, 80, 90, { ...call, cell: 2, call: 3 })],
    value: [value({}), value({ kind: RECV, first: [2] }), value({ cell: 2, first: [3] })],
  });
  assert.equal(store.collectives().length, 3);
  assert.deepEqual(store.collectives().map((one) => store.valuesOf(one)[0].first[0]).sort(), [1, 2, 3]);
});

test("the latest is so in time, also where values of a receive come all at once at the end", () => {
  const store = new Store();
  const barrier = { op: 2, group: 3, number: 9, call: 12 }, received = { op: 2, group: 3, number: 1, call: 4 };
  deliver(store, { seq: 1, now_ms: 1000, texts: TEXTS }, {
    span: [span(0, RECV, 20, 30, received), span(0, COLLECTIVE, 500, 510, barrier)],
    value: [{ rank: 0, ...received, kind: RECV, cell: 1, side: 1, count: 1, first: [1] }],
  });
  assert.deepEqual(store.collectives().map(({ number, start }) => [number, start]), [[1, 20], [9, 500]]);
});

test("a cell is named with its prompt once that is known, and a view of one cell says which", () => {
  const store = new Store();
  deliver(store, { seq: 1, state: "recorded", only: 7, cell: 7, texts: [[5, "In [8]"]] }, { span: [span(0, 0, 10, 90, { cell: 7, name: 5 })] });
  assert.equal(stateOf(store, "").words, "In [8] was recorded.");
  deliver(store, { seq: 2, state: "idle", cell: 7 });
  assert.equal(stateOf(store, "").words, "No cell is running; the last one was In [8].");
  deliver(store, { seq: 3, state: "running", cell: 9 });
  assert.equal(stateOf(store, "").words, "Cell 9 is running.");
  deliver(store, { seq: 4, state: "running", cell: 9, prompts: [[9, "In [12]"]] });
  assert.equal(stateOf(store, "").words, "In [12] is running.");
  deliver(store, { seq: 5, state: "running", cell: 10, prompts: [[10, "In [8]"]] });
  assert.equal(stateOf(store, "").words, "In [8] (cell 10) is running.", "the notebook's kernel was restarted");
});

test("paused, the picture stands while data are taken in", () => {
  const store = new Store();
  const open = span(0, 0, 0, NaN);
  deliver(store, { seq: 1, texts: TEXTS, now_ms: 10 }, { metric: [metric(0, 1, 4)], step: [step(0, 0), step(1, 0)], span: [open] });
  store.choose({ paused: true });
  deliver(store, { seq: 2, now_ms: 40 }, { metric: [metric(0, 3, 1)], step: [step(0, 1), step(1, 1)], span: [{ ...open, end: 30 }] });
  assert.equal(store.now, 10);
  assert.equal(store.chosenStep().step, 0);
  assert.deepEqual([...points(store, "loss").get(0).values], [4]);
  assert.ok(Number.isNaN(store.tables.span.columns.end[indexesOf(store, 0, 50, 0)[0]]));
  assert.equal(indexesOf(store, 0, 50, 0).length, 1);
  store.choose({ paused: false });
  assert.equal(store.now, 40);
  assert.deepEqual([...points(store, "loss").get(0).values], [4, 1]);
  assert.equal(store.tables.span.columns.end[indexesOf(store, 0, 50, 0)[0]], 30);
});

test("the ranks that are chosen are those that are shown", () => {
  const store = new Store();
  deliver(store, { seq: 1, texts: TEXTS, world_size: 4 }, { metric: [0, 1, 2, 3].map((rank) => metric(rank, 0, rank)) });
  store.choose({ ranks: new Set([1, 3]) });
  assert.deepEqual(store.shownRanks(), [1, 3]);
  assert.deepEqual([...points(store, "loss").keys()], [1, 3]);
});
