import assert from "node:assert/strict";
import { test } from "node:test";
import { fromBase64, unpack } from "../../ddp_notebook/widgets/js/data/unpack.js";

/** @param {Record<string, any>} tables @param {ArrayBufferLike} buffer */
const one = (tables, buffer) => unpack({ tables }, [buffer]);

test("columns are read at their offsets, constants and scaled ones too", () => {
  const buffer = new ArrayBuffer(32);
  new Float32Array(buffer, 0, 2).set([0.5, -2]);
  new Uint8Array(buffer, 8, 2).set([3, 255]);
  new Float32Array(buffer, 16, 4).set([1, 2, 3, 4]);
  const columns = [["rank", 7], ["gone", null], ["value", "f4", 0], ["time", "u1", 8, 0.5, 100], ["first", "2f4", 16]];
  const { metric } = one({ metric: { rows: 2, columns } }, buffer);
  assert.equal(metric.rows, 2);
  assert.deepEqual([...metric.columns.rank], [7, 7]);
  assert.deepEqual([...metric.columns.gone], [NaN, NaN]);
  assert.deepEqual([...metric.columns.value], [0.5, -2]);
  assert.deepEqual([...metric.columns.time], [101.5, NaN]);
  assert.deepEqual([...metric.columns.first], [1, 2, 3, 4]);
  assert.equal(metric.widths.first, 2);
});

test("a view into a larger message, at any address, is read", () => {
  const bytes = new Uint8Array(3 + 8);
  new DataView(bytes.buffer).setFloat64(3, 41.5, true);
  const { step } = unpack({ tables: { step: { rows: 1, columns: [["start", "f8", 0]] } } }, [new DataView(bytes.buffer, 3)]);
  assert.equal(step.columns.start[0], 41.5);
});

test("a header that does not fit its buffer says which column", () => {
  const columns = [["start", "f8", 8]];
  assert.throws(() => one({ step: { rows: 1, columns } }, new ArrayBuffer(8)), /table step, column start: ends behind the buffer's 8 bytes/);
  assert.throws(() => one({ step: { rows: 1, columns: [["start", "q8", 0]] } }, new ArrayBuffer(8)), /unknown type q8/);
});

test("a message without tables and base64", () => {
  assert.deepEqual(unpack({}), {});
  assert.deepEqual([...new Uint8Array(fromBase64("AQID"))], [1, 2, 3]);
});
