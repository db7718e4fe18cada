/** Round ticks, and labels with one unit per axis, for everything drawn on a canvas. */

/** @typedef {{value: number, label: string}} Tick */

/**
 * The distance between ticks: 1, 2 or 5 times a power of ten, so that at most `count` intervals fit.
 * @param {number} span
 * @param {number} count
 */
export function niceStep(span, count) {
  if (!(span > 0)) return 1;
  const rough = span / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  for (const factor of [1, 2, 5]) if (factor * power >= rough * (1 - 1e-9)) return factor * power;
  return 10 * power;
}

/**
 * Values at round distances within [low, high].
 * @param {number} low
 * @param {number} high
 * @param {number} count about how many
 * @returns {number[]}
 */
export function ticks(low, high, count = 5) {
  const step = niceStep(high - low, count);
  const found = [];
  // Multiply instead of adding up: 0.1 + 0.2 would be visible.
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at++) {
    found.push(Number((at * step).toPrecision(12)));
  }
  return found;
}

/**
 * A time axis. All labels have the same unit, s, ms, µs or ns, depending on the distance of the ticks.
 * @param {number} low milliseconds
 * @param {number} high milliseconds
 * @param {number} count
 * @returns {{unit: string, ticks: Tick[]}}
 */
export function timeTicks(low, high, count = 6) {
  const step = niceStep(high - low, count);
  const [unit, scale] = step >= 1000 ? ["s", 1e-3] : step >= 1 ? ["ms", 1] : step >= 1e-3 ? ["µs", 1e3] : ["ns", 1e6];
  const places = decimals(step * scale);
  return {
    unit,
    ticks: ticks(low, high, count).map((value) => ({ value, label: grouped(value * scale, places) })),
  };
}

/**
 * A plain axis, with at least two ticks, and as many decimals as its ticks need.
 * @param {number} low
 * @param {number} high
 * @param {number} count approximate number; more if there would be fewer than two
 * @returns {Tick[]}
 */
export function plainTicks(low, high, count = 5) {
  const step = niceStep(high - low, count);
  const large = Math.max(Math.abs(low), Math.abs(high));
  const found = ticks(low, high, count);
  if (found.length < 2 && high > low && count < 16) return plainTicks(low, high, 2 * count);
  if (large >= 1e6 || (large > 0 && large < 1e-3)) {
    const digits = Math.min(6, Math.max(0, Math.floor(Math.log10(large)) - Math.floor(Math.log10(step) + 1e-9)));
    return found.map((value) => ({ value, label: value === 0 ? "0" : exponential(value, digits) }));
  }
  const places = decimals(step);
  return found.map((value) => ({ value, label: grouped(value, places) }));
}

/**
 * A logarithmic axis: decades, and also 2 and 5 if there are few decades.
 * @param {number} low above 0
 * @param {number} high
 * @returns {Tick[]}
 */
export function logTicks(low, high) {
  if (!(low > 0) || !(high > low)) return [];
  const decades = Math.log10(high / low);
  // A small part of a decade may contain no power of ten. Then use the ticks of a plain axis.
  if (decades < 0.5) return plainTicks(low, high, 4).filter((tick) => tick.value > 0);
  const factors = decades > 3 ? [1] : decades > 1.5 ? [1, 3] : [1, 2, 5];
  const every = Math.max(1, Math.ceil(decades / 8));
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    if (power % every) continue;
    for (const factor of factors) {
      const value = Number((factor * 10 ** power).toPrecision(12));
      if (value >= low * (1 - 1e-9) && value <= high * (1 + 1e-9)) found.push({ value, label: power < -3 || power > 5 ? exponential(value, 0) : String(value) });
    }
  }
  return found;
}

/** @param {number} value @param {number} digits */
function exponential(value, digits) {
  return value.toExponential(digits).replace("e+", "e");
}

/** @param {number} step */
function decimals(step) {
  return Math.min(9, Math.max(0, -Math.floor(Math.log10(step) + 1e-9)));
}

/**
 * Separate thousands by a narrow space, which is clear in every language.
 * @param {number} value
 * @param {number} places
 */
function grouped(value, places) {
  const [whole, part] = value.toFixed(places).split(".");
  const apart = whole.replace(/\B(?=(\d{3})+$)/g, "\u202f");
  const text = part ? `${apart}.${part}` : apart;
  return /^-0(\.0+)?$/.test(text) ? text.slice(1) : text;
}

/**
 * Move ascending places apart to at least `step`, each group around its middle, between `low` and `high`. For labels at
 * the ends of lines.
 * @param {number[]} places
 * @param {number} step
 * @param {number} low
 * @param {number} high
 * @returns {number[]}
 */
export function spread(places, step, low, high) {
  /** @type {{middle: number, count: number}[]} */
  const groups = [];
  for (const place of places) {
    let group = { middle: place, count: 1 };
    for (;;) {
      const before = groups[groups.length - 1];
      if (!before || group.middle - before.middle >= (step * (group.count + before.count)) / 2) break;
      groups.pop();
      const count = group.count + before.count;
      group = { middle: (group.middle * group.count + before.middle * before.count) / count, count };
    }
    groups.push(group);
  }
  const found = groups.flatMap(({ middle, count }) =>
    Array.from({ length: count }, (_, at) => middle + step * (at - (count - 1) / 2)),
  );
  const raised = found.map((place, at) => Math.max(place, low + step * at));
  return raised.map((place, at) => Math.min(place, high - step * (raised.length - 1 - at)));
}

/**
 * Positions of labels at the ends of lines within a chart. Labels are moved left to fit, and down or up if they overlap
 * each other or a line.
 * @param {{x: number, y: number, width: number}[]} labels by y
 * @param {(x0: number, x1: number) => [number, number][]} lines returns the range that each line covers between two places
 * @param {number} height of a label, whose middle is at y
 * @param {{left: number, right: number, top: number, bottom: number}} box
 * @returns {{x: number, y: number}[]}
 */
export function placeInside(labels, lines, height, { left, right, top, bottom }) {
  /** @type {{x: number, y: number, width: number}[]} */
  const placed = [];
  for (const { x: wanted, y: own, width } of labels) {
    const x = Math.max(left, Math.min(wanted, right - width));
    const low = top + height / 2;
    const high = bottom - height / 2;
    const start = Math.max(low, Math.min(own, high));
    const near = placed.filter((one) => one.x < x + width && x < one.x + one.width).map(({ y }) => [y - height / 2, y + height / 2]);
    const taken = [...near, ...lines(x, x + width)];
    const isFree = /** @param {number} y */ (y) => taken.every(([above, below]) => y + height / 2 <= above || y - height / 2 >= below);
    const places = [start, ...taken.flatMap(([above, below]) => [above - height / 2, below + height / 2])].filter((y) => y >= low && y <= high && isFree(y));
    const y = places.sort((a, b) => Math.abs(a - start) - Math.abs(b - start))[0] ?? start;
    placed.push({ x, y, width });
  }
  return placed.map(({ x, y }) => ({ x, y }));
}
