import assert from "node:assert/strict";
import test from "node:test";

import { broughtIn, score, sources } from "../../ddp_notebook/lessons/js/prediction.js";
import { lines, moved } from "../../ddp_notebook/lessons/js/mesh.js";
import { explained, holders, products, valueOn } from "../../ddp_notebook/lessons/js/product.js";
import { linkTo } from "../../ddp_notebook/lessons/js/link.js";
import { figure, inWords, short } from "../../ddp_notebook/lessons/js/parts.js";
import { sideBySide, ticks } from "../../ddp_notebook/lessons/js/scene.js";
import { colours, lanes, moments, short as last } from "../../ddp_notebook/widgets/js/parts/sequence.js";
import { busiest, place, sameLinks, through } from "../../ddp_notebook/lessons/js/stepper.js";

test("numbers and ranks in a few letters", () => {
  assert.deepEqual([1111, 0.5, 1 / 3, 12345678, "nan"].map(figure), ["1111", "0.5", "0.3333", "12350000", "nan"]);
  assert.equal(short([0, 1, 2, 5]), "0-2,5");
  assert.equal(inWords([2]), "rank 2");
  assert.equal(inWords([]), "nobody");
});

test("which inputs may go into a cell", () => {
  const inputs = { 0: [1, 2, 3, 4], 1: [5, 6, 7, 8] };
  const state = { group: [0, 1], root: 1, inputs, sizes: [2], messages: false };
  assert.deepEqual(sources({ ...state, op: "all_reduce" }, 0, 1), [[0, 1], [1, 1]]);
  assert.deepEqual(sources({ ...state, op: "reduce_scatter" }, 1, 1), [[0, 3], [1, 3]]);
  assert.deepEqual(sources({ ...state, op: "broadcast" }, 0, 0), [[1, 0], [1, 1], [1, 2], [1, 3]]);
});

test("an input is combined with what was predicted", () => {
  const state = (reduce_op) => ({ reduces: true, reduce_op, group: [0, 1, 2, 3] });
  assert.equal(broughtIn(state("SUM"), "11", 100), 111);
  assert.equal(broughtIn(state("MAX"), "11", 3), 11);
  assert.equal(broughtIn(state("BXOR"), "6", 3), 5);
  assert.equal(broughtIn(state("AVG"), "", 8), 2);
  assert.equal(broughtIn(state("AVG"), "2", 8), 4);
  assert.equal(broughtIn({ reduces: false }, "2", 8), 8);
});

test("what is not specified and what was not predicted does not count", () => {
  const state = { specified: [0, 1], right: { 0: [true, false], 1: [false, false], 2: [true, true] } };
  assert.deepEqual(score(state, { 0: ["1", "2"], 1: ["", "3"], 2: ["9", "9"] }), [1, 3]);
});

test("bytes over links", () => {
  const links = [[0, 1, 8], [1, 2, 16], [2, 0, 8]];
  assert.deepEqual(busiest(links), [1, 2, 16]);
  assert.equal(busiest([]), null);
  assert.deepEqual(through(links, 3), [16, 24, 24]);
  assert.ok(sameLinks(links, [links[2], links[0], links[1]]));
  assert.ok(!sameLinks(links, [[0, 1, 8], [1, 2, 16], [2, 0, 9]]));
  assert.deepEqual(place(0, 4).map(Math.round), [150, 46]);
});

test("an axis in round steps", () => {
  assert.deepEqual(ticks(300), [0, 50, 100, 150, 200, 250, 300]);
  assert.deepEqual(ticks(2), [0, 0.5, 1, 1.5, 2]);
});

test("a wish is answered when the state says so", async () => {
  const listeners = {};
  const sent = [];
  let state = { taken: 0 };
  const model = {
    get: () => state,
    on: (name, listener) => (listeners[name] = listener),
    off: (name) => delete listeners[name],
    send: (content) => sent.push(content),
  };
  const change = (changes) => {
    state = { ...state, ...changes };
    listeners["change:state"]();
  };
  const link = linkTo(model);
  const words = [];
  link.onWork((said, isBusy) => words.push([said, isBusy]));
  const wish = link.ask({ do: "step" });
  assert.equal(sent.length, 1);
  const { request } = sent[0];
  assert.equal(sent[0].do, "step");
  assert.equal(await link.ask({ do: "step" }), null, "one at a time");
  listeners["msg:custom"]({ kind: "began", request });
  change({ answered: "another view's" });
  assert.ok(link.isBusy());
  change({ taken: 1, answered: request });
  assert.equal((await wish).taken, 1);
  assert.deepEqual(words, [["Asking the kernel …", true], ["Running on the ranks …", true], ["", false]]);
  link.close();
  assert.deepEqual(listeners, {});
});

test("a kernel that says nothing is told", async () => {
  const link = linkTo({ get: () => ({}), on: () => {}, off: () => {}, send: () => {} });
  const said = new Promise((resolve) => link.onWork((words) => words.startsWith("Nothing heard") && resolve(words)));
  link.ask({ do: "run" });
  assert.match(await said, /it runs a cell, and does this after it/);
  link.close();
});

/** Return a call from rank `src` to rank `dst`. */
const call = (src, dst, name, parent, sent, begun, ended, returned, more = {}) => ({ src, dst, function: name, kind: "rpc_sync", site: "", parent, nbytes: 100, sent, begun, ended, done: ended, returned, error: "", ...more });

test("what happened in calls, one after the other, and in whose colour", () => {
  const calls = [call(0, 1, "observe", null, 0, 1, 8, 9), call(1, 0, "Agent.act", 0, 2, 3, 4, 5), call(1, 0, "Agent.act", 0, 2.5, 3.5, 6, 7)];
  const references = [{ owner: 0, what: "Agent", made: 0, deleted: null, users: [{ rank: 1, parent: 0, since: 1, deleted: 8.5 }] }];
  const found = moments({ calls, references, pairs: [{ src: 0, dst: 1, at: 8.7 }], world_size: 2 });
  assert.deepEqual(found.map(({ what, call: at }) => `${what} ${at}`), ["sent 0", "begun 0", "sent 1", "sent 2", "begun 1", "begun 2", "ended 1", "returned 1", "ended 2", "returned 2", "ended 0", "gone 0", "backward 0", "returned 0"]);
  assert.equal(found[2].words, "rank 1 calls act on rank 0 (100 B), inside of observe");
  assert.equal(found[11].words, "rank 1 releases its reference to Agent");
  assert.equal(found[12].words, "backward: the gradient goes from rank 1 to rank 0");
  assert.deepEqual(colours(calls), [0, null, null]);
  const rows = new Map(found.map((moment, row) => [`${moment.call} ${moment.what}`, row]));
  assert.deepEqual(lanes(calls, rows), [0, 0, 1], "two calls at once lie beside each other");
  assert.equal(last("Agent.act"), "act");
});

test("an answer that comes after its function has been left", () => {
  const found = moments({ calls: [call(1, 0, "add", null, 0, 1, 2, 6, { done: 5 })], references: [], pairs: [], world_size: 2 });
  assert.deepEqual(found.map(({ what }) => what), ["sent", "begun", "ended", "done", "returned"]);
  assert.equal(found[3].words, "rank 0 puts the answer into the future of add");
});

test("a builtin runs without anybody seeing when", () => {
  const found = moments({ calls: [call(0, 1, "aten::add", null, 0, null, null, 3)], references: [], pairs: [], world_size: 2 });
  assert.deepEqual(found.map(({ what }) => what), ["sent", "returned"]);
});

/** Return a matrix on two ranks, sharded along a dimension; `null` keeps it whole on both. */
function cut(values, dim) {
  const [rows, columns] = [values.length, values[0].length];
  const part = (rank) => {
    if (dim === null) return { rank, offset: [0, 0], size: [rows, columns], values };
    const half = (dim === 0 ? rows : columns) / 2;
    if (dim === 0) return { rank, offset: [rank * half, 0], size: [half, columns], values: values.slice(rank * half, (rank + 1) * half) };
    return { rank, offset: [0, rank * half], size: [rows, half], values: values.map((row) => row.slice(rank * half, (rank + 1) * half)) };
  };
  return { shape: [rows, columns], parts: [part(0), part(1)], partial: false };
}

test("who holds an element, and what can be made of the pieces", () => {
  const values = [[1, 2], [3, 4]];
  const [whole, byRows, byColumns] = [null, 0, 1].map((dim) => cut(values, dim));
  assert.equal(valueOn(byRows, 1, 1, 0), 3);
  assert.equal(valueOn(byRows, 1, 0, 0), null);
  assert.deepEqual([holders(whole, 0, 0), holders(byRows, 1, 1), holders(byColumns, 1, 0)], [[0, 1], [1], [0]]);
  const of = (a, b) => ({ world_size: 2, matrices: [a, b] });
  assert.deepEqual(products(of(whole, byColumns), 0, 1), { of: 2, by: [0, 2], lacking: 0 });
  assert.deepEqual(products(of(byColumns, byRows), 1, 1), { of: 2, by: [1, 1], lacking: 0 });
  assert.deepEqual(products(of(byRows, byRows), 0, 0), { of: 2, by: [1, 0], lacking: 1 });
  assert.equal(explained(of(whole, byColumns), 0, 1), "Element (0, 1) is row 0 of A times column 1 of B, 2 products. Rank 1 can make all of them.");
  assert.match(explained(of(byColumns, byRows), 1, 1), /2 products\. Rank 0 can make 1, rank 1 can make 1: summands\.$/);
  assert.match(explained(of(byRows, byRows), 0, 0), /No rank has both factors of 1 of them: something has to be sent first\.$/);
});

test("what goes along the lines of a grid", () => {
  const one = (rank, way, purpose, nbytes) => ({ rank, way, purpose, nbytes });
  const calls = [one(0, "row", "gather", 8), one(1, "row", "gather", 8), one(0, "row", "gather", 8), one(0, "column", "sum", 4), one(3, "column", "sum", 4)];
  assert.deepEqual(moved(calls, 0), [{ way: "row", purpose: "gather", count: 2, nbytes: 16 }, { way: "column", purpose: "sum", count: 1, nbytes: 4 }]);
  assert.deepEqual(moved(calls, 2), []);
  const found = lines(calls, 2, 2);
  assert.deepEqual(found.map(({ way, at, nbytes }) => [way, at, nbytes]), [["row", 0, 16], ["row", 1, 0], ["column", 0, 4], ["column", 1, 0]]);
  assert.deepEqual(lines(calls, 1, 4).map(({ way }) => way), ["row"]);
});

test("labels of a line move apart and stay inside", () => {
  const label = (x) => ({ words: "recv", width: 100, x, y: 0 });
  const places = (...xs) => sideBySide(xs.map(label)).map(({ x }) => x);
  assert.deepEqual(places(10, 300), [10, 300]);
  assert.deepEqual(places(10, 20), [10, 120]);
  assert.deepEqual(places(640, 650), [550, 660]);
  assert.deepEqual(places(700), [660]);
});
