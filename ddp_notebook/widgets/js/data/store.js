/**
 * Read side of the store: all data that panels read, in bounded memory.
 *
 * A store belongs to the widget's model, so several views, and views that are opened later, show the same data. It adds
 * messages (`feed`), detects missing ones, and merges snapshots. While `choice.paused` is set it still adds messages,
 * but returns the state at the start of the pause.
 */

import { Intake } from "./intake.js";
import { keyOf } from "./names.js";

export class Store extends Intake {
  /** Milliseconds since the start of the recording, at the last message or at the start of the pause. */
  get now() {
    return this.frozen?.now ?? this.liveNow;
  }

  /** Latest state, line and memory of each rank. */
  get ranks() {
    return this.frozen?.ranks ?? this.liveRanks;
  }

  /** The chosen ranks, ascending. @returns {number[]} */
  shownRanks() {
    const all = Array.from({ length: this.worldSize }, (_, rank) => rank);
    return this.choice.ranks ? all.filter((rank) => this.choice.ranks?.has(rank)) : all;
  }

  /** Name of a rank, with its host if there are several hosts. @param {number} rank */
  rankName(rank) {
    const host = this.hosts[rank];
    return host ? `rank ${rank} on ${host}` : `rank ${rank}`;
  }

  /** Names of the metrics. A name that contains "loss" comes first. */
  metricNames() {
    const names = [...this.metrics.byName.keys()].filter((name) => this.runs(name).length);
    const isLoss = /** @param {string} name */ (name) => Number(/loss/i.test(name));
    return names.sort((a, b) => isLoss(b) - isLoss(a));
  }

  /** The chosen metric. Without a choice, the metric with most of the chosen runs, or else the first metric of the newest run with more than one value. */
  chosenMetric() {
    const names = this.metricNames();
    const { metric, runs } = this.choice;
    if (metric !== null && names.includes(metric)) return metric;
    const counts = names.map((name) => this.runs(name).filter(({ key }) => runs?.has(key)).length);
    const most = Math.max(0, ...counts);
    if (most) return names[counts.indexOf(most)];
    return this.frozen?.metric ?? this.#metricOfNewest(names);
  }

  /** @param {string[]} names in the order of preference */
  #metricOfNewest(names) {
    let [found, newest] = [names[0] ?? null, -1];
    for (const name of names) {
      // A single value is not a curve.
      const curves = this.runs(name).flatMap(({ courses }) => courses.filter(({ logged, series }) => logged > Math.max(1, series.size)));
      const last = Math.max(-1, ...curves.map(({ cell }) => cell));
      if (last > newest) [found, newest] = [name, last];
    }
    return found;
  }

  /** The newest cell with logged values that this view may show; -1 if there is none. */
  newestLogged() {
    return Math.max(-1, ...this.metricNames().flatMap((name) => this.runs(name).flatMap(({ cells }) => cells)));
  }

  /** The runs of a metric that this view may show, oldest first. @param {string|null} name */
  runs(name) {
    return this.metrics.runs(name ?? "", this.only);
  }

  /** The chosen runs, oldest first; the newest run if none of them exists. @param {string|null} name */
  shownRuns(name) {
    const all = this.runs(name);
    const chosen = all.filter(({ key }) => this.choice.runs?.has(key));
    return chosen.length ? chosen : all.slice(-1);
  }

  /** The points of a run on the chosen ranks. @param {import("./courses.js").RunOfCells} run */
  pointsOf(run) {
    return run.points(this.shownRanks(), this.frozen?.now ?? Infinity);
  }

  /** Label of a run: `In [6]`. @param {import("./courses.js").RunOfCells} run */
  runName(run) {
    const { cells } = run;
    const names = [this.cellName(cells[0]), ...(cells.length > 1 ? [this.cellName(cells[cells.length - 1])] : [])];
    return names.join(" to ");
  }

  /** The kept steps, oldest first; of all cells if no cell is passed. @param {number} [cell] */
  steps(cell) {
    const wanted = cell ?? this.only ?? undefined;
    if (!this.frozen && wanted === undefined) return this.stepIndex.all();
    const limit = this.frozen?.ends.step ?? Infinity;
    return this.stepIndex.all().filter((one) => one.since < limit && (wanted === undefined || one.cell === wanted));
  }

  /**
   * The number that the program passed for the first step of a cell; 0 if it passed none, or if it does not count these
   * steps.
   * @param {number} cell
   */
  stepsBefore(cell) {
    const chosen = this.chosenMetric();
    const course = [chosen, ...this.metricNames()].map((name) => this.metrics.byName.get(name ?? "")?.get(cell)).find(Boolean);
    if (!course?.isGiven || !course.series.size) return 0;
    const values = course.logged / course.series.size; // values per rank
    const count = this.steps(cell).reduce((most, { step }) => Math.max(most, step + 1), 0);
    // While a cell runs, a few rows of either table may be missing.
    const isByOne = Math.abs(course.last - course.first + 1 - values) <= 2;
    return isByOne && Math.abs(values - count) <= 3 + count / 4 ? course.first : 0;
  }

  /** @param {number} cell @param {number} step */
  stepOf(cell, step) {
    return this.stepIndex.get(cell, step);
  }

  /** The step that is chosen: `choice.step`, or the newest step that all ranks have finished. */
  chosenStep() {
    const { step } = this.choice;
    if (step) return this.stepOf(step.cell, step.step);
    const steps = this.steps();
    for (let at = steps.length - 1; at >= Math.max(0, steps.length - 8); at--) {
      if (steps[at].numbers.size >= this.worldSize) return steps[at];
    }
    return steps[steps.length - 1];
  }

  /**
   * The rows of a step, of each rank that has finished it, as objects.
   * @param {import("./tables.js").StepEntry} entry
   */
  rowsOf(entry) {
    return this.indexesOf("step", entry.numbers).map(([, index]) => this.tables.step.row(index));
  }

  /** Rows of the buckets of a step, of all ranks, as objects. @param {number} cell @param {number} step */
  bucketsOf(cell, step) {
    const entry = this.bucketIndex.get(cell, step);
    return entry ? this.indexesOf("bucket", entry.numbers).map(([, index]) => this.tables.bucket.row(index)) : [];
  }

  /**
   * The names of the parameters in a bucket of a model. DDP rebuilds its buckets after the first step.
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
    // The few open spans first: the search below stops by the ends of the others.
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

  /** The kept collectives, newest last. */
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

  /**
   * When the kernel answers requests of this view: "now" or LATE; "" if neither this view nor an earlier one has
   * measured it.
   */
  get answersWhen() {
    return this.heard || this.notes.answers || "";
  }

  // ---- choosing

  /** @param {Partial<Store["choice"]>} partial */
  choose(partial) {
    const wasPaused = this.choice.paused;
    Object.assign(this.choice, partial);
    if (partial.collective && !partial.remote) this.choice.remote = null; // only one of both
    if (this.choice.paused && !wasPaused) {
      const { step, bucket, span, value } = this.tables;
      const ends = { step: step.total, bucket: bucket.total, span: span.total, value: value.total };
      this.frozen = { now: this.liveNow, ranks: new Map(this.liveRanks), ends, metric: this.chosenMetric() };
    } else if (!this.choice.paused) this.frozen = null;
    this.tell("choice");
  }

  /** Choose the step at this distance from the chosen one. @param {number} by */
  chooseNeighbour(by) {
    const steps = this.steps();
    const entry = this.chosenStep();
    if (!entry) return;
    const { cell, step } = steps[Math.min(Math.max(steps.indexOf(entry) + by, 0), steps.length - 1)];
    this.choose({ step: { cell, step } });
  }

  /** @param {(what: "data"|"choice") => void} listener @returns {() => void} ends the subscription */
  subscribe(listener) {
    this.listeners.add(listener);
    return () => void this.listeners.delete(listener);
  }
}
