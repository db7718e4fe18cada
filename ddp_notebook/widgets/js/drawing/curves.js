/**
 * The lines of a metric: smoothed, thinned to the resolution of the screen, or the range of many ranks. Pure functions.
 */

/** @typedef {{steps: Float64Array, values: Float64Array}} Course */

export const MOST_LINES = 16; // most ranks with a line each
const WORST = 3;

/**
 * Exponential average as in TensorBoard, without the bias towards zero at the start. `weight` 0 keeps the values, 0.9
 * averages about the last ten. A value that is not finite is kept and left out of the average.
 * @param {ArrayLike<number>} values
 * @param {number} weight 0 to below 1
 * @returns {Float64Array}
 */
export function smooth(values, weight) {
  const found = new Float64Array(values.length);
  let average = 0;
  let bias = 1;
  for (let at = 0; at < values.length; at++) {
    if (!Number.isFinite(values[at])) {
      found[at] = values[at];
      continue;
    }
    average = weight * average + (1 - weight) * values[at];
    bias *= weight;
    found[at] = average / (1 - bias);
  }
  return found;
}

/**
 * All steps at which any rank has a value. A step is repeated if a rank has several values for it.
 * @param {Course[]} courses
 * @returns {Float64Array}
 */
export function unionOfSteps(courses) {
  /** @type {Float64Array} */
  let all = new Float64Array(0);
  for (const { steps } of courses) if (steps.length > all.length) all = steps;
  for (const { steps } of courses) if (!isWithin(steps, all)) all = merged(steps, all);
  return all;
}

/** @param {Float64Array} steps @param {Float64Array} all */
function isWithin(steps, all) {
  if (steps === all) return true;
  let to = 0;
  for (const step of steps) {
    while (to < all.length && all[to] < step) to++;
    if (all[to++] !== step) return false;
  }
  return true;
}

/** @param {Float64Array} one @param {Float64Array} other both ascending */
function merged(one, other) {
  const found = new Float64Array(one.length + other.length);
  let [a, b, to] = [0, 0, 0];
  while (a < one.length || b < other.length) {
    const step = Math.min(one[a] ?? Infinity, other[b] ?? Infinity);
    if (one[a] === step) a++;
    if (other[b] === step) b++;
    found[to++] = step;
  }
  return found.subarray(0, to);
}

/**
 * Number of steps per bin, a power of two so that the picture is stable while steps are added.
 * @param {number} count
 * @param {number} most
 */
export function together(count, most) {
  let size = 1;
  while (Math.ceil(count / size) > most) size *= 2;
  return size;
}

/**
 * Lines by rank, at most about `most` points each. If there are more steps, neighbours are binned. The lowest and the
 * highest value of each bin are drawn, in their original order.
 * @param {Course[]} courses
 * @param {number} most
 * @returns {{x: number[], ends: number[], lines: (number|null|undefined)[][], each: number}} each: steps per bin, the last of which is in `ends`; a value is undefined if the rank has none, and null if it is not finite
 */
export function lines(courses, most) {
  const union = unionOfSteps(courses);
  const each = union.length <= most ? 1 : together(union.length, most / 2);
  if (each === 1) return { x: [...union], ends: [...union], lines: courses.map((course) => aligned(course, union)), each };
  const bins = Math.ceil(union.length / each);
  const x = [];
  const ends = [];
  for (let bin = 0; bin < bins; bin++) {
    x.push(union[bin * each], union[Math.min(bin * each + each / 2, union.length - 1)]);
    const end = union[Math.min((bin + 1) * each, union.length) - 1];
    ends.push(end, end);
  }
  if (x[x.length - 1] === x[x.length - 2]) {
    x.pop();
    ends.pop();
  }
  return { x, ends, each, lines: courses.map((course) => extremes(course, union, each, x.length)) };
}

/** @param {Course} course @param {Float64Array} union */
function aligned({ steps, values }, union) {
  /** @type {(number|null|undefined)[]} */
  const found = new Array(union.length).fill(undefined);
  let to = 0;
  for (let at = 0; at < steps.length; at++) {
    while (union[to] < steps[at]) to++;
    found[to++] = Number.isFinite(values[at]) ? values[at] : null;
  }
  return found;
}

/** @param {Course} course @param {Float64Array} union @param {number} each @param {number} length */
function extremes({ steps, values }, union, each, length) {
  /** @type {(number|null|undefined)[]} */
  const found = new Array(length).fill(undefined);
  let at = 0;
  for (let bin = 0; 2 * bin < length; bin++) {
    const until = (bin + 1) * each < union.length ? union[(bin + 1) * each] : Infinity;
    let low = -1;
    let high = -1;
    let isBroken = false;
    for (; at < steps.length && steps[at] < until; at++) {
      if (!Number.isFinite(values[at])) isBroken = true;
      else {
        if (low < 0 || values[at] < values[low]) low = at;
        if (high < 0 || values[at] > values[high]) high = at;
      }
    }
    if (low >= 0) {
      found[2 * bin] = values[Math.min(low, high)];
      if (low !== high && 2 * bin + 1 < length) found[2 * bin + 1] = values[Math.max(low, high)];
    } else if (isBroken) found[2 * bin] = null;
  }
  return found;
}

/**
 * Many ranks: the range, the median, and the ranks furthest from it.
 * @param {Course[]} courses
 * @param {number} most points
 * @param {number} [weight] weight for smoothing the median and the lines; the range uses the logged values
 * @returns {{x: number[], ends: number[], low: (number|null)[], high: (number|null)[], median: (number|null)[],
 *   means: (number|undefined)[][], worst: number[], each: number}} means: of each course; worst: indexes of courses
 */
export function range(courses, most, weight = 0) {
  const union = unionOfSteps(courses);
  const each = together(union.length, most);
  const bins = Math.ceil(union.length / each);
  const x = Array.from({ length: bins }, (_, bin) => union[bin * each]);
  const ends = x.map((_, bin) => union[Math.min((bin + 1) * each, union.length) - 1]);
  const low = new Float64Array(bins).fill(Infinity);
  const high = new Float64Array(bins).fill(-Infinity);
  const broken = courses.map(({ values }) => values.some((value) => !Number.isFinite(value)));
  const means = courses.map(({ steps, values }) => {
    const shown = weight > 0 ? smooth(values, weight) : values;
    /** @type {(number|undefined)[]} */
    const found = new Array(bins).fill(undefined);
    let at = 0;
    for (let bin = 0; bin < bins; bin++) {
      const until = (bin + 1) * each < union.length ? union[(bin + 1) * each] : Infinity;
      let sum = 0;
      let count = 0;
      for (; at < steps.length && steps[at] < until; at++) {
        if (!Number.isFinite(values[at])) continue;
        if (values[at] < low[bin]) low[bin] = values[at];
        if (values[at] > high[bin]) high[bin] = values[at];
        sum += shown[at];
        count++;
      }
      if (count) found[bin] = sum / count;
    }
    return found;
  });
  const buffer = new Float64Array(courses.length);
  const median = x.map((_, bin) => {
    let count = 0;
    for (const mean of means) if (mean[bin] !== undefined) buffer[count++] = /** @type {number} */ (mean[bin]);
    return count ? middle(buffer.subarray(0, count).sort()) : null;
  });
  const distance = means.map((mean) => {
    let sum = 0;
    let count = 0;
    mean.forEach((value, bin) => {
      if (value === undefined) return;
      sum += Math.abs(value - /** @type {number} */ (median[bin]));
      count++;
    });
    return count ? sum / count : 0;
  });
  const order = courses.map((_, at) => at).sort((a, b) => Number(broken[b]) - Number(broken[a]) || distance[b] - distance[a] || a - b);
  const known = /** @param {number} value */ (value) => (Number.isFinite(value) ? value : null);
  return { x, ends, low: Array.from(low, known), high: Array.from(high, known), median, means, worst: order.slice(0, WORST), each };
}

/** @param {Float64Array} sorted */
function middle(sorted) {
  const half = sorted.length >> 1;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}

/**
 * Merge ranks that logged exactly the same values into one line, such as for a metric that was averaged over the ranks.
 * @param {Map<number, Course>} series
 * @returns {{ranks: number[], course: Course}[]}
 */
export function alike(series) {
  /** @type {{ranks: number[], course: Course}[]} */
  const found = [];
  for (const [rank, course] of series) {
    const same = found.find((one) => isSame(one.course, course));
    if (same) same.ranks.push(rank);
    else found.push({ ranks: [rank], course });
  }
  return found;
}

/** @param {Course} one @param {Course} other */
function isSame(one, other) {
  if (one.values.length !== other.values.length) return false;
  // Compare from the newest point backwards: differences are at the end.
  for (let at = one.values.length - 1; at >= 0; at--) {
    if (one.steps[at] !== other.steps[at] || !Object.is(one.values[at], other.values[at])) return false;
  }
  return true;
}
