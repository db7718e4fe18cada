/**
 * How the store takes in messages: rows go into tables and indexes, missing messages are noticed, snapshots merged.
 */

import { MISSING } from "../parts/format.js";
import { keyOf, nameAt } from "./names.js";
import { Series } from "./series.js";
import { CELL, COLLECTIVE, Entry, Index, makeTables } from "./tables.js";
import { unpack } from "./wire.js";

const MOST_METRICS = 48;
const MOST_FRESH = 4096;
const MOST_OPEN = 2000; // spans of a rank
const HELLO_AGAIN_MS = 2000; // at first; a kernel that is busy answers when its cell has ended

/**
 * What a span is known by when it comes again: a call by its number, a part of a step by its start. Times travel
 * rounded, not always to the same: `shift` is for the neighbours.
 * @param {Record<string, any>} columns
 * @param {number} at
 */
function spanKey({ rank, kind, call, start, thread }, at, shift = 0) {
  if (kind[at] >= COLLECTIVE) return `${rank[at]} ${call[at]}`;
  return `${rank[at]} ${kind[at]} ${thread[at]} ${Math.round(start[at] * 100) + shift}`;
}

/** The key under which a map has the span, if it has. @param {Map<string, number>} map @param {Record<string, any>} columns @param {number} at */
function knownKey(map, columns, at) {
  for (const shift of columns.kind[at] >= COLLECTIVE ? [0] : [0, -1, 1]) {
    const key = spanKey(columns, at, shift);
    if (map.has(key)) return key;
  }
  return undefined;
}

class StepEntry extends Entry {
  /** @param {any} store the Store @param {number} cell @param {number} step */
  constructor(store, cell, step) {
    super([cell, step]);
    this.store = store;
    this.cell = cell;
    this.step = step;
    this.numbers = new Map(); // row number by rank
  }

  /** The row index of each rank that has ended the step. @returns {[number, number][]} */
  get indexes() {
    return this.store.indexesOf("step", this.numbers);
  }

  /** @returns {Record<string, any>[]} */
  get rows() {
    return this.indexes.map(([, index]) => this.store.tables.step.row(index));
  }
}

class CollectiveEntry extends Entry {
  /** @param {import("./names.js").Name} name @param {number} start */
  constructor(name, start) {
    super([start, name.number]);
    const { kind, cell, group, number } = name;
    this.kind = kind;
    this.cell = cell;
    this.group = group;
    this.number = number;
    this.op = 0; // a text
    this.start = start;
    this.spans = new Map(); // number of the span's row, by rank
    this.values = new Map(); // number of the value's row, by 2 * rank + side
  }
}

/** The half of the store that is written; `Store` is the half that is read. */
export class Intake {
  constructor() {
    this.listeners = new Set();
    this.choice = {
      /** @type {Set<number>|null} */ ranks: null,
      /** @type {string|null} */ metric: null,
      log: false,
      smoothing: 0,
      /** @type {{cell: number, step: number}|null} */ step: null,
      /** @type {import("./names.js").Name|null} */ collective: null,
      paused: false,
      /** @type {[number, number]|null} */ window: null,
    };
    this.#reset(null);
  }

  /** @param {string|null} run */
  #reset(run) {
    this.run = run;
    this.seq = 0;
    this.worldSize = 0;
    this.cell = 0;
    this.state = "";
    this.title = "";
    this.alert = "";
    this.liveNow = 0;
    this.arrivedAt = 0; // performance.now() of the last message
    this.messages = 0;
    this.missed = 0; // messages that never came
    this.catchingUp = false;
    this.askedAt = -Infinity;
    this.askAgainMs = HELLO_AGAIN_MS;
    this.version = 0;
    /** @type {Map<number, string>} */
    this.texts = new Map();
    /** @type {number|null} */
    this.only = null; // the one cell that this view is of
    /** @type {Map<number, string>} */
    this.prompts = new Map(); // of cells that are over: "In [8]"
    /** @type {Map<number, {time: number, buckets: {parameters: string[]}[]}[]>} */
    this.layouts = new Map();
    /** @type {Record<string, any>} */
    this.notes = {};
    /** @type {Map<number, Record<string, any>>} */
    this.liveRanks = new Map();
    /** @type {Map<string, {cell: number, limit: number, series: Map<number, Series>}>} */
    this.metrics = new Map();
    /** @type {{rank: number, name: string, step: number, value: number, time: number}[]} */
    this.fresh = []; // the newest metrics, for the measurement of latency
    this.freshTotal = 0; // how many there ever were
    this.tables = makeTables();
    this.stepIndex = new Index(this.tables.step, (cell, step) => new StepEntry(this, cell, step));
    this.bucketIndex = new Index(this.tables.bucket, (cell, step) => Object.assign(new Entry([cell, step]), { numbers: new Map() }));
    /** @type {Map<string, CollectiveEntry>} */
    this.collectiveIndex = new Map(); // by their names (names.js)
    /** @type {CollectiveEntry[]} */
    this.collectiveList = [];
    this.collectiveVersion = this.collectiveListVersion = 0;
    /** @type {number[][]} */
    this.spansOfRank = []; // row numbers
    this.forgottenSpan = 0;
    /** @type {Map<string, number>[]} */
    this.openOfRank = []; // row numbers of spans that may come again
    /** @type {Map<number, Record<string, any>>} */
    this.answers = new Map();
    this.frozen = null;
  }

  /** @param {number} number @returns {string} */
  text(number) {
    return this.texts.get(number) ?? "";
  }

  /** The number of a cell, with the prompt by which its reader knows it where that is known. @param {number} cell */
  cellName(cell) {
    const prompt = this.prompts.get(cell);
    return prompt ? `${cell} (${prompt})` : `${cell}`;
  }

  /** @param {"data"|"choice"} what */
  tell(what) {
    this.version++;
    for (const listener of this.listeners) listener(what);
  }

  /** By the time of their first rank. */
  sortedCollectives() {
    if (this.collectiveListVersion !== this.collectiveVersion) {
      this.collectiveList = [...this.collectiveIndex.values()].sort((a, b) => a.start - b.start || a.number - b.number);
      this.collectiveListVersion = this.collectiveVersion;
    }
    return this.collectiveList;
  }

  /**
   * Take in a message.
   * @param {Record<string, any>} message
   * @param {(ArrayBuffer|ArrayBufferView)[]} [buffers]
   * @returns {boolean} whether a snapshot is needed: messages are missing, and it was not asked for lately
   */
  feed(message, buffers = []) {
    const now = performance.now();
    const tables = unpack(message, buffers); // first of all: a message that cannot be read is one that is missing
    if (message.kind === "answer") {
      this.#take(message, tables, true);
      if (message.request !== undefined) this.answers.set(message.request, { message, rows: tables, buffers, at: now });
      while (this.answers.size > 8) this.answers.delete(this.answers.keys().next().value);
      this.tell("data");
      return false;
    }
    if (message.kind !== "delta" && message.kind !== "snapshot") return false;
    if (message.run !== this.run) this.#startRun(message);
    this.messages++;
    this.arrivedAt = now;
    const isSnapshot = message.kind === "snapshot";
    const expected = this.seq + 1;
    if (!isSnapshot && message.seq < expected) return false; // it was in a snapshot
    if (isSnapshot) {
      // Whoever has seen all has more than a snapshot holds.
      const isComplete = !this.catchingUp && this.seq > 0 && message.seq <= this.seq;
      this.catchingUp = false;
      this.seq = Math.max(this.seq, message.seq);
      if (isComplete) return false;
    } else {
      if (message.seq > expected) {
        this.missed += message.seq - expected;
        this.catchingUp = true;
      }
      this.seq = message.seq;
    }
    this.#take(message, tables, isSnapshot);
    this.tell("data");
    if (!this.catchingUp) this.askAgainMs = HELLO_AGAIN_MS;
    if (!this.catchingUp || now - this.askedAt < this.askAgainMs) return false;
    this.askAgainMs = Math.min(60e3, this.askedAt > 0 ? 2 * this.askAgainMs : this.askAgainMs);
    this.askedAt = now;
    return true;
  }

  /** Another run: nothing of the one before is shown; what was chosen stays where it can. */
  #startRun(message) {
    this.#reset(message.run);
    this.choice.step = this.choice.collective = this.choice.window = null;
    if (this.choice.paused) this.choice.paused = false;
    if (message.world_size && [...(this.choice.ranks ?? [])].some((rank) => rank >= message.world_size)) this.choice.ranks = null;
  }

  /**
   * @param {Record<string, any>} message
   * @param {Record<string, import("./wire.js").Rows>} tables
   * @param {boolean} mayBeKnown rows may have come before
   */
  #take(message, tables, mayBeKnown) {
    for (const [number, text] of message.texts ?? []) this.texts.set(number, text);
    if (message.layouts) this.#takeLayouts(message.layouts);
    if (message.kind !== "answer") {
      this.worldSize = message.world_size ?? this.worldSize;
      this.liveNow = Math.max(this.liveNow, message.now_ms ?? 0);
      this.cell = message.cell ?? this.cell;
      this.only = message.only ?? this.only;
      this.state = message.state ?? this.state;
      this.title = message.title ?? this.title;
      this.alert = message.why ?? "";
      this.notes = message.notes ?? this.notes;
    }
    if (tables.metric) this.#takeMetrics(tables.metric);
    if (tables.step) this.#takeKeyed(tables.step, "step", this.stepIndex, ({ rank }, index) => rank[index]);
    if (tables.bucket) {
      this.#takeKeyed(tables.bucket, "bucket", this.bucketIndex, ({ rank, bucket }, index) => rank[index] * 65536 + bucket[index]);
    }
    if (tables.span) this.#takeSpans(tables.span, mayBeKnown);
    if (tables.value) this.#takeValues(tables.value);
    if (tables.rank) this.#takeRanks(tables.rank);
  }

  /** All that are known. @param {{model: number, time: number, buckets: {parameters: string[]}[]}[]} layouts */
  #takeLayouts(layouts) {
    this.layouts.clear();
    for (const layout of layouts) {
      const known = this.layouts.get(layout.model) ?? [];
      known.push(layout);
      this.layouts.set(layout.model, known.sort((a, b) => a.time - b.time));
    }
  }

  /** @param {import("./wire.js").Rows} rows */
  #takeMetrics({ rows, columns }) {
    const { rank, name, cell, step, value, time } = columns;
    for (let at = 0; at < rows; at++) {
      const words = this.text(name[at]);
      let metric = this.metrics.get(words);
      if (!metric) {
        if (this.metrics.size >= MOST_METRICS) continue;
        const limit = Math.min(8192, Math.max(2048, Math.floor(262144 / Math.max(1, this.worldSize) / 8) * 8));
        metric = { cell: cell[at], limit, series: new Map() };
        this.metrics.set(words, metric);
      }
      if (cell[at] < metric.cell) continue;
      let series = metric.series.get(rank[at]);
      if (cell[at] > metric.cell) {
        // A cell that counts its steps anew is a curve of its own; one that goes on continues the curve.
        if (series && step[at] <= series.lastStep) metric.series.clear();
        metric.cell = cell[at];
        series = metric.series.get(rank[at]);
      }
      if (!series) metric.series.set(rank[at], (series = new Series(metric.limit)));
      if (!series.add(step[at], value[at], time[at])) continue;
      this.fresh.push({ rank: rank[at], name: words, step: step[at], value: value[at], time: time[at] });
      this.freshTotal++;
    }
    if (this.fresh.length > 2 * MOST_FRESH) this.fresh.splice(0, this.fresh.length - MOST_FRESH);
  }

  /**
   * Rows that replace the one before with the same key.
   * @param {import("./wire.js").Rows} rows
   * @param {"step"|"bucket"} name
   * @param {Index<any>} index
   * @param {(columns: any, at: number) => number} keyOf within the step
   */
  #takeKeyed(rows, name, index, keyOf) {
    const table = this.tables[name];
    const begin = table.append(rows);
    const { cell, step } = table.columns;
    for (let at = begin; at < table.end; at++) {
      const number = table.moved + at;
      index.entry(cell[at], step[at], number).numbers.set(keyOf(table.columns, at), number);
    }
    index.prune();
  }

  /** @param {import("./wire.js").Rows} rows @param {boolean} mayBeKnown */
  #takeSpans(rows, mayBeKnown) {
    const { span } = this.tables;
    const known = mayBeKnown ? this.#knownSpans(rows) : null;
    const begin = span.append(rows);
    const { rank, kind, name, cell, start, end, wait, op, latest, replaced } = span.columns;
    for (let at = begin; at < span.end; at++) {
      if (kind[at] === CELL && name[at]) this.prompts.set(cell[at], this.text(name[at]));
      const rowNumber = span.moved + at;
      const open = (this.openOfRank[rank[at]] ??= new Map());
      const openKey = open.size ? knownKey(open, span.columns, at) : undefined;
      const seenKey = openKey === undefined && known?.size ? knownKey(known, span.columns, at) : undefined;
      const before = open.get(openKey ?? "") ?? known?.get(seenKey ?? "");
      if (openKey !== undefined) open.delete(openKey);
      const index = before === undefined ? -1 : span.find(before);
      if (index >= 0) replaced[index] = rowNumber;
      replaced[at] = 0;
      const mayComeAgain = Number.isNaN(end[at]) || (kind[at] >= COLLECTIVE && Number.isNaN(wait[at]));
      if (mayComeAgain) open.set(spanKey(span.columns, at), rowNumber);
      if (open.size > MOST_OPEN) open.delete(open.keys().next().value);
      const own = (this.spansOfRank[rank[at]] ??= []);
      const last = own.length ? span.find(own[own.length - 1]) : -1;
      latest[at] = Math.max(Number.isNaN(end[at]) ? -Infinity : end[at], last >= 0 ? latest[last] : -Infinity);
      own.push(rowNumber);
      if (kind[at] === COLLECTIVE) this.#collective(nameAt(span.columns, at), op[at], start[at], rowNumber).spans.set(rank[at], rowNumber);
    }
    this.#forget();
  }

  /** Row numbers of the spans that a snapshot or an answer may bring again. @param {import("./wire.js").Rows} rows */
  #knownSpans({ rows, columns }) {
    let from = Infinity;
    for (let at = 0; at < rows; at++) from = Math.min(from, columns.start[at]);
    const { span } = this.tables;
    const known = new Map();
    for (let at = span.first; at < span.end; at++) {
      const { start, replaced } = span.columns;
      if (start[at] >= from - 1 && !replaced[at]) known.set(spanKey(span.columns, at), span.moved + at);
    }
    return known;
  }

  /** @param {import("./wire.js").Rows} rows */
  #takeValues(rows) {
    const { value } = this.tables;
    const begin = value.append(rows);
    const { rank, side, op, kind, call } = value.columns;
    const starts = kind.subarray(begin, value.end).some((one) => one !== COLLECTIVE) ? this.#startsOfMessages() : null;
    for (let at = begin; at < value.end; at++) {
      const start = kind[at] === COLLECTIVE ? NaN : (starts?.get(`${rank[at]}:${call[at]}`) ?? NaN);
      const entry = this.#collective(nameAt(value.columns, at), op[at], start, value.moved + at);
      entry.values.set(2 * rank[at] + side[at], value.moved + at);
    }
    this.#forget();
  }

  /** Of sends and receives by rank and call; collectives have the starts of their spans. */
  #startsOfMessages() {
    const { span } = this.tables;
    const { rank, kind, call, start } = span.columns;
    const found = new Map();
    for (let at = span.first; at < span.end; at++) if (kind[at] > COLLECTIVE) found.set(`${rank[at]}:${call[at]}`, start[at]);
    return found;
  }

  /** @param {import("./wire.js").Rows} rows */
  #takeRanks({ rows, columns }) {
    for (let at = 0; at < rows; at++) {
      /** @type {Record<string, any>} */
      const row = {};
      for (const [name, column] of Object.entries(columns)) row[name] = column[at];
      for (const name of ["state", "line", "last", "waits_for"]) row[name] = this.text(row[name]) || "";
      row.line ||= MISSING;
      this.liveRanks.set(row.rank, row);
    }
  }

  /** @param {import("./names.js").Name} name @param {number} op @param {number} start @param {number} rowNumber */
  #collective(name, op, start, rowNumber) {
    const key = keyOf(name);
    let entry = this.collectiveIndex.get(key);
    if (!entry) {
      // Values may come before the span: then the collective is one of now.
      entry = new CollectiveEntry(name, Number.isNaN(start) ? this.liveNow : start);
      entry.since = rowNumber;
      this.collectiveIndex.set(key, entry);
      this.collectiveVersion++;
    }
    if (start < entry.start || (start > entry.start && !entry.spans.size)) {
      entry.start = start; // the first rank's
      this.collectiveVersion++;
    }
    entry.op = op || entry.op;
    return entry;
  }

  /** Let go what points at rows that are gone. */
  #forget() {
    const { span, value } = this.tables;
    if (span.moved + span.first !== this.forgottenSpan) {
      this.forgottenSpan = span.moved + span.first;
      for (const own of this.spansOfRank) {
        if (!own || own.length < 64) continue;
        let gone = 0;
        while (gone < own.length && own[gone] < this.forgottenSpan) gone++;
        if (gone > own.length / 4) own.splice(0, gone);
      }
    }
    const most = 2 * Math.max(2048, Math.ceil((span.limit + value.limit) / Math.max(1, this.worldSize) / 2));
    if (this.collectiveIndex.size > most) {
      const entries = this.sortedCollectives();
      for (const entry of entries.slice(0, entries.length - Math.floor(most / 2))) {
        this.collectiveIndex.delete(keyOf(entry));
      }
      this.collectiveVersion++;
    }
  }
}
