import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { logTicks, niceStep, plainTicks, spread, ticks, timeTicks } from "../../ddp_notebook/widgets/js/drawing/axis.js";
import { contrast, palette, rankStyle, textOn } from "../../ddp_notebook/widgets/js/drawing/colours.js";
import { bytes, duration, number, parseRanks, percent, ranksInWords, ranksShort } from "../../ddp_notebook/widgets/js/data/format.js";

const labels = (found) => found.map(({ label }) => label);

const examples = JSON.parse(readFileSync(new URL("../data/units.json", import.meta.url), "utf8"));
const formatters = { times_ms: duration, sizes_bytes: bytes, shares: percent, values: number };

for (const [kind, pairs] of Object.entries(examples))
  test(`${kind} are written as in Python`, () => {
    assert.deepEqual(pairs.map(([value]) => formatters[kind](value)), pairs.map(([, text]) => text));
  });

test("numbers that are missing or not finite", () => {
  assert.deepEqual([duration(NaN), bytes(NaN)], ["–", "–"]);
  assert.deepEqual([NaN, -Infinity].map(number), ["NaN", "-Inf"]);
});

test("sets of ranks, there and back", () => {
  assert.equal(ranksShort([5, 0, 1, 2, 8, 9]), "0-2,5,8,9");
  assert.equal(ranksInWords([3]), "rank 3");
  assert.deepEqual([...parseRanks("0-3, 7", 64)], [0, 1, 2, 3, 7]);
  assert.equal(parseRanks(" all ", 4), null);
  assert.equal(parseRanks("0-3", 4), null, "all of them");
  assert.throws(() => parseRanks("0-64", 64), /rank 64 does not exist; the ranks are 0 to 63/);
  assert.throws(() => parseRanks("3-1", 64), /“3-1” runs backwards/);
  assert.throws(() => parseRanks("-2", 64), /“-2” is no rank; write for example 0-3,7 or all/);
});

test("ticks are at nice distances and none is lost to rounding", () => {
  assert.deepEqual([niceStep(10, 5), niceStep(0.7, 5), niceStep(3, 1)], [2, 0.2, 5]);
  assert.deepEqual(ticks(0, 0.3, 3), [0, 0.1, 0.2, 0.3]);
  assert.deepEqual(labels(plainTicks(-1, 1, 4)), ["-1.0", "-0.5", "0.0", "0.5", "1.0"]);
  assert.deepEqual(labels(plainTicks(1e6, 1.2e6, 2)), ["1.0e6", "1.1e6", "1.2e6"]);
});

test("a plain axis has at least two labels, so that its scale can be read", () => {
  assert.deepEqual(labels(plainTicks(0.036, 0.094, 2)), ["0.04", "0.06", "0.08"]);
  assert.deepEqual(labels(plainTicks(1, 87, 2)), ["20", "40", "60", "80"]);
  assert.deepEqual(labels(plainTicks(0.05, 0.86, 2)), ["0.2", "0.4", "0.6", "0.8"]);
  assert.deepEqual(labels(plainTicks(3, 3, 2)), ["3"]);
});

test("a time axis has one unit, from seconds to nanoseconds", () => {
  assert.deepEqual(timeTicks(0, 50, 5), { unit: "ms", ticks: [0, 10, 20, 30, 40, 50].map((value) => ({ value, label: String(value) })) });
  const units = [60000, 30, 0.03, 0.00003].map((span) => timeTicks(1000, 1000 + span, 5).unit);
  assert.deepEqual(units, ["s", "ms", "µs", "ns"]);
  assert.deepEqual(labels(timeTicks(1234.5, 1234.503, 3).ticks), ["1\u202f234\u202f500", "1\u202f234\u202f501", "1\u202f234\u202f502", "1\u202f234\u202f503"]);
});

test("a logarithmic axis has decades, and numbers between where there are few", () => {
  assert.deepEqual(labels(logTicks(0.02, 30)), ["0.1", "1", "10"]);
  assert.deepEqual(labels(logTicks(0.3, 4.3)), ["0.5", "1", "2"]);
  assert.ok(logTicks(2.1, 2.3).length >= 2);
  assert.deepEqual(logTicks(0, 1), []);
  assert.ok(logTicks(1e-12, 1e12).length <= 10);
});

test("labels are moved apart, each group around its middle", () => {
  assert.deepEqual(spread([0.5, 0.5, 0.5, 0.9], 0.1, 0, 1).map((place) => Number(place.toFixed(2))), [0.4, 0.5, 0.6, 0.9]);
  assert.deepEqual(spread([0, 0, 0.98, 1], 0.1, 0, 1).map((place) => Number(place.toFixed(2))), [0, 0.1, 0.9, 1]);
});

test("all that is drawn can be seen on its page", () => {
  for (const theme of /** @type {const} */ (["light", "dark"])) {
    const colours = palette(theme);
    assert.ok(contrast(colours.ink, colours.paper) > 12);
    assert.ok(contrast(colours.soft, colours.paper) > 4.5, `soft text, ${theme}`);
    for (const hue of colours.ranks) assert.ok(contrast(hue, colours.paper) >= 3, `${hue} on ${theme}`);
    for (const meaning of ["forward", "compute", "optimizer", "input", "communication", "exposed", "waitingLine"]) {
      assert.ok(contrast(colours.fill[meaning], colours.paper) >= 3, `${meaning} on ${theme}`);
    }
    for (const fill of Object.values(colours.fill)) assert.ok(contrast(textOn(fill), fill) >= 4, `words on ${fill}`);
  }
  const styles = Array.from({ length: 32 }, (_, rank) => JSON.stringify(rankStyle(palette("light"), rank)));
  assert.equal(new Set(styles).size, 32);
});

test("a value of a metric is written as in the notebook's texts (records/units.py)", () => {
  const values = [0, 0.1, 2.3456, 999.7, 7616, 123456, 1e-5, 2e6, -0.25];
  assert.deepEqual(values.map(number), ["0", "0.100", "2.35", "1,000", "7,616", "123,456", "1.00e-5", "2.00e6", "-0.250"]);
});
