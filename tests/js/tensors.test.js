/** Computations of the tensors panel: text of elements, comparison, colours, heat maps, positions of cells. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { shortened } from "../../ddp_notebook/widgets/js/drawing/canvas.js";
import { palette } from "../../ddp_notebook/widgets/js/drawing/colours.js";
import { colourMap, gridOf, heatMap, markOf, placeOf, scaleOf } from "../../ddp_notebook/widgets/js/drawing/heat.js";
import { TensorSource, wholeTensors } from "../../ddp_notebook/widgets/js/data/tensor_source.js";
import { block, elementAt, indexOf, inLines, placeLegend, tilesAcross } from "../../ddp_notebook/widgets/js/drawing/tiles.js";
import { acrossRanks, differences, element, exactly, range, shapeOf, statistics } from "../../ddp_notebook/widgets/js/data/values.js";

const tensor = (rank, data, more = {}) => {
  const { low, high, mean, nans, infs } = statistics(data);
  return { rank, side: 0, dtype: "float32", shape: [data.length], numel: data.length, lookedAt: data.length, data: Float32Array.from(data), low, high, mean, nans, infs, ...more };
};

// ---- words

test("elements fit their cells and keep what matters", () => {
  assert.equal(element(0.5, "float32"), "0.5");
  assert.equal(element(-1.23456, "float32", 5), "-1.23");
  assert.equal(element(-0.0001234, "float32"), "-1.2e-4");
  assert.equal(element(123456789, "float32"), "1.235e8");
  assert.equal(element(0, "float32"), "0");
  assert.equal(element(-0, "float32"), "-0");
  assert.equal(element(NaN, "float32"), "NaN");
  assert.equal(element(-Infinity, "float32"), "-Inf");
  for (const value of [1e-30, 3.14159, -99999.5, 0.001, 1e20, 12345.678]) assert.ok(element(value, "float32", 7).length <= 7, element(value, "float32", 7));
});

test("integers are whole, bools are words, and what float32 cannot hold is said to be about so", () => {
  assert.equal(element(100001, "int64"), "100001");
  assert.equal(element(-3, "int8"), "-3");
  assert.equal(element(1, "bool"), "True");
  assert.equal(element(0, "bool", 3), "F");
  assert.match(element(2 ** 40, "int64"), /^≈/);
  assert.equal(exactly(2 ** 24, "int64"), "16777216");
  assert.match(exactly(2 ** 40, "int64"), /^about /);
  assert.equal(exactly(Math.fround(0.1), "float32"), "0.1");
});

test("a tensor in one line says what was looked at", () => {
  assert.equal(range(tensor(0, [1, 2, 3, 6])), "[4] f32 n=4 x∈[1, 6] μ=3");
  const sampled = tensor(0, [1, 2], { shape: [640, 40], numel: 25600, lookedAt: 256, nans: 3, infs: 1 });
  assert.equal(range(sampled), "[640, 40] f32 n=25,600 x∈[1, 2] μ=1.5 NaN! 3 Inf! 1 (of a sample of 256) first 2 shown");
  assert.equal(range(tensor(0, [7, 7, 7])), "[3] f32 n=3 all 7");
  assert.equal(range(tensor(0, [1, 0, 0, 1], { dtype: "bool" })), "[4] bool n=4 true 50 %");
  assert.match(range(tensor(0, [NaN, NaN])), /n=2 NaN! 2$/);
});

test("shapes of one tensor, of several, and of what was gathered", () => {
  assert.deepEqual(shapeOf("[[2, 3]]", 6), { shape: [2, 3], words: "[2, 3]" });
  assert.deepEqual(shapeOf("[2, 3]", 6), { shape: [2, 3], words: "[2, 3]" });
  assert.deepEqual(shapeOf("[[3]]", 12), { shape: [4, 3], words: "4 × [3]" });
  assert.deepEqual(shapeOf("[[2], [2]]", 4), { shape: [4], words: "2 × [2]" });
  assert.deepEqual(shapeOf("[[]]", 1), { shape: [], words: "[]" });
  assert.deepEqual(shapeOf("", 5), { shape: [5], words: "[5]" });
});

// ---- comparing

test("what a collective has changed", () => {
  assert.deepEqual([...differences(tensor(0, [1, NaN, 3]), tensor(0, [1, NaN, 4]))], [0, 0, 1]);
  assert.equal(differences(tensor(0, [1, 2]), tensor(0, [1, 2, 3])), null);
  assert.equal(differences(tensor(0, [1]), undefined), null);
});

test("which rank is unlike the others", () => {
  const same = acrossRanks([tensor(0, [1, NaN]), tensor(1, [1, NaN]), tensor(2, [1, NaN])]);
  assert.deepEqual([same.count, same.ranks], [0, []]);
  const odd = acrossRanks([tensor(0, [1, 2]), tensor(1, [1, 2]), tensor(2, [1, 2.5]), tensor(3, [1, 2])]);
  assert.deepEqual([[...odd.marks], odd.count, odd.ranks], [[0, 1], 1, [2]]);
  const first = acrossRanks([tensor(0, [9, 2]), tensor(1, [1, 2]), tensor(2, [1, 2])]);
  assert.deepEqual(first.ranks, [0]);
  assert.deepEqual(acrossRanks([tensor(0, [1]), tensor(1, [2]), tensor(2, [3])]).ranks, [], "none where all differ");
  assert.equal(acrossRanks([tensor(0, [1])]), null);
});

// ---- colours

test("the scale is centred on zero and ends at three deviations", () => {
  assert.deepEqual(scaleOf([[1, -4]]), { limit: 4, isClipped: false });
  assert.deepEqual(scaleOf([[0, 0]]), { limit: 1, isClipped: false });
  assert.deepEqual(scaleOf([[NaN, Infinity]]), { limit: 1, isClipped: false });
  assert.deepEqual(scaleOf([new Array(100).fill(0.5)]), { limit: 0.5, isClipped: false });
  assert.equal(scaleOf(Array.from({ length: 64 }, () => [1, 1, 1, 1000])).isClipped, false, "small tensors are numbers");
  const outlier = scaleOf([[...new Array(99).fill(1), 1000]]);
  assert.ok(outlier.isClipped && outlier.limit < 1000 && outlier.limit > 100);
});

test("NaN, infinities and clipped values are apart", () => {
  assert.deepEqual([NaN, Infinity, -Infinity, 5, -5, 1].map((value) => markOf(value, 4)), ["X", "I", "-I", "+", "-", ""]);
  for (const theme of ["light", "dark"]) {
    const map = colourMap(palette(theme));
    const place = (value) => map.pixels[placeOf(value, 1)];
    assert.equal(map.css[placeOf(0, 1)], palette(theme).diverging.zero);
    assert.equal(map.css[placeOf(-1, 1)], palette(theme).diverging.low);
    assert.equal(map.css[placeOf(1, 1)], palette(theme).diverging.high);
    assert.equal(place(7), place(1));
    const values = new Set([...Array(257).keys()].map((i) => map.pixels[i]));
    assert.ok(!values.has(place(NaN)) && !values.has(place(Infinity)) && place(NaN) !== place(Infinity));
  }
});

test("a heat map never loses an outlier or a NaN", () => {
  const { pixels: table } = colourMap(palette("light"));
  const data = new Float32Array(64 * 64);
  data[64 * 10 + 20] = -1;
  data[64 * 40 + 50] = NaN;
  const small = heatMap(data, { rows: 64, columns: 64 }, 1, table, 8, 8);
  assert.deepEqual([small.width, small.height, small.perPixel], [8, 8, 64]);
  assert.equal(small.pixels[8 * 1 + 2], table[placeOf(-1, 1)]);
  assert.equal(small.pixels[8 * 5 + 6], table[placeOf(NaN, 1)]);
  assert.equal(small.pixels[0], table[placeOf(0, 1)]);
  const exact = heatMap(Float32Array.of(1, -1, 0), { rows: 2, columns: 2 }, 1, table, 100, 100);
  assert.deepEqual([exact.width, exact.height], [2, 2]);
  assert.equal(exact.pixels[3], 0, "no element: nothing");
});

// ---- places

test("tensors keep their rows; flat ones are wrapped", () => {
  assert.deepEqual(gridOf([64, 48], 3072), { rows: 64, columns: 48, isWrapped: false });
  assert.deepEqual(gridOf([2, 3, 4], 24, 1), { rows: 6, columns: 4, isWrapped: false });
  const flat = gridOf([1024], 1024, 1);
  assert.deepEqual(flat, { rows: 32, columns: 32, isWrapped: true });
  const long = gridOf([2, 100000], 200000, 1);
  assert.ok(long.isWrapped && long.rows * long.columns >= 200000 && 100000 % long.columns === 0, JSON.stringify(long));
});

test("small tensors are numbers, large ones maps, and cells lie in their tile", () => {
  const numbers = block([2, 3], 6, 212, 190);
  assert.deepEqual([numbers.asDigits, numbers.rows, numbers.columns], [true, 2, 3]);
  for (const [shape, count, width, height] of [[[32], 32, 212, 190], [[32], 32, 50, 52], [[64, 48], 3072, 212, 190], [[1], 1, 90, 60], [[100000], 100000, 212, 190]]) {
    const own = block(shape, count, width, height);
    assert.ok(own.width <= width + 1e-6 && own.height <= height + 1e-6, JSON.stringify(own));
    assert.ok(own.rows * own.columns >= count);
    const last = { x: ((count - 1) % own.columns) * own.cell + own.cell / 2, y: Math.floor((count - 1) / own.columns) * own.cellHeight + own.cellHeight / 2 };
    assert.equal(elementAt(own, count, last.x, last.y), count - 1);
    assert.equal(elementAt(own, count, own.width + 1, 0), -1);
  }
});

test("an element has the index of its tensor", () => {
  assert.deepEqual(indexOf(5, [2, 3]), [1, 2]);
  assert.deepEqual(indexOf(23, [2, 3, 4]), [1, 2, 3]);
  assert.deepEqual(indexOf(0, []), [0]);
});

test("tiles: all in a row where they are few, 8 by 8 at 64", () => {
  assert.equal(tilesAcross(4, 1000), 4);
  assert.equal(tilesAcross(1, 1000), 1);
  assert.equal(tilesAcross(64, 1000), 8);
  assert.equal(tilesAcross(16, 1000), 8);
  assert.ok(tilesAcross(64, 300) <= 3);
});

test("the words below a tensor stay in its tile", () => {
  const words = "[25688] f32 n=25,688 x∈[-6.22e-4, 8.562e-4] μ=1.0e-5 (of a sample of 256) first 32 shown";
  const lines = inLines(words, 34, (line) => line.length);
  assert.deepEqual(lines, ["[25688] f32 n=25,688", "x∈[-6.22e-4, 8.562e-4] μ=1.0e-5", "(of a sample of 256) first 32", "shown"]);
});

test("no line of the words below a tensor is wider than a tile of a narrow page", () => {
  const lines = inLines("[9930] f32 n=9,930 x∈[-0.4272, 0.5576] μ=0.0034 NaN! 3 (of a sample of 256) first 32 shown", 21, (line) => line.length);
  assert.deepEqual(lines, ["[9930] f32 n=9,930", "x∈[-0.4272, 0.5576]", "μ=0.0034 NaN! 3", "(of a sample of 256)", "first 32 shown"]);
});

test("a heading that is too long is cut at its end, a name at its front", () => {
  const measure = (words) => words.length;
  assert.equal(shortened("Step 63, In [4], rank 0: 2 buckets", 20, measure, false), "Step 63, In [4], ra…");
  assert.equal(shortened("blocks.3.attention.weight", 17, measure, true), "…attention.weight");
  assert.equal(shortened("short", 5, measure, false), "short");
  assert.equal(shortened("short", 1, measure, true), "");
});

test("the words next to the scale go below it where the page is narrow", () => {
  const parts = ["left: input, right: output", "X NaN", "I Inf", "□ changed by it", "◥ not the same on all ranks"];
  assert.equal(placeLegend(parts, 800).isBelow, false);
  const { isBelow, lines, height } = placeLegend(parts, 338);
  assert.ok(isBelow && height > placeLegend(parts, 800).height);
  assert.equal(lines.join(" ").replace(/\s+/g, " "), parts.join(" "));
  for (const line of lines) assert.ok(line.length * 5.7 <= 338 - 26, line);
});

// ---- whole tensors

test("whole tensors are cut from an answer, several of one rank joined", () => {
  const head = 13; // not aligned, as in a front end's message
  const bytes = new Uint8Array(head + 24);
  bytes.set(new Uint8Array(Float32Array.of(1, 2, 3, 4, 5).buffer), head + 4);
  const rows = { whole: { rows: 3, columns: { rank: [0, 1, 0], side: [0, 0, 0], offset: [0, 2, 3], count: [2, 1, 2] } } };
  const found = wholeTensors({ message: { data: { offset: 4, count: 5 } }, rows, buffers: [new DataView(bytes.buffer, head)] });
  assert.deepEqual([...found.get("0:0")], [1, 2, 4, 5]);
  assert.deepEqual([...found.get("1:0")], [3]);
});

test("what is asked for is asked once, and why there is nothing is told", () => {
  const sent = [];
  const store = { answers: new Map(), choice: {} };
  const source = new TensorSource(store, { ask: (message) => sent.push(message) });
  const one = { kind: 5, cell: 1, group: 3, number: 7, op: 2 };
  assert.equal(source.asked(one), "");
  source.ask(one);
  source.ask(one);
  assert.deepEqual(sent, [{ kind: "ask", what: "values", cell: 1, group: 3, number: 7, op: 2 }]);
  assert.equal(source.asked(one), "asking");
  store.answers.set(1, { message: {}, rows: {}, buffers: [] });
  assert.match(source.asked(one), /not kept/);
  const still = new TensorSource(store, { ask: () => assert.fail("asked"), canSend: false });
  still.ask(one);
  assert.equal(still.asked(one), "");
});
