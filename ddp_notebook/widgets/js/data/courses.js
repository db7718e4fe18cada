/**
 * Courses of metrics: the values that each rank has logged under one name in one cell, as far as this view has them.
 *
 * The kernel counts the logged values (table `course`) and sends the rows (table `metric`). If there are too many, it
 * sends only the lowest and highest of neighbouring rows. So a course knows how many of its points are missing here.
 */

import { STEP_UNITS } from "./tables.js";

const MOST_NAMES = 256; // limit of the kernel for one cell
const MOST_POINTS = 1 << 19; // for all courses; more than a saved page contains

/** @typedef {{steps: Float64Array, values: Float64Array, times: Float64Array}} Points  of one rank, by step */

/** The values logged under one name in one cell. */
export class Course {
  /** @param {number} cell @param {number} name number of a text @param {number} limit points of a rank */
  constructor(cell, name, limit) {
    this.cell = cell;
    this.name = name;
    this.limit = limit;
    this.counted = 0; // points on all ranks, counted by the kernel
    this.received = 0; // since the rows were last replaced
    this.leftOut = 0; // points missing in the last answer
    this.first = Infinity; // step
    this.last = -Infinity;
    this.isGiven = true; // the program passed all step numbers
    this.unit = 0; // unit of the steps, an index of STEP_UNITS
    /** @type {Map<number, Series>} */
    this.series = new Map(); // by rank
  }

  /** Number of points logged on all ranks. */
  get logged() {
    return Math.max(this.counted, this.received);
  }

  /** Number of points in this view. */
  get held() {
    let sum = 0;
    for (const { length } of this.series.values()) sum += length;
    return sum;
  }

  get missing() {
    return this.logged - this.held;
  }

  /** Drop the rows, but keep their count. */
  drop() {
    this.counted = this.logged;
    this.received = 0;
    this.series.clear();
  }

  /** @param {number} rank @param {number} step @param {number} value @param {number} time */
  add(rank, step, value, time) {
    let series = this.series.get(rank);
    if (!series) this.series.set(rank, (series = new Series(this.limit)));
    series.add(step, value, time);
    this.received++;
    this.reach(step, step);
  }

  /** @param {number} first @param {number} last */
  reach(first, last) {
    this.first = Math.min(this.first, first);
    this.last = Math.max(this.last, last);
  }
}

/** One cell, or several cells whose program passed step numbers that continue from one cell to the next. */
export class RunOfCells {
  /** @param {Course[]} courses in the order of their cells */
  constructor(courses) {
    this.courses = courses;
  }

  /** Number of the first cell, which identifies the run. */
  get key() {
    return this.courses[0].cell;
  }

  get cells() {
    return this.courses.map(({ cell }) => cell);
  }

  get last() {
    return Math.max(...this.courses.map(({ last }) => last));
  }

  /** Unit of the steps. */
  get unit() {
    return STEP_UNITS[Math.max(...this.courses.map(({ unit }) => unit))];
  }

  get logged() {
    return this.courses.reduce((sum, one) => sum + one.logged, 0);
  }

  get held() {
    return this.courses.reduce((sum, one) => sum + one.held, 0);
  }

  /**
   * The points of some ranks, as array views, which the next message may change.
   * @param {number[]} ranks
   * @param {number} time upper limit
   * @returns {Map<number, Points>}
   */
  points(ranks, time) {
    /** @type {Map<number, Points>} */
    const found = new Map();
    for (const rank of ranks) {
      const parts = this.courses.flatMap(({ series }) => series.get(rank)?.until(time) ?? []);
      if (parts.length) found.set(rank, parts.length === 1 ? parts[0] : joined(parts));
    }
    return found;
  }
}

/** @param {Points[]} parts @returns {Points} */
function joined(parts) {
  const all = /** @param {"steps"|"values"|"times"} name */ (name) => Float64Array.from(parts.flatMap((part) => [...part[name]]));
  return { steps: all("steps"), values: all("values"), times: all("times") };
}

/** All courses of a recording, by name and cell. */
export class Courses {
  constructor() {
    /** @type {Map<string, Map<number, Course>>} */
    this.byName = new Map();
    /** @type {Set<string>} */
    this.leftOut = new Set(); // names that exceed the limit of this view
  }

  /**
   * @param {string} words the name
   * @param {number} cell
   * @param {number} name its number
   * @param {number} worldSize
   */
  of(words, cell, name, worldSize) {
    let cells = this.byName.get(words);
    if (!cells) {
      if (this.byName.size >= MOST_NAMES && !this.#makeRoom(cell)) {
        this.leftOut.add(words);
        return null;
      }
      this.leftOut.delete(words);
      this.byName.set(words, (cells = new Map()));
    }
    let course = cells.get(cell);
    if (!course) {
      const limit = Math.min(8192, Math.max(2048, Math.floor(262144 / Math.max(1, worldSize) / 8) * 8));
      cells.set(cell, (course = new Course(cell, name, limit)));
    }
    return course;
  }

  /**
   * Remove the name with the oldest last cell, if it is older than this cell.
   * @param {number} cell
   * @returns {boolean} whether there is room now
   */
  #makeRoom(cell) {
    let oldest = "";
    let before = cell;
    for (const [words, cells] of this.byName) {
      const last = Math.max(...cells.keys());
      if (last < before) [oldest, before] = [words, last];
    }
    if (before === cell) return false;
    this.byName.delete(oldest);
    this.leftOut.add(oldest);
    return true;
  }

  /**
   * The runs of a metric, oldest first.
   * @param {string} words
   * @param {number|null} only this cell alone; null for all cells
   * @returns {RunOfCells[]}
   */
  runs(words, only = null) {
    /** @type {RunOfCells[]} */
    const found = [];
    const known = [...(this.byName.get(words)?.values() ?? [])].filter(({ cell, logged }) => logged > 0 && (only === null || cell === only));
    for (const course of known.sort((a, b) => a.cell - b.cell)) {
      const before = found[found.length - 1];
      const goesOn = before && course.isGiven && before.courses.every(({ isGiven }) => isGiven) && course.first > before.last;
      if (goesOn) before.courses.push(course);
      else found.push(new RunOfCells([course]));
    }
    return found;
  }

  /**
   * Drop the rows of the oldest cells if there are too many.
   * @param {(course: Course) => boolean} isShown courses to keep
   */
  bound(isShown) {
    const all = [...this.byName.values()].flatMap((cells) => [...cells.values()]).sort((a, b) => a.cell - b.cell);
    let sum = all.reduce((total, one) => total + one.held, 0);
    for (const one of all) {
      if (sum <= MOST_POINTS) return;
      if (isShown(one)) continue;
      sum -= one.held;
      one.drop();
    }
  }
}

/**
 * Points of one rank, in bounded memory. If a series is full, its older part is thinned: only the lowest and the
 * highest of neighbouring points stay, in their original order. So every kept point was logged. The older part has a
 * uniform density. If it takes more than half of the memory, its density is halved.
 */
export class Series {
  /** @param {number} limit points, a multiple of 8 */
  constructor(limit) {
    this.limit = limit;
    this.length = 0;
    this.thinned = 0; // dropped points
    this.older = 0; // points of the older part
    this.together = 2; // one of so many logged points stays in the older part
    this.steps = new Float64Array(64);
    this.values = new Float64Array(64);
    this.times = new Float64Array(64);
  }

  /**
   * @param {number} step
   * @param {number} value
   * @param {number} time milliseconds since the start of the recording
   */
  add(step, value, time) {
    if (this.length === this.limit) this.#thin();
    let at = this.length;
    while (at > 0 && this.steps[at - 1] > step) at--;
    if (this.length === this.steps.length) this.#grow();
    if (at < this.length) {
      for (const column of [this.steps, this.values, this.times]) column.copyWithin(at + 1, at, this.length);
    }
    this.steps[at] = step;
    this.values[at] = value;
    this.times[at] = time;
    this.length++;
  }

  /** Points up to a time, as views. @param {number} time */
  until(time) {
    let end = this.length;
    while (end > 0 && this.times[end - 1] > time) end--;
    return { steps: this.steps.subarray(0, end), values: this.values.subarray(0, end), times: this.times.subarray(0, end) };
  }

  #thin() {
    const before = this.length;
    if (this.older > this.limit / 2) {
      this.older = this.#reduce(0, this.older, 4);
      this.together *= 2;
    } else {
      const until = this.length - this.limit / 4;
      this.older = this.#reduce(this.older, until, Math.min(2 * this.together, until - this.older));
    }
    this.thinned += before - this.length;
  }

  /** Keep two of each `size` points between two indexes. @returns {number} the new end */
  #reduce(/** @type {number} */ from, /** @type {number} */ until, /** @type {number} */ size) {
    let to = from;
    let at = from;
    for (; at + size <= until; at += size) for (const one of this.#extremes(at, at + size)) this.#move(one, to++);
    const end = to;
    for (; at < this.length; at++) this.#move(at, to++);
    this.length = to;
    return end;
  }

  /** Indexes of the lowest and the highest value. A NaN or infinity has priority and replaces one of them. */
  #extremes(/** @type {number} */ from, /** @type {number} */ until) {
    const { values } = this;
    let [low, high, broken] = [-1, -1, -1];
    let sum = 0;
    for (let at = from; at < until; at++) {
      if (!Number.isFinite(values[at])) {
        broken = broken < 0 ? at : broken;
        continue;
      }
      sum += values[at];
      if (low < 0 || values[at] < values[low]) low = at;
      if (high < 0 || values[at] > values[high]) high = at;
    }
    if (low < 0) return [from, until - 1];
    if (broken >= 0) {
      const mean = sum / (until - from);
      if (mean - values[low] > values[high] - mean) high = low;
      low = broken;
    }
    if (low === high) high = low === from ? until - 1 : from;
    return low < high ? [low, high] : [high, low];
  }

  /** @param {number} from @param {number} to */
  #move(from, to) {
    this.steps[to] = this.steps[from];
    this.values[to] = this.values[from];
    this.times[to] = this.times[from];
  }

  #grow() {
    const length = Math.min(this.limit, this.steps.length * 2);
    for (const name of /** @type {const} */ (["steps", "values", "times"])) {
      const larger = new Float64Array(length);
      larger.set(this[name]);
      this[name] = larger;
    }
  }
}
