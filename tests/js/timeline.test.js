/** Computations of the timeline: windows, lanes, rectangles, ribbons, omitted steps. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { FAILURE, HEADING, MEANINGS, MERGE_PX, Rectangles, TRANSFER, UNDER_WAY, WAITING, collect, hit, layoutRows, leastWidth } from "../../ddp_notebook/widgets/js/drawing/bars.js";
import { COMMUNICATION, COMPUTE, Lane, Lanes, lowerBound } from "../../ddp_notebook/widgets/js/data/lanes.js";
import { arrowsIn, callsOf, collectivesIn, endsOf, ribbon } from "../../ddp_notebook/widgets/js/drawing/links.js";
import { abgr, paint } from "../../ddp_notebook/widgets/js/drawing/pixels.js";
import { StepMarks, leftOut } from "../../ddp_notebook/widgets/js/data/stepmarks.js";
import { Store } from "../../ddp_notebook/widgets/js/data/store.js";
import { EXECUTION, KINDS, REMOTE_CALL, makeTables } from "../../ddp_notebook/widgets/js/data/tables.js";
import { nameOf } from "../../ddp_notebook/widgets/js/data/names.js";
import { Chosen } from "../../ddp_notebook/widgets/js/panels/timeline_choice.js";
import { Asking } from "../../ddp_notebook/widgets/js/panels/timeline_controls.js";
import { timelineWords } from "../../ddp_notebook/widgets/js/panels/timeline_words.js";
import { LEAST_MS, axis, follow, pan, seconds, zoom } from "../../ddp_notebook/widgets/js/drawing/timewindow.js";
import { TEXTS, deliver, span } from "./messages.js";

const LIMITS = { t0: 0, t1: 100000 };
const close = (one, other, by = 1e-9) => assert.ok(Math.abs(one - other) <= by, `${one} is not ${other}`);

/** Add rows, given as objects, to a table. */
function fill(table, rows) {
  const columns = {};
  for (const [name, Type, width = 1] of table.types) {
    if (width === 1 && rows.some((row) => name in row)) columns[name] = Type.from(rows, (row) => row[name] ?? (Type === Float64Array || Type === Float32Array ? NaN : 0));
  }
  table.append({ rows: rows.length, columns, widths: {} });
}

const call = (rank, number, start, end, more = {}) => ({ rank, kind: TRANSFER, start, end, number, group: 1, call: number, wait: 0, state: 1, ...more });

// ---- windows

test("zooming keeps the time under the pointer where it is", () => {
  const view = { t0: 1000, t1: 2000 };
  for (const factor of [1.6, 0.5, 10]) {
    const now = zoom(view, 1250, factor, LIMITS);
    close((1250 - now.t0) / (now.t1 - now.t0), 0.25);
    close(now.t1 - now.t0, 1000 / factor);
  }
});

test("from many seconds to microseconds and back, and not out of the limits", () => {
  let view = { t0: 0, t1: 100000 };
  for (let i = 0; i < 100; i++) view = zoom(view, 54321.123, 1.6, LIMITS);
  close(view.t1 - view.t0, LEAST_MS, 1e-6);
  assert.ok(view.t0 <= 54321.123 && 54321.123 <= view.t1);
  for (let i = 0; i < 100; i++) view = zoom(view, 54321.123, 1 / 1.6, LIMITS);
  assert.deepEqual(view, { t0: 0, t1: 100000 });
  assert.deepEqual(pan({ t0: 10, t1: 20 }, -50, LIMITS), { t0: 0, t1: 10 });
  assert.deepEqual(pan({ t0: 10, t1: 20 }, 1e9, LIMITS), { t0: 99990, t1: 100000 });
});

test("following moves in whole pixels, or in pages", () => {
  const one = follow(12345.6, 5000, 1000), other = follow(12347.1, 5000, 1000);
  assert.ok(one.t1 >= 12345.6 && one.t1 - 12345.6 <= 5);
  close((other.t1 - one.t1) % 5, 0, 1e-6);
  assert.equal(follow(12345.6, 5000, 1000, true).t1, follow(12400, 5000, 1000, true).t1);
  assert.deepEqual(follow(100, 5000, 1000), { t0: 0, t1: 5000 });
});

test("the axis has units, and counts from a base far in", () => {
  const far = axis({ t0: 0, t1: 5000 }, 900);
  assert.equal(far.baseLabel, "");
  assert.ok(far.marks.some(({ label }) => label === "1.5 s"), far.marks.map((one) => one.label).join());
  const near = axis({ t0: 20123.4561, t1: 20123.4761 }, 900);
  assert.equal(near.baseLabel, "20.12344 s");
  assert.ok(near.marks.every(({ label }) => /^\+\d+ µs$/.test(label)), near.marks.map((one) => one.label).join());
  assert.ok(near.marks.length >= 5 && near.marks.length <= 12);
  assert.equal(seconds(20123.4567, 0.001), "20.123457 s");
});

// ---- lanes

test("spans are found by halving, also those that began long before the window", () => {
  const lane = new Lane(COMPUTE);
  lane.insert({ start: 0, end: 1000, kind: 1, wait: NaN, state: 0, call: NaN, row: 0 });
  for (let i = 1; i < 500; i++) lane.insert({ start: i, end: i + 0.5, kind: 2, wait: NaN, state: 0, call: NaN, row: i });
  lane.settle();
  assert.equal(lane.from(900), 0); // the long span
  assert.equal(lane.until(10), 10);
  assert.equal(lowerBound([1, 3, 3, 5], 4, 3), 1);
  assert.equal(lane.depth, 2);
});

test("rows that come late, again or with their end are put in place", () => {
  const { span } = makeTables();
  const lanes = new Lanes();
  fill(span, [call(0, 1, 10, 20), call(0, 3, 50, NaN, { state: 0, wait: NaN })]);
  lanes.sync(span);
  const lane = lanes.of(0)[COMMUNICATION];
  assert.ok(lanes.hasOpen);
  fill(span, [call(0, 2, 30, 40), call(0, 3, 50.002, 70, { wait: 5 }), call(0, 1, 10.001, 20)]);
  assert.ok(lanes.sync(span));
  assert.deepEqual([...lane.start.slice(0, lane.length)].map(Math.round), [10, 30, 50]);
  assert.deepEqual([...lane.end.slice(0, lane.length)], [20, 40, 70]);
  assert.equal(lane.wait[2], 5);
  assert.ok(!lanes.hasOpen);
  assert.ok(!lanes.sync(span));
});

test("two calls at the same time stay two, in slots below each other", () => {
  const lanes = new Lanes();
  const { span } = makeTables();
  fill(span, [call(0, 1, 10, 30), call(0, 2, 10, 30), call(0, 3, 20, 40), call(0, 4, 31, 50)]);
  lanes.sync(span);
  const lane = lanes.of(0)[COMMUNICATION];
  assert.equal(lane.length, 4);
  assert.deepEqual([...lane.slot.slice(0, 4)], [0, 1, 2, 0]);
  assert.equal(lanes.depths[COMMUNICATION], 3);
});

test("another run begins anew, and what the store has let go is let go", () => {
  const lanes = new Lanes();
  const { span } = makeTables();
  for (let k = 0; k < 4; k++) {
    fill(span, Array.from({ length: 50000 }, (_, i) => call(0, k * 50000 + i, k * 50000 + i, k * 50000 + i + 0.5)));
    lanes.sync(span);
  }
  const lane = lanes.of(0)[COMMUNICATION];
  assert.ok(lane.length <= 1.1 * span.length + 1024 && lane.length >= span.length, `${lane.length}`);
  assert.equal(lane.start[lane.from(190000.2)], 190000);
  assert.equal(lanes.first, lane.start[0]);
  span.clear();
  fill(span, [call(0, 1, 5, 6)]);
  lanes.sync(span);
  assert.equal(lanes.count, 1);
  assert.equal(lanes.of(0)[COMMUNICATION].length, 1);
});

// ---- rectangles

const BOX = { x: 0, y: 0, width: 1000, h: 20, slots: 1, slotH: 20 };

function drawn(rows, view, { box = BOX, now = 1e6, least = MERGE_PX } = {}) {
  const { span } = makeTables();
  const lanes = new Lanes();
  fill(span, rows);
  lanes.sync(span);
  const into = new Rectangles();
  for (const lane of lanes.of(0)) collect(into, lane, view, box, now, 1, least);
  return into;
}
const quadsOf = (into, meaning) => Array.from({ length: into.counts[meaning] }, (_, i) => [...into.quads[meaning].slice(4 * i, 4 * i + 4)]);

test("a collective is white as long as it waits, then has its colour", () => {
  const into = drawn([call(0, 1, 100, 300, { wait: 150 })], { t0: 0, t1: 1000 });
  const [[waitX, , waitW]] = quadsOf(into, WAITING), [[x, , w]] = quadsOf(into, TRANSFER);
  assert.deepEqual([waitX, waitW, x], [100, 150, 250]);
  close(x + w, 300, 1.01); // without the gap between neighbours
});

test("words have what is a bar's alone, where bars of one slot lie on each other", () => {
  const rows = [call(0, 1, 100, 300), call(0, 2, 200, 500, { wait: 200 }), call(0, 3, 410, 420), call(0, 4, 600, 700)];
  const { wide } = drawn(rows, { t0: 0, t1: 1000 });
  assert.deepEqual(wide.map(({ at, x, w }) => [at, x, Math.round(x + w)]), [[0, 100, 200], [1, 299, 400], [3, 600, 699]]);
});

test("what is under way has no wait, what failed is told apart, what nobody waited for is a mark", () => {
  const into = drawn(
    [call(0, 1, 100, NaN, { state: 0, wait: NaN }), call(0, 2, 200, 300, { state: 2 }), call(0, 3, 400, NaN, { state: 3, wait: NaN })],
    { t0: 0, t1: 1000 },
    { now: 900 },
  );
  assert.equal(into.counts[WAITING], 0);
  const [[x, , w]] = quadsOf(into, UNDER_WAY);
  assert.deepEqual([x, Math.round(x + w)], [100, 899]);
  assert.equal(into.open.length, 1);
  assert.equal(into.counts[FAILURE], 1);
  assert.equal(into.merged, 1);
});

test("only what is seen is drawn, and edges outside stay outside", () => {
  const into = drawn([call(0, 1, 0, 10), call(0, 2, 400, 600), call(0, 3, 990, 1200)], { t0: 500, t1: 600 });
  assert.equal(into.total, 1);
  const [[x, , w]] = quadsOf(into, TRANSFER);
  assert.equal(x, -2);
  assert.ok(x + w >= 999);
});

test("merged operations have the height of their share of the time", () => {
  // 1000 operations of 1 ms every 4 ms in 4 s on 1000 pixels: a quarter of the time.
  const rows = Array.from({ length: 1000 }, (_, i) => call(0, i + 1, 4 * i, 4 * i + 1, { wait: 0 }));
  const into = drawn(rows, { t0: 0, t1: 4000 });
  assert.equal(into.single, 0);
  assert.equal(into.merged, 1000);
  assert.equal(into.columns, 500);
  assert.equal(into.total, 1, "equal columns are one rectangle");
  const [[x, y, w, h]] = quadsOf(into, TRANSFER);
  assert.deepEqual([x, w, y + h, h], [0, 1000, 20, 5]);
});

test("waiting has its share, overlapping ones share, and the least is seen", () => {
  const half = drawn(Array.from({ length: 1000 }, (_, i) => call(0, i + 1, 4 * i, 4 * i + 2, { wait: 1 })), { t0: 0, t1: 4000 });
  assert.equal(quadsOf(half, WAITING)[0][3], 5);
  assert.equal(quadsOf(half, TRANSFER)[0][3], 5);
  const over = drawn(Array.from({ length: 2000 }, (_, i) => call(0, i + 1, 2 * i, 2 * i + 6)), { t0: 0, t1: 4000 });
  assert.ok(quadsOf(over, TRANSFER).every(([, y, , h]) => y >= 0 && h <= 20));
  const one = drawn([call(0, 1, 1000, 1000.001)], { t0: 0, t1: 1e6 });
  assert.deepEqual(quadsOf(one, TRANSFER).map(([, , , h]) => h), [1]);
});

test("a crowded lane is merged altogether, and does not flicker at the limit", () => {
  assert.equal(leastWidth(1000, 50, MERGE_PX), MERGE_PX);
  const crowded = leastWidth(1000, 200, MERGE_PX);
  assert.ok(crowded > MERGE_PX);
  assert.equal(leastWidth(1000, 140, MERGE_PX), MERGE_PX);
  assert.equal(leastWidth(1000, 140, crowded), crowded);
});

test("rows of 64 ranks are thin, of 4 high, and lanes lie in them", () => {
  for (const [rows, height] of [[64, 600], [4, 400], [1, 400], [64, 200]]) {
    const layout = layoutRows(rows, height, [1, 1, 4]);
    const [cell, compute, communication] = layout.lanes;
    assert.ok(layout.row >= 7);
    assert.ok(cell.y + cell.h <= compute.y && compute.y + compute.h <= communication.y);
    assert.ok(communication.y + communication.h <= layout.row, JSON.stringify(layout));
    assert.ok(compute.h >= 2 && communication.h >= 2);
  }
  assert.ok(layoutRows(64, 200, [1, 1, 1]).total > 200, "then they scroll");
});

test("above the ranks of each host is its name, where there are several", () => {
  const plain = layoutRows(4, 400, [1, 1, 1]);
  assert.deepEqual([plain.headings, plain.tops, plain.total], [[], [0, 1, 2, 3].map((at) => at * plain.row), 4 * plain.row]);
  const layout = layoutRows(4, 160, [1, 1, 1], ["a", "a", "b", "b"]);
  const { row } = layout;
  assert.deepEqual(layout.headings, [{ host: "a", y: 0 }, { host: "b", y: HEADING + 2 * row }]);
  assert.deepEqual(layout.tops, [HEADING, HEADING + row, 2 * HEADING + 2 * row, 2 * HEADING + 3 * row]);
  assert.ok(layout.total === 2 * HEADING + 4 * row && layout.total <= 160);
});

test("the span under the pointer is found, of nested ones the inner", () => {
  const lane = new Lane(COMPUTE);
  for (const [start, end, kind] of [[0, 100, 1], [40, 60, 2], [200, 201, 3]]) lane.insert({ start, end, kind, wait: NaN, state: 0, call: NaN, row: 0 });
  lane.settle();
  assert.equal(lane.kind[hit(lane, 50, -1, 0.1, 0).at], 2);
  assert.equal(lane.kind[hit(lane, 20, -1, 0.1, 0).at], 1);
  assert.equal(lane.kind[hit(lane, 203, -1, 1.5, 0).at], 3); // close enough to the span
  assert.equal(hit(lane, 150, -1, 0.1, 0), null);
});

test("painting as pixels is what filling rectangles is", () => {
  const pixels = new Uint32Array(10 * 10);
  const colour = abgr([255, 128, 0]);
  paint(pixels, 10, 2, 1, Float32Array.of(0, 0, 4, 4, 8, 8, 50, 50, 5, 5, 0.1, 0.1), 3, colour, 1);
  const at = (x, y) => pixels[y * 10 + x] === colour;
  assert.ok(at(1, 2) && at(3, 3) && at(9, 9) && at(5, 5));
  assert.ok(!at(0, 2) && !at(1, 1) && !at(4, 4) && !at(6, 5), "clipped at the edges");
  assert.equal(colour, 0xff0080ff);
});

test("12 800 rectangles are collected in time", () => {
  const lanes = new Lanes();
  const { span } = makeTables();
  const rows = [];
  for (let i = 0; i < 100; i++) for (let rank = 0; rank < 64; rank++) rows.push(call(rank, i + 1, 10 * i, 10 * i + 8, { wait: 4 }));
  fill(span, rows);
  lanes.sync(span);
  const into = new Rectangles();
  const times = [];
  for (let round = 0; round < 30; round++) {
    const begun = performance.now();
    into.clear();
    for (let rank = 0; rank < 64; rank++) collect(into, lanes.of(rank)[COMMUNICATION], { t0: 0, t1: 1000 }, BOX, 1000);
    times.push(performance.now() - begun);
  }
  assert.equal(into.total, 12800);
  times.sort((a, b) => a - b);
  assert.ok(times[15] < 20, `${times[15]} ms`); // 1 ms on a quiet machine
});

// ---- the same collective on all ranks

test("a collective is found on every rank that has called it", () => {
  const { span } = makeTables();
  const lanes = new Lanes();
  const rows = [];
  for (let rank = 0; rank < 4; rank++) for (let i = 1; i <= 50; i++) if (!(rank === 2 && i === 50)) rows.push(call(rank, i, 10 * i + rank, 10 * i + 8));
  fill(span, [...rows, call(0, 7, 75, 76, { group: 2, call: 900 })]);
  lanes.sync(span);
  const collective = { kind: TRANSFER, cell: 0 };
  const found = callsOf(lanes, span, { ...collective, group: 1, number: 7 }, [0, 1, 2, 3], 70);
  assert.deepEqual(found.map(({ rank, lane, at }) => [rank, lane.start[at]]), [[0, 70], [1, 71], [2, 72], [3, 73]]);
  assert.deepEqual(callsOf(lanes, span, { ...collective, group: 1, number: 50 }, [0, 1, 2, 3]).map(({ rank }) => rank), [0, 1, 3]);
  assert.deepEqual(callsOf(lanes, span, { ...collective, group: 2, number: 7 }, [0, 1, 2, 3]).map(({ rank }) => rank), [0]);
  assert.equal(collectivesIn(lanes.of(0)[COMMUNICATION], span, { t0: 0, t1: 1000 }, 16), null);
  assert.deepEqual(collectivesIn(lanes.of(1)[COMMUNICATION], span, { t0: 69, t1: 85 }, 16).map(({ number }) => number), [7, 8]);
});

test("a ribbon joins neighbours, and passes loosely by a rank that has not come", () => {
  const parts = ribbon([{ row: 0, x0: 10, x1: 50, top: 0, bottom: 5 }, { row: 1, x0: 30, x1: 50, top: 20, bottom: 25 }, { row: 3, x0: 12, x1: 50, top: 60, bottom: 65 }]);
  assert.deepEqual(parts[0], { corners: [10, 5, 50, 5, 50, 20, 30, 20], isLoose: false });
  assert.equal(parts[1].isLoose, true);
});

// ---- steps

test("steps without spans are known as left out, the newest not yet", () => {
  const { span, step } = makeTables();
  const lanes = new Lanes(), marks = new StepMarks();
  const rows = [], spans = [];
  for (let k = 0; k < 40; k++) {
    for (let rank = 0; rank < 2; rank++) rows.push({ rank, cell: 1, step: k, start: 100 * k + rank, duration: 95 });
    if (k % 4 === 0) spans.push({ rank: 0, kind: 2, start: 100 * k + 10, end: 100 * k + 50, state: 0 });
  }
  fill(step, rows);
  fill(span, spans);
  lanes.sync(span);
  marks.sync(step);
  assert.equal(marks.marks.length, 40);
  assert.deepEqual(marks.of(1, 3), { cell: 1, step: 3, start: 300, end: 396 });
  assert.deepEqual(marks.within({ t0: 150, t1: 410 }).map((one) => one.step), [1, 2, 3, 4]);
  const missing = leftOut(marks.marks, [lanes.of(0)], 4000);
  assert.ok(missing.every((one) => one.step % 4 !== 0));
  assert.equal(missing.length, 27 - 1); // 30 steps less those of the last half second, which may still arrive
});

test("meanings have the kinds' order", () => {
  assert.deepEqual(MEANINGS.slice(0, 5), ["cell", "forward", "backward", "optimizer", "input"]);
});

test("actions of a pipeline and named blocks are told by stage and microbatch, and by their names", () => {
  const store = new Store();
  const texts = [[8, "stage 1, microbatch 3"], [9, "load"]];
  deliver(store, { seq: 1, texts: [...TEXTS, ...texts] }, {
    span: [span(0, KINDS.indexOf("weight gradient"), 10, 20, { name: 8 }), span(0, KINDS.indexOf("block"), 30, 40, { name: 9 })],
  });
  const lanes = new Lanes();
  lanes.sync(store.tables.span);
  const words = timelineWords(store, lanes);
  const lane = lanes.of(0)[COMPUTE];
  assert.deepEqual(words.wordsOf(lane, 0), ["weight gradient of stage 1, microbatch 3", "W3"]);
  assert.deepEqual(words.wordsOf(lane, 1), ["load"]);
});

// ---- remote calls

const remote = (number, caller, callee, [sent, begun, ended, returned]) => [
  { rank: caller, kind: REMOTE_CALL, start: sent, end: returned, call: number, peer: callee, wait: 0, state: 1, name: 2, op: 1, site: 3, nbytes: 100, cell: 1 },
  ...(begun === null ? [] : [{ rank: callee, kind: EXECUTION, start: begun, end: ended, call: number, peer: caller, wait: 0, state: 1, name: 2, op: 1, nbytes: 8, cell: 1 }]),
];

function remoteScene(rows, { ranks = [0, 1, 2], view = { t0: 0, t1: 100 } } = {}) {
  const store = new Store();
  store.worldSize = 3;
  for (const [number, text] of [[1, "rpc_sync"], [2, "train"], [3, "cell line 7"]]) store.texts.set(number, text);
  const lanes = new Lanes();
  fill(store.tables.span, rows);
  lanes.sync(store.tables.span);
  const layout = layoutRows(ranks.length, 300, lanes.depths);
  return { store, lanes, table: store.tables.span, scene: { ranks, view, layout, left: 0, width: 1000, top: 28, scroll: 0 } };
}

test("arrows go from the caller's bar to where its callee begins, and from where that ends back", () => {
  const { scene, lanes, table } = remoteScene([...remote(7, 0, 2, [10, 20, 50, 60]), ...remote(8, 2, 1, [30, 35, 40, 45])]);
  const found = arrowsIn(scene, lanes, table, [], 100);
  assert.deepEqual(found.map(({ x0, x1 }) => [x0, x1]), [[100, 200], [500, 600], [300, 350], [400, 450]]);
  assert.ok(found.every(({ isLoose, isChosen }) => !isLoose && !isChosen));
  const [there, back, up, down] = found;
  const { tops, row } = scene.layout;
  assert.ok(there.y0 > 28 && there.y0 <= 28 + tops[0] + row && there.y1 >= 28 + tops[2] && there.y1 < 28 + tops[2] + row);
  assert.deepEqual([back.y0, back.y1], [there.y1, there.y0]);
  assert.ok(up.y0 > up.y1 && down.y1 > down.y0, "a callee above its caller");
});

test("of an operator nobody knows when it ran, and a call of oneself or of a rank out of sight has no arrow", () => {
  const { scene, lanes, table } = remoteScene([...remote(1, 0, 1, [10, null, null, 30]), ...remote(2, 1, 1, [10, 12, 14, 16]), ...remote(3, 0, 2, [50, 55, 60, 65])], { ranks: [0, 1] });
  const found = arrowsIn(scene, lanes, table, [], 100);
  assert.deepEqual(found.map(({ x0, x1, isLoose }) => [x0, x1, isLoose]), [[100, 200, true], [200, 300, true]]);
});

test("where there are many only those of the call under the pointer are drawn, from either of its ends", () => {
  const rows = Array.from({ length: 60 }, (_, i) => remote(i + 1, 0, 1, [i, i + 0.2, i + 0.6, i + 0.8])).flat();
  const { scene, lanes, table } = remoteScene(rows);
  assert.equal(arrowsIn(scene, lanes, table, [], 100).length, 0);
  for (const [rank, which] of [[0, COMMUNICATION], [1, COMPUTE]]) {
    const lane = lanes.of(rank)[which];
    const ends = endsOf(lanes, table, scene.ranks, { rank, row: rank, lane, at: 41 });
    assert.deepEqual(arrowsIn(scene, lanes, table, [ends, null, ends], 100).map((one) => [Math.round(one.x0), one.isChosen]), [[410, true], [416, true]]);
  }
});

test("a remote call is told from both ends: function, caller, callee, and what its time went into", () => {
  const { store, scene, lanes, table } = remoteScene([...remote(7, 0, 2, [10, 20, 50, 55]), ...remote(8, 1, 2, [60, null, null, 70])]);
  const { about, wordsOf, table: rowsOf } = timelineWords(store, lanes);
  const at = (rank, which, i = 0) => ({ rank, row: rank, lane: lanes.of(rank)[which], at: i, count: 1 });
  const told = (one) => about(one, endsOf(lanes, table, scene.ranks, one));
  assert.deepEqual(told(at(0, COMMUNICATION)), ["rank 0: rpc_sync of train, run by rank 2", "45.0 ms: 10.0 ms until it began, 30.0 ms running, 5.00 ms back", "100 B sent", "cell 1, cell line 7"]);
  assert.deepEqual(told(at(2, COMPUTE)).slice(0, 3), ["rank 0: rpc_sync of train, run by rank 2", "45.0 ms: 10.0 ms until it began, 30.0 ms running, 5.00 ms back", "8 B of tensors in its result"]);
  assert.equal(told(at(1, COMMUNICATION))[1], "10.0 ms; when it ran is not known");
  assert.equal(wordsOf(lanes.of(0)[COMMUNICATION], 0)[0], "rpc_sync train → rank 2");
  assert.equal(wordsOf(lanes.of(2)[COMPUTE], 0)[0], "train for rank 0");
  assert.ok(rowsOf({ t0: 0, t1: 100 }).rows.some((row) => row[1] === "rpc_sync train → rank 2" && row[5] === "cell line 7"));
});

test("a call that is under way says for how long, and when it began", () => {
  const { store, scene, lanes, table } = remoteScene(remote(7, 0, 2, [10, 20, NaN, NaN]).map((one) => ({ ...one, state: 0 })));
  store.liveNow = 100;
  const { about } = timelineWords(store, lanes);
  for (const [rank, which] of [[0, COMMUNICATION], [2, COMPUTE]]) {
    const one = { rank, row: rank, lane: lanes.of(rank)[which], at: 0, count: 1 };
    assert.equal(about(one, endsOf(lanes, table, scene.ranks, one))[1], "under way for 90.0 ms: 10.0 ms until it began");
  }
});

test("a remote call is chosen at either end, and keys go through calls and collectives by their time", () => {
  const store = new Store();
  const lanes = new Lanes();
  const chosen = new Chosen(store, lanes);
  const rows = [...remote(7, 0, 1, [10, 12, 18, 20]), ...remote(9, 1, 0, [60, 62, 68, 70])].map((one) => span(one.rank, one.kind, one.start, one.end, { ...one, site: 0 }));
  deliver(store, { seq: 1, world_size: 2 }, { span: [...rows, ...[0, 1].map((rank) => span(rank, TRANSFER, 30 + rank, 40, { number: 3, group: 1, op: 1, call: 3, cell: 1 }))] });
  lanes.sync(store.tables.span);
  const at = (rank, which) => ({ rank, row: rank, lane: lanes.of(rank)[which], at: 0 });
  assert.deepEqual([chosen.remoteAt(at(0, COMMUNICATION)), chosen.remoteAt(at(1, COMPUTE))], [{ rank: 0, call: 7 }, { rank: 0, call: 7 }]);
  assert.equal(chosen.isAny, false);

  const passed = [1, 1, 1, 1, -1, -1].map((by) => [chosen.next(by), store.choice.remote?.call ?? store.choice.collective?.number]);
  assert.deepEqual(passed, [[10, 7], [30, 3], [60, 9], [60, 9], [30, 3], [10, 7]]);
  assert.deepEqual([chosen.extent(100), chosen.ends().callee.rank], [{ t0: 10, t1: 20 }, 1]);
  store.choose({ collective: nameOf(store.collectives()[0]) }); // in another panel
  assert.deepEqual([store.choice.remote, chosen.extent(100)], [null, { t0: 30, t1: 40 }]);
  chosen.choose(null);
  assert.deepEqual([chosen.isAny, chosen.extent(100), chosen.next(-1)], [false, null, 60]);
});

test("an execution and a call of one number stay two, and a snapshot brings neither again", () => {
  const store = new Store();
  const rows = remote(5, 0, 0, [10, 11, 12, 13]).map((one) => span(one.rank, one.kind, one.start, one.end, one));
  deliver(store, { seq: 1 }, { span: rows.map((one) => ({ ...one, site: 0 })) });
  deliver(store, { seq: 3, kind: "snapshot" }, { span: rows.map((one) => ({ ...one, site: 0 })) });
  assert.equal([...store.spansIn(0, 100, 0)].length, 2);
});

// ---- asking for what was left out

/** Create a page whose kernel answers requests: an answer has the steps that fit, and states if it omits rows. */
function asks(context, { state, window = null, room = Infinity, steps = 345, ranks = [0, 1] }) {
  context.mock.timers.enable({ apis: ["setTimeout"] });
  const sent = new Map();
  const marks = Array.from({ length: steps }, (_, step) => ({ cell: 1, step, start: step * 10, end: step * 10 + 9 }));
  const here = new Set();
  const store = { state, choice: { window }, answers: new Map(), isAnswered: (number) => store.answers.has(number), subscribe: () => () => {} };
  const env = {
    canSend: true,
    redraw: () => {},
    ask: ({ t0, t1 }) => {
      const its = marks.filter((one) => one.start >= t0 && one.end <= t1);
      sent.set(sent.size + 1, its);
      return sent.size;
    },
  };
  const asking = new Asking(store, env);
  const missing = () => marks.filter((one) => !here.has(one.step));
  const draw = (of = ranks) => asking.about(missing(), { t0: 0, t1: 10 * steps }, of, () => {});
  return {
    asking, sent, store, missing, draw, pass: () => context.mock.timers.tick(200),
    answer() {
      for (const [number, its] of sent) {
        if (store.answers.has(number)) continue;
        for (const one of its.slice(0, room)) here.add(one.step);
        store.answers.set(number, { message: { notes: { rows_left_out: Math.max(0, its.length - room) } } });
      }
    },
  };
}

test("while no cell runs, the steps in sight that were left out are asked for until all are there", (context) => {
  for (const room of [Infinity, 20]) {
    const page = asks(context, { state: "idle", room });
    for (let round = 0; round < 200 && page.missing().length; round++) {
      page.draw();
      page.pass();
      page.answer();
    }
    assert.equal(page.missing().length, 0);
    assert.equal(page.draw(), "");
    assert.ok(page.sent.size <= 345 / Math.min(room / 2, 150) + 8, `${page.sent.size} requests`);
    context.mock.timers.reset();
  }
});

test("while a cell runs and the window follows it, nothing is asked for", (context) => {
  const page = asks(context, { state: "running" });
  assert.equal(page.draw(), "not sent");
  page.pass();
  assert.equal(page.sent.size, 0);
  assert.match(page.asking.words, /stop here and zoom in/);
});

test("one request is under way at a time, and what the recording has lost is asked for once", (context) => {
  const page = asks(context, { state: "idle", room: 0, steps: 1 });
  for (let round = 0; round < 5; round++) {
    page.draw();
    page.pass();
  }
  assert.equal(page.sent.size, 1);
  assert.match(page.asking.words, /asking the kernel/);
  page.answer();
  for (let round = 0; round < 5; round++) {
    assert.equal(page.draw(), "not in the recording any more|not kept");
    page.pass();
  }
  assert.equal(page.sent.size, 1);
});

test("in a window that was chosen they are asked for while the cell runs, and of each choice of ranks anew", (context) => {
  const page = asks(context, { state: "running", window: { t0: 0, t1: 100 }, room: 0, steps: 1 });
  for (const ranks of [[0, 1], [0], [0], [1]]) {
    page.draw(ranks);
    page.pass();
    page.answer();
    page.draw(ranks);
  }
  assert.equal(page.sent.size, 3);
});

test("more steps than the page has room for are not asked for", (context) => {
  const page = asks(context, { state: "idle", ranks: Array.from({ length: 64 }, (_, rank) => rank) });
  assert.equal(page.draw(), "not sent");
  page.pass();
  assert.equal(page.sent.size, 0);
  assert.equal(page.asking.words, ": zoom in to ask for them");
});

test("a kernel that has gone is not asked, and one that comes back is asked anew", (context) => {
  const page = asks(context, { state: "idle", steps: 3 });
  page.draw();
  page.pass();
  page.store.state = "gone";
  assert.equal(page.draw(), "not on this page");
  page.pass();
  assert.equal(page.sent.size, 1);
  page.store.state = "idle";
  page.draw();
  page.pass();
  assert.equal(page.sent.size, 2);
});
