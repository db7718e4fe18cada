/** State of one run. Each run starts with a new object. */

import { Courses } from "./courses.js";
import { keyOf } from "./names.js";
import { Index, makeTables } from "./tables.js";

/** @typedef {{message: Record<string, any>, rows: Record<string, import("./unpack.js").Rows>, buffers: (ArrayBuffer|ArrayBufferView)[]}} Answer */

const HELLO_AGAIN_MS = 2000; // first interval; a busy kernel answers after its cell

export const LATE = "after the cell"; // when the kernel answers a view whose messages it cannot read while a cell runs

/** States of a run in which more data will arrive. */
export const GOING_ON = new Set(["running", "stuck", "hang"]);

export class Run {
  /** @param {string|null} [run] its name */
  constructor(run = null) {
    this.run = run;
    this.seq = 0; // number of the last message
    this.worldSize = 0;
    /** @type {string[]} */
    this.hosts = []; // by rank; empty: all ranks are on one machine
    this.cell = 0;
    this.stepsLeftOut = 0; // rows that did not fit the snapshot
    this.stepsAsked = false;
    this.rowsLeftOutAsked = 0; // left-out rows at the time of the last request for steps
    this.rowsLeftOutCame = 0; // left-out rows that the answer contained
    this.answeredShownOf = 0; // thinning factor of the steps in the last answer; 0: no valid answer
    this.state = "";
    this.title = "";
    /** @type {{cell: number, label: string, per_step: string, definition: string}|null} */
    this.training = null; // numbers of the last training run, as in the report
    this.alert = "";
    this.liveNow = 0;
    this.arrivedAt = 0; // performance.now() of the last message
    this.messages = 0;
    this.missed = 0; // lost messages
    this.catchingUp = false;
    this.askedAt = -Infinity;
    this.askAgainMs = HELLO_AGAIN_MS;
    /** @type {Map<number, string>} */
    this.texts = new Map();
    /** @type {number|null} */
    this.only = null; // the only cell of this view
    /** @type {Map<number, string>} */
    this.prompts = new Map(); // by cell: "In [8]"
    /** @type {Map<number, {time: number, buckets: {parameters: string[]}[]}[]>} */
    this.layouts = new Map();
    /** @type {Record<string, any>} */
    this.notes = {};
    /** @type {Map<number, Record<string, any>>} */
    this.liveRanks = new Map();
    this.metrics = new Courses();
    /** @type {{rank: number, name: string, step: number, value: number, time: number}[]} */
    this.fresh = []; // newest metrics, to measure the latency
    this.freshTotal = 0; // total number so far
    this.tables = makeTables();
    this.stepIndex = new Index(this.tables.step);
    this.bucketIndex = new Index(this.tables.bucket);
    /** @type {Map<string, import("./tables.js").CollectiveEntry>} */
    this.collectiveIndex = new Map(); // by name (names.js)
    /** @type {import("./tables.js").CollectiveEntry[]} */
    this.collectiveList = [];
    this.isCollectiveListCurrent = true;
    /** @type {number[][]} */
    this.spansOfRank = []; // row numbers
    this.forgottenSpan = 0;
    /** @type {Map<string, number>[]} */
    this.openOfRank = []; // row numbers of spans that may be repeated
    /** @type {Map<number, Answer>} */
    this.answers = new Map(); // by the number of the request
    /** @type {{now: number, ranks: Map<number, Record<string, any>>, ends: Record<"step"|"bucket"|"span"|"value", number>, metric: string|null}|null} */
    this.frozen = null; // state at the start of the pause
  }

  /** @param {number} number @returns {string} */
  text(number) {
    return this.texts.get(number) ?? "";
  }

  /** Thinning factor of the steps in this view. */
  get stepsShownOf() {
    return this.answeredShownOf || this.notes.units_shown_of || 1;
  }

  /**
   * Label of a cell: `In [6]`, or `cell 3` if it has no prompt. Two cells can have the same prompt if the notebook
   * kernel was restarted between them.
   * @param {number} cell
   */
  cellName(cell) {
    const prompt = this.prompts.get(cell);
    if (!prompt) return `cell ${cell}`;
    const isOne = [...this.prompts].every(([other, words]) => other === cell || words !== prompt);
    return isOne ? prompt : `${prompt} (cell ${cell})`;
  }

  /** Collectives sorted by the start on their first rank. */
  sortedCollectives() {
    if (!this.isCollectiveListCurrent) {
      this.collectiveList = [...this.collectiveIndex.values()].sort((a, b) => a.start - b.start || a.number - b.number);
      this.isCollectiveListCurrent = true;
    }
    return this.collectiveList;
  }

  // ---- what comes

  /** Count a message. @param {Record<string, any>} message @returns {boolean} whether it contains new data */
  isNews({ kind, seq }) {
    const expected = this.seq + 1;
    if (kind === "snapshot") {
      // A view that has received all messages has more than a snapshot contains.
      const isComplete = !this.catchingUp && this.seq > 0 && seq <= this.seq;
      this.catchingUp = false;
      this.seq = Math.max(this.seq, seq);
      return !isComplete;
    }
    if (seq < expected) return false; // it was part of a snapshot
    if (seq > expected) {
      if (this.seq) this.missed += seq - expected; // otherwise this view was opened late
      this.catchingUp = true;
    }
    this.seq = seq;
    return true;
  }

  /**
   * Whether to request a snapshot: messages are missing, and none was requested recently.
   * @param {number} now performance.now()
   */
  wantsSnapshot(now) {
    if (!this.catchingUp) this.askAgainMs = HELLO_AGAIN_MS;
    if (!this.catchingUp || now - this.askedAt < this.askAgainMs) return false;
    this.askAgainMs = Math.min(60e3, this.askedAt > 0 ? 2 * this.askAgainMs : this.askAgainMs);
    this.askedAt = now;
    return true;
  }

  /** @param {Record<string, any>} message */
  takeHeader(message) {
    this.worldSize = message.world_size ?? this.worldSize;
    this.hosts = message.hosts ?? this.hosts;
    this.liveNow = Math.max(this.liveNow, message.now_ms ?? 0);
    this.cell = message.cell ?? this.cell;
    for (const [cell, prompt] of message.prompts ?? []) this.prompts.set(cell, prompt);
    this.only = message.only ?? this.only;
    if (message.training !== undefined) this.training = message.training;
    if (message.state && GOING_ON.has(message.state) && !GOING_ON.has(this.state)) {
      this.stepsAsked = false;
      this.answeredShownOf = 0;
    }
    this.state = message.state ?? this.state;
    this.title = message.title ?? this.title;
    this.alert = message.why ?? "";
    this.notes = message.notes ?? this.notes;
  }

  /** Note which steps this view has. @param {Record<string, any>} message */
  noteSteps(message) {
    if (message.kind === "snapshot") {
      this.stepsAsked = false;
      this.rowsLeftOutAsked = this.rowsLeftOutCame = this.answeredShownOf = 0;
    }
    if (message.steps_left_out !== undefined) this.stepsLeftOut = message.steps_left_out;
    if (message.steps_shown_of) this.answeredShownOf = message.steps_shown_of;
    if (message.steps_shown_of === 1) this.rowsLeftOutCame = this.rowsLeftOutAsked;
  }

  /** Drop references to rows that were dropped. */
  forget() {
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
      this.isCollectiveListCurrent = false;
    }
  }
}
