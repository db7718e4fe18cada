/**
 * Messages for tests, in the form in which the kernel sends them.
 */

const TYPES = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, i4: Int32Array, f4: Float32Array, f8: Float64Array };
const F4 = ["duration", "input", "forward", "backward", "optimizer", "compute", "overlapped", "exposed", "waiting", "rest", "wait", "value", "low", "high", "mean"];
const F8 = ["time", "start", "end", "nbytes", "call", "numel", "looked_at", "nans", "infs"];

/**
 * Encode rows of tables as the `tables` of a header and a buffer.
 * @param {Record<string, Record<string, any>[]>} tables by name, rows as objects; all rows of a table have the same names
 */
export function pack(tables) {
  const head = {};
  const parts = [];
  let size = 0;
  for (const [name, rows] of Object.entries(tables)) {
    const columns = Object.keys(rows[0] ?? {}).map((column) => {
      const isWide = Array.isArray(rows[0][column]);
      const type = isWide || F4.includes(column) ? "f4" : F8.includes(column) || (name === "metric" && column === "step") ? "f8" : "u4";
      const values = TYPES[type].from(rows.flatMap((row) => row[column]));
      const entry = [column, `${isWide ? rows[0][column].length : ""}${type}`, size];
      parts.push([size, values]);
      size += Math.ceil(values.byteLength / 8) * 8;
      return entry;
    });
    if (rows.length) head[name] = { rows: rows.length, columns };
  }
  const buffer = new ArrayBuffer(size);
  for (const [offset, values] of parts) new Uint8Array(buffer, offset).set(new Uint8Array(values.buffer));
  return { tables: head, buffer };
}

/** Deliver a message to a store. @param {any} store @param {Record<string, any>} header @param {Record<string, any[]>} [rows] */
export function deliver(store, header, rows = {}) {
  const { tables, buffer } = pack(rows);
  return store.feed({ kind: "delta", run: "r", world_size: 2, now_ms: 0, cell: 1, tables, ...header }, [buffer]);
}

export const TEXTS = [[1, "loss"], [2, "all_reduce"], [3, "world"], [4, "model"]];

/** @param {number} rank @param {number} step @param {number} value @param {Record<string, any>} [more] */
export const metric = (rank, step, value, more = {}) => ({ rank, name: 1, cell: 1, step, value, time: step * 10, ...more });

/** @param {number} rank @param {number} step @param {Record<string, any>} [more] */
export const step = (rank, step, more = {}) => ({
  rank, cell: 1, step, start: step * 100, duration: 100, input: 5, forward: 30, backward: 50, optimizer: 6, compute: 60, overlapped: 20,
  exposed: 10, waiting: 15, rest: 4, ...more,
});

/** @param {number} rank @param {number} kind @param {number} start @param {number} end @param {Record<string, any>} [more] */
export const span = (rank, kind, start, end, more = {}) => ({
  rank, kind, name: 0, cell: 1, step: 0, start, end, thread: 0, op: 0, group: 0, number: 0, call: 0, nbytes: 0, wait: 0, ...more,
});
