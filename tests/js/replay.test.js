import assert from "node:assert/strict";
import test from "node:test";

import { NotRecordedError, algorithm, collective, mesh, messages, model, product } from "../../docs/replay.js";
import { linkTo } from "../../ddp_notebook/lessons/js/link.js";

const ALL_REDUCE = {
  kind: "collective", op: "all_reduce", line: "dist.all_reduce(x)", reduce_op: "SUM", reduces: true, rooted: false, messages: false,
  root: 0, peer: 1, group: [0, 1], dtype: "float32", sizes: [2], specified: [0, 1],
  inputs: { 0: [1, 2], 1: [10, 20] }, result: { 0: [11, 22], 1: [11, 22] }, prediction: {}, right: { 0: [], 1: [] }, agrees: true, happened: null,
};
const MAX = { ...ALL_REDUCE, reduce_op: "MAX", result: { 0: [10, 20], 1: [10, 20] } };
const REDUCE = { ...ALL_REDUCE, op: "reduce", rooted: true, root: 1, specified: [1], result: { 0: [1, 2], 1: [11, 22] } };
const HAPPENED = { kind: "size", rank: 1, error: "RankError" };
const TAPE = { first: "all_reduce", states: [ALL_REDUCE, MAX, REDUCE], happened: { "dist.all_reduce(x) size 1": HAPPENED } };

test("a collective is shown before it was run, and then with the ranks' numbers", () => {
  const { first, answer } = collective(TAPE);
  assert.deepEqual([first.op, first.reduce_op, first.result, first.agrees], ["all_reduce", "SUM", null, null]);
  const ran = answer(first, { do: "run", prediction: { 0: [11, null], 1: [12, 22.0000001] } });
  assert.deepEqual(ran.result, ALL_REDUCE.result);
  assert.deepEqual(ran.right, { 0: [true, false], 1: [false, true] });
  assert.equal(ran.agrees, true);
  assert.deepEqual(answer(first, { do: "run", prediction: {} }).right, { 0: [], 1: [] });
});

test("what torch does not specify cannot be predicted wrong", () => {
  const { first, answer } = collective(TAPE);
  const reduce = answer(first, { do: "configure", options: { op: "reduce", group: [0, 1] } });
  assert.deepEqual(answer(reduce, { do: "run", prediction: { 0: [7, 7], 1: [7, 22] } }).right, { 0: [true, true], 1: [false, true] });
});

test("options that a collective has not are no reason to refuse it", () => {
  const { first, answer } = collective(TAPE);
  const reduce = answer(first, { do: "configure", options: { op: "reduce", group: [0, 1] } });
  const asked = { op: "all_reduce", reduce_op: "MAX", root: 1, peer: 0, group: [0, 1], dtype: "float32", sizes: 2 };
  assert.equal(answer(reduce, { do: "configure", options: asked }).reduce_op, "MAX");
});

test("nothing is made up", () => {
  const { first, answer } = collective(TAPE);
  const wishes = [
    { do: "configure", options: { op: "broadcast" } },
    { do: "configure", options: { op: "all_reduce", group: [0] } },
    { do: "configure", options: { op: "all_reduce", sizes: 3 } },
    { do: "configure", options: { op: "all_reduce", reduce_op: "AVG" } },
    { do: "run", prediction: {}, inputs: { 0: [1, 2], 1: [10, 21] } },
    { do: "wrong", kind: "size", rank: 0 },
  ];
  for (const wish of wishes) assert.throws(() => answer(first, wish), NotRecordedError, JSON.stringify(wish));
  assert.equal(answer(first, { do: "wrong", kind: "size", rank: 1 }).happened, HAPPENED);
});

test("an algorithm is taken step by step, and compared at its end", () => {
  const ring = { name: "ring", steps: 2, taken: 2, sizes: [1, 1], states: ["a", "b", "c"], agrees: true };
  const { first, answer } = algorithm({ first: "ring", states: { ring, tree: { ...ring, name: "tree" } } });
  assert.deepEqual([first.taken, first.states, first.agrees], [0, ["a"], null]);
  let now = answer(first, { do: "step" });
  assert.deepEqual([now.taken, now.states], [1, ["a", "b"]]);
  now = answer(now, { do: "compare" });
  assert.deepEqual([now.taken, now.states, now.agrees], [2, ["a", "b", "c"], true]);
  assert.equal(answer(now, { do: "step" }).taken, 2);
  assert.deepEqual(answer(now, { do: "restart" }), first);
  assert.equal(answer(now, { do: "configure", options: { name: "tree", sizes: [1, 1] } }).name, "tree");
  assert.throws(() => answer(now, { do: "configure", options: { name: "tree", sizes: [2, 1] } }), NotRecordedError);
});

test("a guess is right or wrong as the ranks have answered, and none is neither", () => {
  const after = { answer: "all_reduce", right: null, said: ["All_reduce"] };
  const guesses = { nothing: { guess: "nothing", right: false, said: ["Not 'nothing'"] } };
  const pair = { before: { answer: null, guess: null }, after, guesses };
  const { first, answer } = product({ first: "a b", states: { "a b": pair, "a c": { ...pair, before: { answer: null, of_b: "c" } } } });
  assert.equal(first, pair.before);
  assert.deepEqual(answer(first, { do: "run", guess: "" }), after);
  assert.deepEqual(answer(first, { do: "run", guess: "nothing" }), { ...after, ...guesses.nothing });
  assert.equal(answer(first, { do: "configure", options: { of_a: "a", of_b: "c" } }).of_b, "c");
  assert.throws(() => answer(first, { do: "configure", options: { of_a: "a", of_b: "d" } }), NotRecordedError);
  assert.equal(answer(first, { do: "run", guess: "" }).answer, "all_reduce");
});

test("a mesh has batches by rank only where ranks share a matrix", () => {
  const states = Object.fromEntries(["HSDP 2 false", "TP and FSDP 2 false", "TP and FSDP 2 true"].map((key) => [key, { before: { key }, after: { key }, guesses: {} }]));
  const { first, answer } = mesh({ first: "HSDP 2 false", states });
  const configured = (options) => answer(first, { do: "configure", options: { rows: 2, ...options } }).key;
  assert.equal(configured({ way: "HSDP", is_by_rank: true }), "HSDP 2 false");
  assert.equal(configured({ way: "TP and FSDP", is_by_rank: true }), "TP and FSDP 2 true");
  assert.equal(configured({ way: "TP and FSDP" }), "TP and FSDP 2 false");
});

test("a view asks it as it would ask a kernel, and is told what was not recorded", async () => {
  const link = linkTo(model(messages({ first: "blocking", states: { blocking: { name: "blocking" }, race: { name: "race" } } })));
  let drawn = 0;
  link.onState(() => drawn++);
  assert.equal((await link.ask({ do: "play", name: "race" })).name, "race");
  assert.equal(link.isBusy(), false);
  const after = await link.ask({ do: "play", name: "tags" });
  assert.deepEqual([after.name, drawn], ["race", 2]);
  assert.match(after.error, /^This page replays what four ranks did.* lessons\.point_to_point\("tags"\)$/);
  link.close();
});
