/**
 * Detection of a kernel that reads messages during a cell: a view repeats "here" until a reply arrives or it gives up.
 */

import assert from "node:assert/strict";
import { test } from "node:test";

import { Hub } from "../../ddp_notebook/widgets/js/hub.js";
import { answersInWords, stateOf } from "../../ddp_notebook/widgets/js/parts/notices.js";

/** @param {import("node:test").TestContext} context @param {(message: any, hub: Hub) => void} kernel */
function greeted(context, kernel) {
  context.mock.timers.enable({ apis: ["setTimeout"] });
  /** @type {any[]} */
  const sent = [];
  const hub = new Hub((message) => {
    sent.push(message);
    kernel(message, hub);
  });
  const stop = hub.greet();
  const said = () => sent.filter(({ kind }) => kind === "here");
  return { hub, said, stop, pass: (/** @type {number} */ ms) => context.mock.timers.tick(ms) };
}

test("a kernel that hears it beside the cell is asked once", (context) => {
  const { hub, said, pass } = greeted(context, ({ kind }, its) => kind === "here" && its.receive({ kind: "heard", answers: "now" }));
  pass(5000);
  assert.equal(said().length, 1);
  assert.equal(answersInWords(hub.store), "", "as it should be, so no words are needed");
  for (const state of ["recorded", "stopped", "gone"]) assert.equal(answersInWords(Object.assign(hub.store, { state })), "", "no cell can run");
});

test("what goes to the main thread at first is said again", (context) => {
  let count = 0;
  const { hub, said, pass } = greeted(context, ({ kind }, its) => kind === "here" && ++count === 3 && its.receive({ kind: "heard", answers: "now" }));
  pass(5000);
  assert.deepEqual(said().map(({ last }) => last), [false, false, false]);
  assert.equal(hub.store.answersWhen, "now");
});

test("a kernel that does not answer is busy with its cell", (context) => {
  const { hub, said, pass } = greeted(context, () => {});
  pass(2000);
  assert.deepEqual(said().map(({ last }) => last), [false, false, false, true]);
  assert.equal(answersInWords(hub.store), "", "not known yet");
  pass(1000);
  assert.match(answersInWords(hub.store), /^buttons here work only after the cell; while it runs, the notebook's stop button/);
  hub.receive({ kind: "heard", answers: "now" });
  assert.equal(hub.store.answersWhen, "now", "a slow way is no deaf one");
});

test("what an earlier view has found holds until this one knows", (context) => {
  const { hub, pass } = greeted(context, () => {});
  hub.receive({ kind: "snapshot", seq: 1, run: "a", now_ms: 0, world_size: 2, notes: { answers: "now" }, tables: {} });
  assert.equal(hub.store.answersWhen, "now");
  pass(3000);
  assert.equal(hub.store.answersWhen, "after the cell");
});

test("a view that was closed says nothing more", (context) => {
  const { said, stop, pass } = greeted(context, () => {});
  pass(100);
  stop();
  pass(5000);
  assert.equal(said().length, 1);
});

test("without its kernel a view says that it is the last picture, also behind its last words", (context) => {
  let lives = true;
  const shown = { kind: "snapshot", run: "a", seq: 1, state: "running", cell: 1, world_size: 2 };
  const { hub, pass } = greeted(context, ({ kind }, its) => lives && kind === "hello" && its.receive({ ...shown, seq: its.store.seq + 1 }, []));
  hub.receive(shown, []);
  hub.left();
  pass(9000);
  assert.equal(stateOf(hub.store, "").words, "Cell 1 is running.", "it has answered: only the connection was another one");
  lives = false;
  hub.left();
  hub.receive({ ...shown, kind: "delta", seq: hub.store.seq + 1, state: "idle" }, []);
  pass(9000);
  assert.deepEqual(stateOf(hub.store, ""), { chip: "gone", words: "The kernel of this view has ended; this is the last picture of it." });
  assert.equal(answersInWords(hub.store), "");
});
