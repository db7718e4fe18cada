/**
 * What is known of a run: everything that panels read, in bounded memory.
 *
 * A store belongs to the widget's model, so that several views and a view that is opened later show the same. It takes
 * in messages (`feed`), notices missing ones, and merges snapshots. While `choice.paused` is set it goes on taking in,
 * and answers as of the moment of the pause.
 */

import { Intake } from "./intake.js";
import { keyOf } from "./names.js";

export class Store extends Intake {
  /** Milliseconds since the start of the recording: of the last message, or of the pause. */
  get now() {
    return this.frozen?.now ?? this.liveNow;
  }

  /** The latest of each rank: state, line, memory. */
  get ranks() {
    return this.frozen?.ranks ?? this.liveRanks;
  }

  /** The ranks that are chosen, ascending. @returns {number[]} */
  shownRanks() {
    const all = Array.from({ length: this.worldSize }, (_, rank) => rank);
    return this.choice.ranks ? all.filter((rank) => this.choice.ranks?.has(rank)) : all;
  }

  /** A rank, with its host where ranks are on several. @param {number} rank */
  rankName(rank) {
    const host = this.hosts[rank];
    return host ? `rank ${rank} on ${host}` : `rank ${rank}`;
  }

  /** The metrics' names; one with "loss" in it comes first. */
  metricNames() {
    const names = [...this.metrics.byName.keys()].filter((name) => this.runs(name).length);
    const isLoss = /** @param {string} name */ (name) => Number(/loss/i.test(name));
    return names.sort((a, b) => isLoss(b) - isLoss(a));
  }

  /** The metric that is chosen; without a choice the first one of the newest run that is a curve. */
  chosenMetric() {
    const names = this.metricNames();
    const { metric, runs } = this.choice;
    if (metric !== null && names.includes(metric)) return metric;
    const ofRuns = names.find((name) => this.runs(name).some(({ key }) => runs?.has(key)));
    return ofRuns ?? this.frozen?.metric ?? this.#metricOfNewest(names);
  }

  /** @param {string[]} names in the order in which they are preferred */
  #metricOfNewest(names) {
    let [found, newest] = [names[0] ?? null, -1];
    for (const name of names) {
      // A single value is no curve.
      const curves = this.runs(name).flatMap(({ courses }) => courses.filter(({ logged, series }) => logged > Math.max(1, series.size)));
      const last = Math.max(-1, ...curves.map(({ cell }) => cell));
      if (last > newest) [found, newest] = [name, last];
    }
    return found;
  }

  /** The newest cell that has logged anything that this view may show; -1: none has. */
  newestLogged() {
    return Math.max(-1, ...this.metricNames().flatMap((name) => this.runs(name).flatMap(({ cells }) => cells)));
  }

  /** The runs of a metric that this view may show, oldest first. @param {string|null} name */
  runs(name) {
    return this.metrics.runs(name ?? "", this.only);
  }

  /** The runs that are chosen, oldest first; the newest, if none of them is there. @param {string|null} name */
  shownRuns(name) {
    const all = this.runs(name);
    const chosen = all.filter(({ key }) => this.choice.runs?.has(key));
    return chosen.length ? chosen : all.slice(-1);
  }

  /** The points of a run, of the ranks that are chosen. @param {import("./courses.js").RunOfCells} run */
  pointsOf(run) {
    return run.points(this.shownRanks(), this.frozen?.now ?? Infinity);
  }

  /** A run as its reader knows it: `In [6]`. @param {import("./courses.js").RunOfCells} run */
  runName(run) {
    const { cells } = run;
    const names = [this.cellName(cells[0]), ...(cells.length > 1 ? [this.cellName(cells[cells.length - 1])] : [])];
    return names.join(" to ");
  }

  /** The steps that are kept, oldest first; without a cell those of all cells. @param {number} [cell] */
  steps(cell) {
    const wanted = cell ?? this.only ?? undefined;
    if (!this.frozen && wanted === undefined) return this.stepIndex.all();
    const limit = this.frozen?.ends.step ?? Infinity;
    return this.stepIndex.all().filter((one) => one.since < limit && (wanted === undefined || one.cell === wanted));
  }

  /**
   * The number that the program gave to the first step of a cell; 0 if it gave none, or does not count these steps.
   * @param {number} cell
   */
  stepsBefore(cell) {
    const chosen = this.chosenMetric();
    const course = [chosen, ...this.metricNames()].map((name) => this.metrics.byName.get(name ?? "")?.get(cell)).find(Boolean);
    if (!course?.isGiven || !course.series.size) return 0;
    const values = course.logged / course.series.size; // of a rank
    const count = this.steps(cell).reduce((most, { step }) => Math.max(most, step + 1), 0);
    // While a cell runs, a few rows of either may be missing here.
    const isByOne = Math.abs(course.last - course.first + 1 - values) <= 2;
    return isByOne && Math.abs(values - count) <= 3 + count / 4 ? course.first : 0;
  }

  /** @param {number} cell @param {number} step */
  stepOf(cell, step) {
    return this.stepIndex.get(cell, step);
  }

  /** The step that is chosen: `choice.step`, or the newest that all ranks have ended. */
  chosenStep() {
    const { step } = this.choice;
    if (step) return this.stepOf(step.cell, step.step);
    const steps = this.steps();
    for (let at = steps.length - 1; at >= Math.max(0, steps.length - 8); at--) {
      if (steps[at].numbers.size >= this.worldSize) return steps[at];
    }
    return steps[steps.length - 1];
  }

  /** The rows of a step, of each rank that has ended it, as objects. @param {import("./tables.js").StepEntry} entry */
  rowsOf(entry) {
    return this.indexesOf("step", entry.numbers).map(([, index]) => this.tables.step.row(index));
  }

  /** Rows of the buckets of a step, of all ranks, as objects. @param {number} cell @param {number} step */
  bucketsOf(cell, step) {
    const entry = this.bucketIndex.get(cell, step);
    return entry ? this.indexesOf("bucket", entry.numbers).map(([, index]) => this.tables.bucket.row(index)) : [];
  }

  /**
   * The names of the parameters in a bucket of a model. DDP makes its buckets anew after the first step.
   * @param {number} model
   * @param {number} bucket
   * @param {number} [time] of the bucket
   * @returns {string[]}
   */
  parametersOf(model, bucket, time = Infinity) {
    const layouts = this.layouts.get(model) ?? [];
    const layout = layouts.findLast((one) => one.time <= time) ?? layouts[0];
    return layout?.buckets[bucket]?.parameters ?? [];
  }

  /**
   * Indexes of the spans of a rank that touch [t0, t1], newest first.
   * @param {number} t0
   * @param {number} t1
   * @param {number} rank
   * @returns {Generator<number>}
   */
  *spansIn(t0, t1, rank) {
    const { span } = this.tables;
    const { start, end, latest, replaced } = span.columns;
    const limit = this.frozen?.ends.span ?? Infinity;
    const own = this.spansOfRank[rank] ?? [];
    // The few open ones come first: their ends do not tell where to stop.
    if (!this.frozen) {
      for (const number of this.openOfRank[rank]?.values() ?? []) {
        const index = span.find(number);
        if (index >= 0 && Number.isNaN(end[index]) && start[index] <= t1) yield index;
      }
    }
    for (let at = own.length - 1; at >= 0; at--) {
      const index = span.find(own[at]);
      if (index < 0) break;
      if (own[at] >= limit || (replaced[index] && replaced[index] < limit)) continue;
      if (this.frozen) {
        if (start[index] <= t1 && !(end[index] < t0)) yield index;
      } else {
        if (latest[index] < t0) break; // no row up to this one ends within the window
        if (start[index] <= t1 && end[index] >= t0) yield index;
      }
    }
  }

  /** The collectives that are kept, newest last. */
  collectives() {
    if (!this.frozen) return this.sortedCollectives();
    const limit = this.frozen?.ends.span ?? Infinity;
    const values = this.frozen?.ends.value ?? Infinity;
    return this.sortedCollectives().filter((one) => one.since < (one.spans.size ? limit : values));
  }

  /** @param {import("./names.js").Name} name */
  collectiveOf(name) {
    return this.collectiveIndex.get(keyOf(name));
  }

  /** Rows of a collective's tensors, by rank and side, as objects. @param {import("./names.js").Name} name */
  valuesOf(name) {
    const entry = this.collectiveOf(name);
    return entry ? this.indexesOf("value", entry.values).map(([, index]) => this.tables.value.row(index)) : [];
  }

  /** @param {"step"|"bucket"|"span"|"value"} table @param {Map<number, number>} numbers @returns {[number, number][]} */
  indexesOf(table, numbers) {
    const limit = this.frozen?.ends[table] ?? Infinity;
    /** @type {[number, number][]} */
    const found = [];
    for (const [key, number] of numbers) {
      const index = this.tables[table].find(number);
      if (index >= 0 && number < limit) found.push([key, index]);
    }
    return found.sort((a, b) => a[0] - b[0]);
  }

  /** @param {number} request */
  isAnswered(request) {
    return this.answered.has(request);
  }

  /** When the kernel answers what is asked here: "now" or LATE; "" as long as neither this view nor an earlier one knows. */
  get answersWhen() {
    return this.heard || this.notes.answers || "";
  }

  // ---- choosing

  /** @param {Partial<Store["choice"]>} partial */
  choose(partial) {
    const wasPaused = this.choice.paused;
    Object.assign(this.choice, partial);
    if (partial.collective && !partial.remote) this.choice.remote = null; // one or the other
    if (this.choice.paused && !wasPaused) {
      const { step, bucket, span, value } = this.tables;
      const ends = { step: step.total, bucket: bucket.total, span: span.total, value: value.total };
      this.frozen = { now: this.liveNow, ranks: new Map(this.liveRanks), ends, metric: this.chosenMetric() };
    } else if (!this.choice.paused) this.frozen = null;
    this.tell("choice");
  }

  /** Choose the step that is so many further. @param {number} by */
  chooseNeighbour(by) {
    const steps = this.steps();
    const entry = this.chosenStep();
    if (!entry) return;
    const { cell, step } = steps[Math.min(Math.max(steps.indexOf(entry) + by, 0), steps.length - 1)];
    this.choose({ step: { cell, step } });
  }

  /** @param {(what: "data"|"choice") => void} listener @returns {() => void} ends it */
  subscribe(listener) {
    this.listeners.add(listener);
    return () => void this.listeners.delete(listener);
  }
}
