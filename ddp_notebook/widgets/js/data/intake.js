/** Write side of the store: adds rows to tables and indexes, detects missing messages, merges snapshots. */

import { MISSING } from "./format.js";
import { keyOf, nameAt } from "./names.js";
import { Run } from "./run.js";
import { CELL, COLLECTIVE, CollectiveEntry, EXECUTION } from "./tables.js";
import { unpack } from "./unpack.js";

const MOST_FRESH = 4096;
const MOST_ANSWERED = 1024;
/** @type {import("./unpack.js").Rows} */
const NO_ROWS = { rows: 0, columns: {}, widths: {} };
const MOST_OPEN = 2000; // spans of a rank

/**
 * Key of a span, which identifies repeated rows: a call by its number, a part of a step by its start. Rounding of times
 * can differ between messages, so `shift` selects neighbouring keys.
 * @param {Record<string, any>} columns
 * @param {number} at
 */
function spanKey({ rank, kind, call, start, thread }, at, shift = 0) {
  if (kind[at] >= EXECUTION) return `${rank[at]} ${kind[at]} ${call[at]}`;
  return `${rank[at]} ${kind[at]} ${thread[at]} ${Math.round(start[at] * 100) + shift}`;
}

/**
 * The key under which a map contains the span, if any.
 * @param {Map<string, number>} map
 * @param {Record<string, any>} columns
 * @param {number} at
 */
function knownKey(map, columns, at) {
  for (const shift of columns.kind[at] >= EXECUTION ? [0] : [0, -1, 1]) {
    const key = spanKey(columns, at, shift);
    if (map.has(key)) return key;
  }
  return undefined;
}

/** Number of rows of each course, by cell and name. @param {import("./unpack.js").Rows} metric */
function rowsOfEach({ rows, columns }) {
  /** @type {Map<string, number>} */
  const found = new Map();
  for (let at = 0; at < rows; at++) {
    const key = `${columns.cell[at]} ${columns.name[at]}`;
    found.set(key, (found.get(key) ?? 0) + 1);
  }
  return found;
}

/** @param {Map<any, any>|Set<any>} all the oldest entry is removed */
function deleteFirst(all) {
  for (const key of all.keys()) return void all.delete(key);
}

/** Write side of the store; `Store` is the read side. */
export class Intake extends Run {
  constructor() {
    super();
    /** @type {Set<(what: "data"|"choice") => void>} */
    this.listeners = new Set();
    /** @type {Set<number>} */
    this.answered = new Set(); // answered requests, including those whose rows are no longer kept
    this.heard = ""; // when the kernel answers this view: "now" or LATE; "": not known yet
    this.choice = {
      /** @type {Set<number>|null} */ ranks: null,
      /** @type {string|null} */ metric: null,
      /** @type {Set<number>|null} */ runs: null, // runs of the metric by their first cell; null: the newest run
      log: false,
      smoothing: 0,
      /** @type {{cell: number, step: number}|null} */ step: null,
      /** @type {import("./names.js").Name|null} */ collective: null,
      /** @type {{rank: number, call: number}|null} */ remote: null, // a call between ranks, and its caller
      paused: false,
      /** @type {[number, number]|null} */ window: null,
    };
  }

  /** @param {"data"|"choice"} what */
  tell(what) {
    for (const listener of this.listeners) listener(what);
  }

  /**
   * Add a message.
   * @param {Record<string, any>} message
   * @param {(ArrayBuffer|ArrayBufferView)[]} [buffers]
   * @returns {boolean} whether to request a snapshot: messages are missing, and none was requested recently
   */
  feed(message, buffers = []) {
    const now = performance.now();
    const tables = unpack(message, buffers); // first, because a message that cannot be unpacked counts as missing
    if (message.kind === "answer") {
      this.#take(message, tables, true);
      if (message.request !== undefined) this.answers.set(message.request, { message, rows: tables, buffers });
      while (this.answers.size > 8) deleteFirst(this.answers);
      this.answered.add(message.request);
      if (this.answered.size > MOST_ANSWERED) deleteFirst(this.answered);
      this.tell("data");
      return false;
    }
    if (message.kind === "heard") this.takeHeard(message.answers);
    if (message.kind !== "delta" && message.kind !== "snapshot") return false;
    if (message.run !== this.run) this.#startRun(message);
    this.messages++;
    this.arrivedAt = now;
    if (!this.isNews(message)) return false;
    this.#take(message, tables, message.kind === "snapshot");
    this.tell("data");
    return this.wantsSnapshot(now);
  }

  /** Set the measured answer time of the kernel. @param {string} when */
  takeHeard(when) {
    this.heard = when;
    this.tell("data");
  }

  /** Note that the kernel is gone: no messages and no answers will arrive. */
  leave() {
    this.state = "gone";
    this.alert = this.heard = "";
    this.notes.answers = "";
    this.missed = 0;
    this.catchingUp = false;
    this.tell("data");
  }

  /**
   * Start another run: drop the data of the previous one, and keep the choices that are still valid.
   * @param {Record<string, any>} message
   */
  #startRun(message) {
    Object.assign(this, new Run(message.run));
    this.choice.step = this.choice.collective = this.choice.remote = this.choice.window = this.choice.runs = null;
    if (this.choice.paused) this.choice.paused = false;
    if (message.world_size && [...(this.choice.ranks ?? [])].some((rank) => rank >= message.world_size)) this.choice.ranks = null;
  }

  /**
   * @param {Record<string, any>} message
   * @param {Record<string, import("./unpack.js").Rows>} tables
   * @param {boolean} mayBeKnown the rows may be repeated
   */
  #take(message, tables, mayBeKnown) {
    for (const [number, text] of message.texts ?? []) this.texts.set(number, text);
    if (message.layouts) this.#takeLayouts(message.layouts);
    if (message.kind !== "answer") this.takeHeader(message);
    this.noteSteps(message);
    if (tables.metric || tables.course) this.#takeMetrics(tables, message.kind);
    if (tables.step) this.#takeKeyed(tables.step, this.tables.step, this.stepIndex, ({ rank }, index) => rank[index]);
    if (tables.bucket) {
      this.#takeKeyed(tables.bucket, this.tables.bucket, this.bucketIndex, ({ rank, bucket }, index) => rank[index] * 65536 + bucket[index]);
    }
    if (tables.span) this.#takeSpans(tables.span, mayBeKnown);
    if (tables.value) this.#takeValues(tables.value);
    if (tables.rank) this.#takeRanks(tables.rank);
  }

  /**
   * Replace the layouts; a message always contains all of them.
   * @param {{model: number, time: number, buckets: {parameters: string[]}[]}[]} layouts
   */
  #takeLayouts(layouts) {
    this.layouts.clear();
    for (const layout of layouts) {
      const known = this.layouts.get(layout.model) ?? [];
      known.push(layout);
      this.layouts.set(layout.model, known.sort((a, b) => a.time - b.time));
    }
  }

  /**
   * Add rows of metrics, and the sizes of their courses.
   * @param {Record<string, import("./unpack.js").Rows>} tables
   * @param {string} kind of the message; except for a delta, the rows replace all rows of these courses
   */
  #takeMetrics({ metric = NO_ROWS, course = NO_ROWS }, kind) {
    const { metrics, worldSize } = this;
    const isWhole = kind !== "delta";
    /** @type {Set<import("./courses.js").Course>} */
    const known = new Set(); // courses of which this view has at least as many points
    const replaced = new Set();
    /** @type {Set<import("./courses.js").Course>} */
    const answered = new Set();
    const sent = rowsOfEach(metric);
    const { name: names, cell: cells, points, begin, end, is_given: given, unit } = course.columns;
    for (let at = 0; at < course.rows; at++) {
      const one = metrics.of(this.text(names[at]), cells[at], names[at], worldSize);
      if (!one) continue;
      one.reach(begin[at], end[at]);
      one.isGiven &&= Boolean(given[at]);
      one.unit = Math.max(one.unit, unit[at]);
      if (kind === "answer") answered.add(one);
      if (!isWhole) one.counted = one.logged + points[at];
      // The rows of an answer are evenly thinned; the rows here are denser at their end, since they arrived after the
      // last answer.
      else if (one.logged === points[at] && (kind === "answer" ? !one.missing : one.held >= (sent.get(`${cells[at]} ${names[at]}`) ?? 0))) known.add(one);
      else {
        one.drop();
        one.counted = points[at];
        replaced.add(one);
      }
    }
    const { rank, name, cell, step, value, time } = metric.columns;
    for (let at = 0; at < metric.rows; at++) {
      const words = this.text(name[at]);
      const one = metrics.of(words, cell[at], name[at], worldSize);
      if (!one || known.has(one)) continue;
      if (isWhole && !replaced.has(one)) {
        one.drop();
        replaced.add(one);
      }
      one.add(rank[at], step[at], value[at], time[at]);
      if (isWhole) continue;
      this.fresh.push({ rank: rank[at], name: words, step: step[at], value: value[at], time: time[at] });
      this.freshTotal++;
    }
    for (const one of answered) one.leftOut = one.missing; // before the next delta, which may leave out more rows
    if (metric.rows) metrics.bound((one) => one.cell === this.cell || Boolean(this.choice.runs?.has(one.cell)));
    if (this.fresh.length > 2 * MOST_FRESH) this.fresh.splice(0, this.fresh.length - MOST_FRESH);
  }

  /**
   * Add rows that replace earlier rows with the same key.
   * @param {import("./unpack.js").Rows} rows
   * @param {import("./table.js").Table} table
   * @param {import("./tables.js").Index} index
   * @param {(columns: import("./table.js").Table["columns"], at: number) => number} keyOf within the step
   */
  #takeKeyed(rows, table, index, keyOf) {
    const begin = table.append(rows);
    const { cell, step } = table.columns;
    for (let at = begin; at < table.end; at++) {
      const number = table.moved + at;
      index.entry(cell[at], step[at], number).numbers.set(keyOf(table.columns, at), number);
    }
    index.prune();
  }

  /** @param {import("./unpack.js").Rows} rows @param {boolean} mayBeKnown */
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
      if (open.size > MOST_OPEN) deleteFirst(open);
      const own = (this.spansOfRank[rank[at]] ??= []);
      const last = own.length ? span.find(own[own.length - 1]) : -1;
      latest[at] = Math.max(Number.isNaN(end[at]) ? -Infinity : end[at], last >= 0 ? latest[last] : -Infinity);
      own.push(rowNumber);
      if (kind[at] === COLLECTIVE) this.#collective(nameAt(span.columns, at), op[at], start[at], rowNumber).spans.set(rank[at], rowNumber);
    }
    this.forget();
  }

  /** Row numbers of the spans that a snapshot or an answer may repeat. @param {import("./unpack.js").Rows} rows */
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

  /** @param {import("./unpack.js").Rows} rows */
  #takeValues(rows) {
    const { value } = this.tables;
    const begin = value.append(rows);
    const { rank, side, op, kind, call } = value.columns;
    const starts = kind.subarray(begin, value.end).some((/** @type {number} */ one) => one !== COLLECTIVE) ? this.#startsOfMessages() : null;
    for (let at = begin; at < value.end; at++) {
      const start = kind[at] === COLLECTIVE ? NaN : (starts?.get(`${rank[at]}:${call[at]}`) ?? NaN);
      const entry = this.#collective(nameAt(value.columns, at), op[at], start, value.moved + at);
      entry.values.set(2 * rank[at] + side[at], value.moved + at);
    }
    this.forget();
  }

  /** Start times of sends and receives, by rank and call. Spans contain the start of a collective. */
  #startsOfMessages() {
    const { span } = this.tables;
    const { rank, kind, call, start } = span.columns;
    const found = new Map();
    for (let at = span.first; at < span.end; at++) if (kind[at] > COLLECTIVE) found.set(`${rank[at]}:${call[at]}`, start[at]);
    return found;
  }

  /** @param {import("./unpack.js").Rows} rows */
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
      // Values can arrive before the span. Until then, use the current time as the start.
      entry = new CollectiveEntry(name, Number.isNaN(start) ? this.liveNow : start);
      entry.since = rowNumber;
      this.collectiveIndex.set(key, entry);
      this.isCollectiveListCurrent = false;
    }
    if (start < entry.start || (start > entry.start && !entry.spans.size)) {
      entry.start = start; // start on the first rank
      this.isCollectiveListCurrent = false;
    }
    entry.op = op || entry.op;
    return entry;
  }
}
