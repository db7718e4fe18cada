/**
 * The whole course of a metric on one rank, in bounded memory.
 *
 * When a series is full, the older half of it is thinned: of each four points the lowest and the highest stay, in the
 * order in which they came. So every point that is kept was logged, and a spike outlives any number of thinnings.
 */

const SAME_MS = 2e-3; // times travel rounded, not always to the same

export class Series {
  /** @param {number} limit points, a multiple of 8 */
  constructor(limit) {
    this.limit = limit;
    this.length = 0;
    this.thinned = 0; // points that were let go
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
    const half = Math.floor(this.length / 8) * 4;
    let to = 0;
    for (let at = 0; at < half; at += 4) {
      let low = at;
      let high = at;
      let broken = -1; // a value that is no number is the news: it stays, whatever its neighbours are
      let sum = 0;
      for (let one = at; one < at + 4; one++) {
        const value = this.values[one];
        if (!Number.isFinite(value)) {
          broken = one;
          continue;
        }
        sum += value;
        if (!(value >= this.values[low])) low = one;
        if (!(value <= this.values[high])) high = one;
      }
      if (broken >= 0) {
        const mean = sum / 3;
        if (Math.abs(this.values[low] - mean) > Math.abs(this.values[high] - mean)) high = low;
        low = broken;
      }
      if (low === high) high = low === at ? at + 3 : at;
      for (const one of low < high ? [low, high] : [high, low]) this.#move(one, to++);
    }
    this.thinned += half - to;
    for (let at = half; at < this.length; at++) this.#move(at, to++);
    this.length = to;
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
