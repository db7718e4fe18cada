/** Stored and drawn points of metrics: by run, thinned or not. A text always states how many points are missing. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { Store } from "../../ddp_notebook/widgets/js/data/store.js";
import { placeInside } from "../../ddp_notebook/widgets/js/drawing/axis.js";
import { palette } from "../../ddp_notebook/widgets/js/drawing/colours.js";
import { MissingPoints } from "../../ddp_notebook/widgets/js/panels/loss_missing.js";
import { inWords } from "../../ddp_notebook/widgets/js/parts/notices.js";
import { lastValue, lossPicture } from "../../ddp_notebook/widgets/js/panels/loss_picture.js";
import { TEXTS, deliver, metric, step } from "./messages.js";

const draw = (/** @type {any} */ store) => lossPicture(store, { colours: palette("light"), everyRank: false });
const course = (/** @type {number} */ points, /** @type {Record<string, any>} */ more = {}) => ({ cell: 1, name: 1, points, begin: 0, end: points - 1, is_given: 0, unit: 0, ...more });
/** Return some rows of a cell. @param {number} cell @param {number[]} values @param {number} [first] */
const rows = (cell, values, first = 0) => values.map((value, at) => metric(0, first + at, value, { cell }));

test("each run is kept, the newest is drawn, and others can be chosen and laid over each other", () => {
  const store = new Store();
  deliver(store, { seq: 1, texts: TEXTS, prompts: [[1, "In [3]"]] }, { metric: rows(1, [5, 4, 3]), course: [course(3, { is_given: 1 })] });
  deliver(store, { seq: 2, prompts: [[2, "In [4]"]], cell: 2 }, { metric: rows(2, [2, 1], 3), course: [course(2, { cell: 2, begin: 3, end: 4, is_given: 1 })] });
  deliver(store, { seq: 3, cell: 4 }, { metric: rows(4, [9, 8]), course: [course(2, { cell: 4, is_given: 1 })] });
  assert.deepEqual(store.runs("loss").map((run) => store.runName(run)), ["In [3] to In [4]", "cell 4"]);
  assert.deepEqual(draw(store).lines.map(({ values }) => values), [[9, 8]]);
  store.choose({ runs: new Set([1]) });
  assert.deepEqual(draw(store).lines.map(({ values }) => values), [[5, 4, 3, 2, 1]]);
  store.choose({ runs: new Set([1, 4]) });
  const { x, lines } = draw(store);
  assert.deepEqual(x, [0, 1, 2, 3, 4]);
  assert.deepEqual(lines.map(({ label, values }) => [label, values]), [["In [3] to In [4]", [5, 4, 3, 2, 1]], ["cell 4", [9, 8, undefined, undefined, undefined]]]);
  assert.notEqual(lines[0].colour, lines[1].colour);
});

test("a shorter run has its last value, and the step of it", () => {
  const store = new Store();
  deliver(store, { seq: 1, texts: TEXTS }, { metric: rows(1, [5, 4]), course: [course(2)] });
  deliver(store, { seq: 2, cell: 2 }, { metric: rows(2, [9, 8, 7, 6, 5]), course: [course(5, { cell: 2 })] });
  deliver(store, { seq: 3, cell: 3 }, { metric: rows(3, [3, 2, 1, NaN]), course: [course(4, { cell: 3 })] });
  store.choose({ runs: new Set([1, 2, 3]) });
  const { lines, ...picture } = draw(store);
  assert.deepEqual(lines.map((line) => lastValue(line, picture, null)), [{ value: 4, step: 1 }, { value: 5, step: null }, { value: null, step: null }]);
  assert.deepEqual(lines.map((line) => lastValue(line, picture, 3)), [{ value: undefined, step: null }, { value: 6, step: null }, { value: null, step: null }]);
});

test("labels within the chart stand at the ends of their lines and do not overlap", () => {
  const box = { left: 0, right: 400, top: 0, bottom: 100 };
  const noLines = () => [];
  const [one, other, third, far] = placeInside([{ x: 100, y: 50, width: 60 }, { x: 110, y: 52, width: 60 }, { x: 250, y: 50, width: 60 }, { x: 380, y: 99, width: 60 }], noLines, 14, box);
  assert.deepEqual(one, { x: 100, y: 50 });
  assert.deepEqual(other, { x: 110, y: 64 });
  assert.deepEqual(third, { x: 250, y: 50 });
  assert.deepEqual(far, { x: 340, y: 93 }, "within the chart");
  const [moved] = placeInside([{ x: 100, y: 50, width: 60 }], (x0, x1) => (x0 === 100 && x1 === 160 ? [[40, 55]] : []), 14, box);
  assert.deepEqual(moved, { x: 100, y: 62 }, "next to a line");
});

test("a run names what its steps count", () => {
  const store = new Store();
  const values = [5, NaN, 3];
  deliver(store, { seq: 1, texts: TEXTS }, { metric: rows(1, values), course: [course(3, { unit: 1 })] });
  assert.equal(draw(store).unit, "value");
  assert.deepEqual(draw(store).lines.map(({ broken }) => broken), ["NaN from value 1"]);
  deliver(store, { seq: 2, cell: 2 }, { metric: rows(2, [2]), course: [course(1, { cell: 2 })] });
  deliver(store, { seq: 3, cell: 2 }, { metric: rows(2, [1], 1), course: [course(1, { cell: 2, begin: 1, end: 1, unit: 2 })] });
  assert.equal(draw(store).unit, "optimizer step", "of the newest run");
  store.choose({ runs: new Set([1, 2]) });
  assert.equal(draw(store).unit, "value or optimizer step");
});

test("cells are one run only where the program gave their steps", () => {
  for (const [first, second, runs] of [[1, 1, [[1, 2]]], [1, 0, [[1], [2]]], [0, 1, [[1], [2]]], [0, 0, [[1], [2]]]]) {
    const store = new Store();
    deliver(store, { seq: 1, texts: TEXTS }, { metric: rows(1, [5, 4, 3]), course: [course(3, { is_given: first })] });
    deliver(store, { seq: 2, cell: 2 }, { metric: rows(2, [2, 1], 9), course: [course(2, { cell: 2, begin: 9, end: 10, is_given: second })] });
    assert.deepEqual(store.runs("loss").map(({ cells }) => cells), runs);
  }
});

test("two runs of many ranks are drawn as their medians and ranges", () => {
  const store = new Store();
  for (const cell of [1, 2]) {
    const logged = Array.from({ length: 20 }, (_, rank) => [0, 1].map((step) => metric(rank, step, cell * 100 + rank, { cell }))).flat();
    deliver(store, { seq: cell, texts: TEXTS, world_size: 20, cell }, { metric: logged });
  }
  store.choose({ runs: new Set([1, 2]) });
  const { lines, drawn, logged } = draw(store);
  assert.deepEqual(lines.map(({ values }) => values[0]), [109.5, 100, 119, 209.5, 200, 219]);
  assert.deepEqual(lines.map(({ label }) => label), ["cell 1", "", "", "cell 2", "", ""]);
  assert.equal(drawn, logged);
});

test("a view of one cell draws no other, although the rows of all come to it", () => {
  const store = new Store();
  deliver(store, { seq: 1, texts: TEXTS, only: 1 }, { metric: [...rows(1, [5, 4]), ...rows(2, [7, 7, 7])] });
  assert.deepEqual(draw(store).lines.map(({ values }) => values), [[5, 4]]);
});

test("points that are missing are told", () => {
  const store = new Store();
  deliver(store, { kind: "snapshot", seq: 1, texts: TEXTS }, { metric: rows(1, [5, 4]), course: [course(24)] });
  const picture = draw(store);
  assert.deepEqual([picture.drawn, picture.logged], [2, 24]);
  assert.deepEqual(picture.notes, ["1 of 12 points drawn: the lowest and the highest of neighbours"]);
  deliver(store, { kind: "answer", request: 1 }, { metric: rows(1, Array.from({ length: 24 }, (_, at) => at)), course: [course(24)] });
  assert.deepEqual(draw(store).notes, []);
});

test("a delta that was thinned tells how much was logged", () => {
  const store = new Store();
  deliver(store, { seq: 1, texts: TEXTS }, { metric: rows(1, [5, 4, 3]), course: [course(3)] });
  deliver(store, { seq: 2 }, { metric: rows(1, [1, 9], 50), course: [course(97, { begin: 3, end: 99 })] });
  const { drawn, logged } = draw(store);
  assert.deepEqual([drawn, logged], [5, 100]);
});

test("a snapshot does not take the place of more points than it has, but of fewer", () => {
  const store = new Store();
  const all = Array.from({ length: 10 }, (_, at) => at);
  deliver(store, { kind: "snapshot", seq: 0, texts: TEXTS }, { metric: rows(1, [0, 9]), course: [course(10)] });
  deliver(store, { kind: "answer", request: 1 }, { metric: rows(1, all), course: [course(10)] });
  deliver(store, { kind: "snapshot", seq: 0 }, { metric: rows(1, [0, 9]), course: [course(10)] });
  assert.equal(draw(store).drawn, 10, "an unheard view gets it again");
  deliver(store, { kind: "snapshot", seq: 0 }, { metric: rows(1, [...all, 10]), course: [course(11)] });
  assert.equal(draw(store).drawn, 11);
});

test("a run of which no rows came is there, and is asked for when it is chosen", () => {
  const store = new Store();
  /** @type {any[]} */
  const asked = [];
  const env = /** @type {any} */ ({ canSend: true, ask: (/** @type {any} */ message) => asked.push(message), redraw() {} });
  const missing = new MissingPoints(store, env);
  deliver(store, { kind: "snapshot", seq: 1, texts: TEXTS, state: "idle" }, { metric: rows(2, [3, 2]), course: [course(1000), course(2, { cell: 2 })] });
  assert.deepEqual(store.runs("loss").map(({ cells }) => cells), [[1], [2]]);
  const look = () => missing.look(store.shownRuns("loss"), 500);
  assert.equal(look(), "");
  store.choose({ runs: new Set([1]) });
  assert.equal(draw(store).notes[0], "none of 1,000 points drawn: the lowest and the highest of neighbours");
  assert.equal(look(), "the other points are asked for");
  assert.equal(look(), "the other points are asked for", "once");
  assert.deepEqual(asked, [{ kind: "ask", what: "metrics", name: 1, cells: [1], most: 500 }]);
  deliver(store, { kind: "answer", request: 1 }, { metric: rows(1, Array.from({ length: 500 }, (_, at) => at)), course: [course(1000)] });
  assert.equal(look(), "", "what the answer left out cannot be drawn");
  assert.equal(asked.length, 1);
  missing.destroy();
});

test("what a delta leaves out right after an answer is asked for again", () => {
  const store = new Store();
  /** @type {any[]} */
  const asked = [];
  const env = /** @type {any} */ ({ canSend: true, ask: (/** @type {any} */ message) => asked.push(message), redraw() {} });
  const missing = new MissingPoints(store, env);
  deliver(store, { seq: 1, texts: TEXTS, state: "idle" }, { metric: rows(1, [3, 2]), course: [course(1000)] });
  const look = () => missing.look(store.shownRuns("loss"), 500);
  assert.equal(look(), "the other points are asked for");
  deliver(store, { kind: "answer", request: 1 }, { metric: rows(1, Array.from({ length: 500 }, (_, at) => at)), course: [course(1000)] });
  deliver(store, { seq: 2 }, { metric: rows(1, [1, 0], 1000), course: [course(9000, { begin: 1000, end: 9999 })] });
  assert.equal(look(), "the other points are asked for", "no look came between the two");
  const all = Array.from({ length: 500 }, (_, at) => metric(0, 20 * at, at));
  deliver(store, { kind: "answer", request: 2 }, { metric: all, course: [course(10000)] });
  const { lines } = draw(store);
  assert.deepEqual(lines[0].values, all.map(({ value }) => value), "502 points were here, of which 500 were the first");
  missing.destroy();
});

test("several values at one step are all drawn", () => {
  const store = new Store();
  deliver(store, { seq: 1, texts: TEXTS }, { metric: [metric(0, 0, 1), metric(0, 0, 7), metric(0, 1, 2), metric(1, 0, 3), metric(1, 1, 4)] });
  const { x, lines, drawn, logged } = draw(store);
  assert.deepEqual(x, [0, 0, 1]);
  assert.deepEqual(lines.map(({ values }) => values), [[1, 7, 2], [3, undefined, 4]]);
  assert.equal(drawn, logged);
});

test("of many runs the rows of the oldest are let go, not the knowledge that they were there", () => {
  const store = new Store();
  const each = 8192;
  for (let cell = 1; cell <= 70; cell++) {
    const logged = Array.from({ length: each }, (_, step) => metric(0, step, 1, { cell }));
    deliver(store, { seq: cell, texts: TEXTS, world_size: 1, cell }, { metric: logged, course: [course(each, { cell })] });
  }
  const runs = store.runs("loss");
  assert.equal(runs.length, 70);
  assert.equal(runs[0].held, 0);
  assert.equal(runs[0].logged, each);
  assert.equal(runs[69].held, each);
  assert.ok(runs.reduce((sum, run) => sum + run.held, 0) <= 1 << 19);
});

test("names of a new cell take the room of names of older cells, and the view says so", () => {
  const store = new Store();
  const texts = Array.from({ length: 300 }, (_, at) => [at + 1, `x${at}`]);
  const of = (/** @type {number} */ cell, /** @type {number} */ first, /** @type {number} */ count) =>
    Array.from({ length: count }, (_, at) => metric(0, 0, 1, { cell, name: first + at }));
  deliver(store, { seq: 1, texts }, { metric: of(1, 1, 256) });
  assert.deepEqual(inWords(store), []);
  deliver(store, { seq: 2, cell: 2 }, { metric: of(2, 257, 2) });
  assert.equal(store.runs("x257").length, 1);
  assert.equal(store.metrics.byName.size, 256);
  assert.deepEqual(inWords(store), ["2 metrics of earlier cells not drawn"]);
  assert.deepEqual(inWords(store, ["timeline", "ranks"]), [], "a note about curves stands below them only");
  deliver(store, { seq: 3, cell: 2 }, { metric: of(1, 290, 1) });
  assert.equal(store.runs("x289").length, 0, "its cell is not newer");
  assert.deepEqual(inWords(store), ["3 metrics of earlier cells not drawn"]);
});

test("a metric with an empty name can be chosen", () => {
  const store = new Store();
  deliver(store, { seq: 1, texts: TEXTS }, { metric: [metric(0, 0, 5), metric(0, 0, 7, { name: 0 })] });
  assert.deepEqual(store.metricNames(), ["loss", ""]);
  store.choose({ metric: "" });
  assert.equal(store.chosenMetric(), "");
  assert.deepEqual(draw(store).lines.map(({ values }) => values), [[7]]);
});

test("without a choice the metric is one of the newest run that is a curve", () => {
  const store = new Store();
  const named = (/** @type {number} */ cell, /** @type {number} */ name, /** @type {number[]} */ values) => rows(cell, values).map((row) => ({ ...row, name }));
  const texts = [...TEXTS, [5, "Verlust"], [6, "accuracy"]];
  deliver(store, { seq: 1, texts }, { metric: rows(1, [5, 4, 3]) });
  deliver(store, { seq: 2, cell: 2 }, { metric: named(2, 6, [0.9]) });
  assert.equal(store.chosenMetric(), "loss", "a single value is no curve");
  deliver(store, { seq: 3, cell: 3 }, { metric: [...named(3, 6, [0.1, 0.2]), ...named(3, 5, [7, 6])] });
  assert.equal(store.chosenMetric(), "accuracy", "neither is a loss by its name: the first one");
  deliver(store, { seq: 4, cell: 3 }, { metric: rows(3, [2, 1]) });
  assert.equal(store.chosenMetric(), "loss");
  store.choose({ paused: true });
  deliver(store, { seq: 5, cell: 4 }, { metric: named(4, 5, [7, 6]) });
  assert.equal(store.chosenMetric(), "loss", "a paused view stays");
  store.choose({ paused: false });
  assert.equal(store.chosenMetric(), "Verlust");
  store.choose({ runs: new Set([1]) });
  assert.equal(store.chosenMetric(), "loss", "of the chosen run");
  store.choose({ runs: null, metric: "accuracy" });
  assert.equal(store.chosenMetric(), "accuracy", "as chosen");
});

test("a cell's steps have the numbers that its program has logged, if it counts the same", () => {
  const before = /** @param {number[]} logged @param {number} steps @param {Record<string, any>} [more] @param {number} [later] */ (logged, steps, more = {}, later = 0) => {
    const store = new Store();
    const ofRank = /** @param {number} rank */ (rank) => logged.map((number) => metric(rank, number, 1));
    const counted = course(2 * logged.length, { begin: logged[0], end: logged[logged.length - 1], is_given: 1, ...more });
    const taken = [0, 1].flatMap((rank) => Array.from({ length: steps }, (_, at) => step(rank, at)));
    deliver(store, { seq: 1, texts: TEXTS }, { metric: [...ofRank(0), ...ofRank(1)], course: [counted], step: taken });
    if (later) deliver(store, { seq: 2, cell: later }, { metric: rows(later, [3, 2, 1]).map((row) => ({ ...row, name: 4 })) });
    return store.stepsBefore(1);
  };
  const numbers = /** @param {number} first @param {number} count @param {number} [by] */ (first, count, by = 1) => Array.from({ length: count }, (_, at) => first + by * at);
  assert.equal(before(numbers(100, 30), 30), 100);
  assert.equal(before(numbers(100, 30), 27), 100, "rows of the last steps are on their way");
  assert.equal(before(numbers(100, 30), 30, {}, 2), 100, "whatever a later cell logs");
  assert.equal(before(numbers(0, 30), 30), 0);
  assert.equal(before(numbers(0, 30), 30, { is_given: 0 }), 0);
  assert.equal(before(numbers(100, 30, 7), 30), 0, "it counts something else, such as samples");
  assert.equal(before(numbers(100, 5), 30), 0, "a value in so many steps");
});
