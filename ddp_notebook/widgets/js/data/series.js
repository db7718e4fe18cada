/**
 * The whole course of a metric on one rank, in bounded memory.
 *
 * When a series is full, its older part is thinned: the lowest and the highest of neighbouring points stay, in the order
 * in which they came. So every point that is kept was logged. The older part is equally dense everywhere; when it takes more than
 * half of the room it is thinned to half of its density.
 */

const SAME_MS = 2e-3; // times travel rounded, not always to the same

export class Series {
  /** @param {number} limit points, a multiple of 8 */
  constructor(limit) {
    this.limit = limit;
    this.length = 0;
    this.thinned = 0; // points that were let go
    this.older = 0; // points of the older part
    this.together = 2; // one of so many logged points of the older part is kept
    this.steps = new Float64Array(64);
    this.values = new Float64Array(64);
    this.times = new Float64Array(64);
  }

  get lastStep() {
    return this.length ? this.steps[this.length - 1] : -Infinity;
  }

  /**
   * @param {number} step
   * @param {number} value
   * @param {number} time milliseconds since the start of the recording
   * @returns {boolean} false if the point was known
   */
  add(step, value, time) {
    let at = this.length;
    while (at > 0 && this.steps[at - 1] > step) at--;
    // A snapshot brings again what is known.
    for (let known = at - 1; known >= 0 && this.steps[known] === step; known--) {
      if (Math.abs(this.times[known] - time) < SAME_MS) return false;
    }
    if (this.length === this.limit) {
      this.#thin();
      return this.add(step, value, time);
    }
    if (this.length === this.steps.length) this.#grow();
    if (at < this.length) {
      for (const column of [this.steps, this.values, this.times]) column.copyWithin(at + 1, at, this.length);
    }
    this.steps[at] = step;
    this.values[at] = value;
    this.times[at] = time;
    this.length++;
    return true;
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

  /** Keep two of each `size` points from one index to another. @returns {number} where they end now */
  #reduce(/** @type {number} */ from, /** @type {number} */ until, /** @type {number} */ size) {
    let to = from;
    let at = from;
    for (; at + size <= until; at += size) for (const one of this.#extremes(at, at + size)) this.#move(one, to++);
    const end = to;
    for (; at < this.length; at++) this.#move(at, to++);
    this.length = to;
    return end;
  }

  /** The indexes of the lowest and the highest. A NaN or infinity matters most and takes the place of one. */
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
