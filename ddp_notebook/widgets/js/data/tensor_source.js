/** Selects the shown collective, returns its tensors, and requests all their elements. */

import { keyOf, nameOf } from "./names.js";
import { shapeOf, statistics } from "./values.js";

const DWELL_MS = 400, CALM_MS = 2000; // minimum time for which a newest collective is shown; CALM_MS for reduced motion
const LOOK_BACK = 12;

/** @typedef {import("./values.js").Tensor & {words: string}} Told */

export class TensorSource {
  /** @param {import("./store.js").Store} store @param {{ask: (message: Record<string, any>) => number, canSend?: boolean, reducedMotion?: boolean}} env */
  constructor(store, env) {
    this.store = store;
    this.env = env;
    /** @type {import("./names.js").Name|null} */
    this.newest = null;
    this.since = -Infinity;
    /** @type {Map<string, number>} requests by collective */
    this.requests = new Map();
    /** @type {{request: number, tensors: Map<string, Float32Array>}|null} */
    this.whole = null;
  }

  /** The chosen collective, or the newest with tensors of all ranks. */
  current() {
    const { store } = this;
    const { collective } = store.choice;
    if (collective) return store.collectiveOf(collective) ?? null;
    const now = performance.now();
    const kept = this.newest && store.collectiveOf(this.newest);
    if (kept && now - this.since < (this.env.reducedMotion ? CALM_MS : DWELL_MS)) return kept;
    const all = store.collectives();
    let best = null;
    for (let at = all.length - 1, seen = 0; at >= 0 && seen < LOOK_BACK; at--) {
      const one = all[at];
      if (!one.values.size) {
        if (all.length - at > 4096) break;
        continue;
      }
      seen++;
      // A collective without the tensors of all ranks would change while it is shown.
      if (!best || one.values.size > best.values.size) best = one;
    }
    if (best && best !== kept) {
      this.newest = nameOf(best);
      this.since = now;
    }
    return best ?? kept ?? all[all.length - 1] ?? null;
  }

  /**
   * @param {import("./names.js").Name} one
   * @param {Set<number>} ranks
   * @returns {Map<number, (Told|null)[]>} by rank: input and output
   */
  tensors(one, ranks) {
    const { store } = this;
    const whole = this.#wholeOf(one);
    /** @type {Map<number, (Told|null)[]>} */
    const found = new Map();
    for (const row of store.valuesOf(one)) {
      if (!ranks.has(row.rank) || row.side > 1) continue;
      const sides = found.get(row.rank) ?? [null, null];
      found.set(row.rank, sides);
      const text = store.text(row.shape);
      const known = whole?.get(`${row.rank}:${row.side}`);
      const numel = row.numel;
      /** @type {Told} */
      const tensor = {
        rank: row.rank, side: row.side, dtype: store.text(row.dtype).replace("torch.", ""), numel, ...shapeOf(text, numel),
        data: row.first.slice(0, Math.min(row.count, 32)), lookedAt: row.looked_at, low: row.low, high: row.high, mean: row.mean, nans: row.nans, infs: row.infs,
      };
      if (known && known.length === numel) {
        const { low, high, mean, nans, infs } = statistics(known);
        Object.assign(tensor, { data: known, lookedAt: numel, low, high, mean, nans, infs });
      }
      sides[row.side] = tensor;
    }
    return found;
  }

  get canAsk() {
    return this.env.canSend !== false;
  }

  /** Request the whole tensors once. @param {import("./names.js").Name & {op: number}} one */
  ask(one) {
    const name = keyOf(one);
    if (this.requests.has(name) || !this.canAsk) return;
    this.requests.set(name, this.env.ask({ kind: "ask", what: "values", cell: one.cell, group: one.group, number: one.number, op: one.op }));
    if (this.requests.size > 64) this.requests.delete(/** @type {string} */ (this.requests.keys().next().value));
  }

  /**
   * State of the request: "" if not sent, "asking", "here", or the reason why there is no data.
   * @param {import("./names.js").Name} one
   */
  asked(one) {
    const request = this.requests.get(keyOf(one));
    if (request === undefined) return "";
    const answer = this.store.answers.get(request);
    if (!answer) return this.whole?.request === request ? "here" : "asking";
    if (answer.message.error) return answer.message.error;
    return answer.rows.whole?.rows ? "here" : "the whole tensors were not kept: run the cell with %%on_all_ranks --tensors full";
  }

  /** @param {import("./names.js").Name} one @returns {Map<string, Float32Array>|null} by "rank:side" */
  #wholeOf(one) {
    const request = this.requests.get(keyOf(one));
    if (request === undefined) return null;
    if (this.whole?.request === request) return this.whole.tensors;
    const answer = this.store.answers.get(request);
    if (!answer?.rows.whole) return null;
    this.whole = { request, tensors: wholeTensors(answer) };
    return this.whole.tensors;
  }
}

/**
 * The elements in an answer. Several tensors of one rank and side are concatenated.
 *
 * @param {import("./run.js").Answer} answer
 * @returns {Map<string, Float32Array>}
 */
export function wholeTensors({ message, rows, buffers }) {
  const { rank, side, offset, count } = rows.whole.columns;
  const buffer = buffers[0];
  const from = ArrayBuffer.isView(buffer) ? buffer.byteOffset : 0;
  const bytes = ArrayBuffer.isView(buffer) ? buffer.buffer : buffer;
  const begin = from + message.data.offset;
  // A copy: a view would keep the whole message alive, and might not be aligned.
  const all = new Float32Array(bytes.slice(begin, begin + 4 * message.data.count));
  const found = new Map();
  for (let at = 0; at < rows.whole.rows; at++) {
    const name = `${rank[at]}:${side[at]}`;
    const more = all.subarray(offset[at], offset[at] + count[at]);
    const before = found.get(name);
    if (!before) found.set(name, more);
    else {
      const joined = new Float32Array(before.length + more.length);
      joined.set(before);
      joined.set(more, before.length);
      found.set(name, joined);
    }
  }
  return found;
}
