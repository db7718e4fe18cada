import assert from "node:assert/strict";
import test from "node:test";

import { broughtIn, score, sources } from "../../ddp_notebook/lessons/js/prediction.js";
import { linkTo } from "../../ddp_notebook/lessons/js/link.js";
import { figure, inWords, short } from "../../ddp_notebook/lessons/js/parts.js";
import { ticks } from "../../ddp_notebook/lessons/js/scene.js";
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
