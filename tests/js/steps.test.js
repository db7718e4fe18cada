import assert from "node:assert/strict";
import { test } from "node:test";
import { askForSteps, barOf, bucketsOf } from "../../ddp_notebook/widgets/js/data/steps.js";
import { cutNames, namesIn } from "../../ddp_notebook/widgets/js/drawing/sync_draw.js";
import { Store } from "../../ddp_notebook/widgets/js/data/store.js";
import { COLLECTIVE, PARTS } from "../../ddp_notebook/widgets/js/data/tables.js";
import { cutLabels, highest, stack, stepLabels } from "../../ddp_notebook/widgets/js/drawing/stepbars.js";
import { inWords } from "../../ddp_notebook/widgets/js/parts/notices.js";
import { TEXTS, deliver, span, step } from "./messages.js";

const FRAME = { left: 50, top: 10, width: 100, height: 200, high: 100, pitch: 20, gap: 2 };

test("the parts of a step add up to its duration, and those of several ranks are their mean", () => {
  const store = new Store();
  deliver(store, { seq: 1 }, { step: [step(0, 0), step(1, 0, { waiting: 0, compute: 75, overlapped: 80 })] });
  const [entry] = store.steps();
  const bar = barOf(store, entry, null);
  assert.deepEqual(bar.ranks, [0, 1]);
  assert.deepEqual(Object.fromEntries(PARTS.map((part, at) => [part, bar.parts[at]])), {
    input: 5, compute: 20, overlapped: 47.5, exposed: 10, waiting: 7.5, optimizer: 6, rest: 4,
  });
  assert.equal(bar.parts.reduce((sum, part) => sum + part), bar.duration);
  assert.equal(barOf(store, entry, new Set([0])).parts[PARTS.indexOf("waiting")], 15);
  assert.equal(barOf(store, entry, new Set([9])), null);
});

test("a bar that was computed is computed anew when a rank's row comes", () => {
  const store = new Store();
  deliver(store, { seq: 1 }, { step: [step(0, 0)] });
  const [entry] = store.steps();
  assert.equal(barOf(store, entry, null).duration, 100);
  deliver(store, { seq: 2 }, { step: [step(1, 0, { duration: 200 })] });
  assert.equal(barOf(store, entry, null).duration, 150);
});

test("rectangles stand on each other, from the axis up, and are cut at the top", () => {
  const parts = [5, 40, 20, 10, 15, 6, 4];
  const rects = stack([{ parts }, { parts: [0, 150, 0, 0, 30, 0, 0] }], FRAME);
  const first = rects.filter((rect) => rect.bar === 0);
  assert.deepEqual(first.map((rect) => rect.part), PARTS);
  assert.deepEqual(first.map((rect) => rect.height), parts.map((part) => 2 * part));
  assert.equal(first[0].y + first[0].height, 210);
  for (let at = 1; at < first.length; at++) assert.ok(Math.abs(first[at].y + first[at].height - first[at - 1].y) < 1e-9);
  const second = rects.filter((rect) => rect.bar === 1);
  assert.deepEqual(second.map(({ part, x, y, width, height }) => ({ part, x, y, width, height })), [{ part: "compute", x: 71, y: 10, width: 18, height: 200 }]);
});

test("a first step that is much longer does not flatten the others", () => {
  assert.ok(highest([800, ...Array.from({ length: 30 }, () => 40)]) < 60);
  assert.ok(highest([40, 50]) >= 50);
  assert.equal(highest([]), 1);
});

test("of a bucket: what waited, what was hidden behind compute, what was exposed", () => {
  const store = new Store();
  const bucket = (number, start, end) => ({ rank: 0, cell: 1, step: 0, bucket: number, nbytes: 1e6, start, end, model: 4 });
  const call = (number, start, end, wait) => span(0, COLLECTIVE, start + 0.0004, end, { call: number, number, wait });
  deliver(store, { seq: 1, texts: TEXTS, now_ms: 200, layouts: [{ model: 4, time: 0, buckets: [["head.weight"], ["a", "b"]].map((parameters) => ({ parameters })) }] }, {
    bucket: [bucket(0, 20, 40), bucket(1, 50, 70), bucket(2, 60, NaN)],
    span: [span(0, 2, 10, 75), call(1, 20, 40, 5), call(2, 50, 70, 0)],
  });
  const found = bucketsOf(store, { cell: 1, step: 0 }, 0);
  assert.deepEqual(found.backward, [10, 75]);
  assert.equal(found.lastIssue, 60);
  assert.equal(found.from, 10);
  const [first, second, third] = found.buckets;
  assert.deepEqual([first.start, first.arrived, first.hidden, first.end], [20, 25, 40, 40], "all behind compute");
  assert.deepEqual([second.arrived, second.hidden, second.end], [50, 60, 70], "exposed from the last issue on");
  assert.deepEqual([third.isOpen, third.end, Number.isNaN(third.wait)], [true, 200, true]);
  assert.deepEqual(second.names, ["a", "b"]);
  assert.deepEqual(bucketsOf(store, { cell: 1, step: 0 }, 1).buckets, []);
});

test("labels of cut bars stay apart and in the picture; one that has no room is left out", () => {
  const bars = [300, 50, 50, 200, 50, 50, 50, 150, 400].map((duration) => ({ duration }));
  const labels = cutLabels(bars, FRAME, 250, (words) => 6 * words.length);
  assert.deepEqual(labels.map(({ words }) => words.split(" ")[0]), ["300", "200"]);
  for (const [at, { words, x }] of labels.entries()) {
    assert.ok(x + 6 * words.length <= (labels[at + 1]?.x ?? 250), `${words} at ${x}`);
  }
});

test("labels below the bars never touch: a cell's name is worth more than a number, the newest cell's most", () => {
  const frame = { left: 40, top: 0, width: 500, height: 100, high: 1, pitch: 9, gap: 1 };
  const widthOf = (/** @type {string} */ words) => 6 * words.length;
  for (const counts of [[8, 3, 40], [1, 1, 1, 1], [34, 40], [55], [1]]) {
    const bars = counts.flatMap((count, cell) => Array.from({ length: count }, (_, step) => ({ cell: cell + 1, step: step + 34 })));
    const labels = stepLabels(bars, frame, 560, (cell) => `In [${cell}]`, widthOf);
    assert.ok(labels.length);
    if (counts.length > 1) assert.ok(labels.some(({ words }) => words.startsWith(`In [${counts.length}]: `)), `${counts}`);
    labels.forEach(({ words, x, width }, at) => {
      assert.ok(x - width / 2 >= 40 && x + width / 2 <= 560, words);
      if (at) assert.ok(x - width / 2 >= labels[at - 1].x + labels[at - 1].width / 2 + 6, `${labels[at - 1].words} and ${words}`);
    });
  }
});

test("when no cell runs any more, the steps that were left out are asked for once", () => {
  const store = new Store();
  const sent = [];
  const env = { canSend: true, ask: (message) => sent.push(message) };
  const look = (head) => {
    deliver(store, { seq: (store.seq ?? 0) + 1, ...head });
    askForSteps(store, env);
    return sent.length;
  };
  const left = "buckets: one of 8 steps is shown · 40 rows of the timeline left out";
  assert.equal(look({ state: "running", notes: { units_shown_of: 8, rows_left_out: 40 } }), 0, "while it runs they would be too many");
  assert.equal(inWords(store).join(" · "), left);
  assert.deepEqual(inWords(store, ["loss"]), [], "a note about the timeline does not stand below another panel");
  assert.deepEqual(inWords(store, ["loss", "sync"]), [left.split(" · ")[0]]);
  assert.deepEqual(inWords(store, ["timeline"]), [left.split(" · ")[1]], "it says itself which steps it has");
  assert.equal(look({ state: "idle" }), 1);
  assert.equal(look({ state: "idle" }), 1);
  store.feed({ kind: "answer", request: 1, steps_left_out: 0, steps_shown_of: 1, tables: {} });
  assert.deepEqual(inWords(store), []);
  assert.equal(look({ state: "idle", notes: { units_shown_of: 8, rows_left_out: 41 } }), 1, "the kernel still counts what it did not send");
  assert.deepEqual(inWords(store), []);
  assert.equal(look({ state: "running", cell: 2 }), 1);
  assert.equal(inWords(store).length, 2, "of the next cell steps are left out again");
  assert.equal(look({ state: "idle" }), 2);
  store.feed({ kind: "answer", request: 2, steps_left_out: 0, steps_shown_of: 8, tables: {} });
  assert.equal(inWords(store)[0], "buckets: one of 8 steps is shown", "the recording has only the last ones");

  assert.equal(look({ state: "running", cell: 3, notes: { units_shown_of: 1, rows_left_out: 41 } }), 2);
  assert.equal(look({ state: "idle" }), 2, "of this cell nothing was left out");
  assert.deepEqual(inWords(store), ["1 row of the timeline left out"], "of the cell before, whose steps have not all come");
  assert.equal(look({ state: "running", cell: 4, notes: { units_shown_of: 8, rows_left_out: 60 } }), 2);
  assert.equal(look({ state: "idle", notes: { units_shown_of: 1, rows_left_out: 60 } }), 3, "it was fast only when it began");
});

test("names of equal blocks differ where there is little room", () => {
  const measure = /** @param {string} words */ (words) => 6 * words.length;
  const shown = /** @param {string} front @param {number} room */ (front, room) => {
    const blocks = [3, 2, 1].flatMap((block) => ["mlp.bias", "norm1.weight"].map((name) => `blocks.${block}.${name}`));
    const firsts = ["head.weight", ...blocks].map((name) => front + name);
    return firsts.map((first) => namesIn([first, ...Array(11).fill("")], cutNames(firsts), room, measure));
  };
  assert.equal(shown("", 240)[2], "blocks.3.norm1.weight, 11 more");
  assert.equal(shown("", 150)[2], "blocks.3.norm1.weight +11");
  assert.equal(shown("", 130)[2], "blocks.3.norm1\u2026 +11");
  assert.deepEqual(shown("model.net.", 80).slice(0, 3), ["\u2026head.weight", "\u20263.mlp.bias", "\u20263.norm1\u2026 +11"]);
  for (const room of [80, 100, 120, 200]) assert.equal(new Set(shown("model.net.", room)).size, 7, `${room}: ${shown("model.net.", room)}`);
});

test("a name that cannot be cut so that it differs is cut all the same", () => {
  const measure = /** @param {string} words */ (words) => 6 * words.length;
  assert.equal(namesIn(["weight"], cutNames(["weight"]), 10, measure), "weight");
  assert.equal(namesIn([], cutNames([]), 10, measure), "");
  assert.equal(namesIn(["a.weight"], cutNames(["a.weight", "a.weight"]), 40, measure), "a\u2026");
});
