import assert from "node:assert/strict";
import { test } from "node:test";
import { alike, lines, range, smooth, together, unionOfSteps } from "../../ddp_notebook/widgets/js/drawing/curves.js";

/** @param {number[]} values @param {number[]} [steps] */
const course = (values, steps = values.map((_, at) => at)) => ({ steps: Float64Array.from(steps), values: Float64Array.from(values) });
const close = (one, other) => assert.ok(Math.abs(one - other) < 1e-9, `${one} is not ${other}`);

test("smoothing has no bias at the beginning and leaves out what is no number", () => {
  assert.deepEqual([...smooth([3, 3, 3], 0.9)].map((value) => Number(value.toFixed(9))), [3, 3, 3]);
  const found = smooth([1, NaN, 2], 0.5);
  close(found[0], 1);
  assert.ok(Number.isNaN(found[1]));
  close(found[2], (0.25 * 1 + 0.5 * 2) / 0.75);
  assert.deepEqual([...smooth([1, 5], 0)], [1, 5]);
});

test("few steps are drawn as they are: undefined where a rank has none, null where it is no number", () => {
  const found = lines([course([1, NaN, 3]), course([9], [1])], 100);
  assert.deepEqual(found.x, [0, 1, 2]);
  assert.deepEqual(found.lines, [[1, null, 3], [undefined, 9, undefined]]);
  assert.equal(found.each, 1);
});

test("many steps are thinned to the lowest and highest of neighbours, and no spike is lost", () => {
  const values = Array.from({ length: 10000 }, (_, at) => Math.sin(at / 500));
  values[7777] = 50;
  values[1234] = -50;
  const found = lines([course(values)], 1000);
  assert.ok(found.x.length <= 1000);
  assert.equal(found.each, 32);
  assert.ok(found.lines[0].includes(50) && found.lines[0].includes(-50));
  assert.deepEqual(found.x, [...found.x].sort((a, b) => a - b));
  assert.ok(found.lines[0].every((value) => values.includes(value)), "a value was made up");
  assert.equal(found.ends[found.ends.length - 1], 9999);
});

test("what is drawn of old steps does not change when new ones come", () => {
  const values = Array.from({ length: 1500 }, (_, at) => (at * 7919) % 101);
  const before = lines([course(values.slice(0, 1400))], 1000);
  const after = lines([course(values)], 1000);
  assert.equal(before.each, after.each);
  assert.deepEqual(after.lines[0].slice(0, 600), before.lines[0].slice(0, 600));
});

test("of many ranks: the range, the median, and the three furthest from it", () => {
  const courses = Array.from({ length: 64 }, (_, rank) => course([10, 10, 10].map((value) => value + rank / 100 + (rank === 40 ? 5 : rank === 7 ? -4 : 0))));
  courses[20] = course([10, NaN, 10]);
  const found = range(courses, 250);
  assert.deepEqual(found.worst, [20, 40, 7], "first who has a value that is no number");
  close(found.low[0], 6.07);
  close(found.high[0], 15.4);
  close(found.median[0], 10.315);
  assert.equal(found.each, 1);
});

test("the range of steps that go together holds all of them", () => {
  const courses = Array.from({ length: 20 }, (_, rank) => course(Array.from({ length: 1000 }, (_, at) => (at === 500 && rank === 3 ? 99 : rank))));
  const found = range(courses, 250);
  assert.equal(found.each, 4);
  assert.equal(Math.max(...found.high), 99);
  close(found.means[3][125], (99 + 3 + 3 + 3) / 4);
  assert.equal(found.ends[125], 503);
});

test("ranks that logged the same are one line, and steps are joined", () => {
  const series = new Map([[0, course([1, NaN])], [1, course([1, NaN])], [2, course([1, 3])]]);
  assert.deepEqual(alike(series).map(({ ranks }) => ranks), [[0, 1], [2]]);
  assert.deepEqual([...unionOfSteps([course([1, 1], [0, 4]), course([1, 1, 1], [1, 2, 4])])], [0, 1, 2, 4]);
  assert.deepEqual([together(250, 250), together(251, 250), together(1001, 250)], [1, 2, 8]);
});
