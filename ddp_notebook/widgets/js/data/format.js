/**
 * Text for numbers, times, sizes and sets of ranks.
 *
 * Times are milliseconds, as in the feed. A missing number is an en dash, never a zero.
 */

export const MISSING = "–";

/**
 * A time with three significant digits: `51.2 ms`, `340 µs`, `2.05 s`.
 * @param {number} milliseconds
 */
export function duration(milliseconds) {
  if (!Number.isFinite(milliseconds)) return MISSING;
  const size = Math.abs(milliseconds);
  if (size === 0) return "0 ms";
  if (size < 1e-3) return `${significant(milliseconds * 1e6)} ns`;
  if (size < 0.9995) return `${significant(milliseconds * 1e3)} µs`;
  if (size < 999.5) return `${significant(milliseconds)} ms`;
  if (size < 120e3) return `${significant(milliseconds / 1e3)} s`;
  return `${Math.floor(milliseconds / 60e3)} min ${Math.round((milliseconds % 60e3) / 1e3)} s`;
}

/**
 * A size in powers of ten, as for networks: `4.1 kB`, `26 MB`.
 * @param {number} nbytes
 */
export function bytes(nbytes) {
  if (!Number.isFinite(nbytes)) return MISSING;
  let value = nbytes;
  let unit = "B";
  for (const larger of ["kB", "MB", "GB", "TB"]) {
    if (value < 999.5) break;
    value /= 1000;
    unit = larger;
  }
  return `${unit === "B" || value >= 9.95 ? value.toFixed(0) : value.toFixed(1)} ${unit}`;
}

/**
 * A share of 1: `18 %`, `0.4 %`.
 * @param {number} share
 */
export function percent(share) {
  if (!Number.isFinite(share)) return MISSING;
  const value = 100 * share;
  return `${value === 0 || value >= 0.95 ? value.toFixed(0) : value.toPrecision(1)} %`;
}

/**
 * A value of a metric: three significant digits, and an exponent only if that is shorter.
 * @param {number} value
 */
export function number(value) {
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "Inf" : "-Inf";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2).replace("e+", "e");
  return size >= 999.5 ? Math.round(value).toLocaleString("en-US") : significant(value);
}

/** Three significant digits without an exponent; trailing zeros show the precision. @param {number} value */
function significant(value) {
  if (value === 0) return "0";
  const size = Number(Math.abs(value).toPrecision(3)); // 0.9997 has a digit before the point
  const whole = Math.floor(Math.log10(size) + 1e-9) + 1;
  return value.toFixed(Math.min(Math.max(3 - whole, 0), 6));
}

/**
 * Ranks as a short set: `[0, 1, 2, 5]` -> `"0-2,5"`.
 * @param {Iterable<number>} ranks
 */
export function ranksShort(ranks) {
  const sorted = [...ranks].sort((a, b) => a - b);
  const parts = [];
  for (let at = 0; at < sorted.length; ) {
    let last = at;
    while (last + 1 < sorted.length && sorted[last + 1] === sorted[last] + 1) last++;
    const run = last - at + 1;
    parts.push(run === 1 ? `${sorted[at]}` : run === 2 ? `${sorted[at]},${sorted[last]}` : `${sorted[at]}-${sorted[last]}`);
    at = last + 1;
  }
  return parts.join(",");
}

/**
 * Ranks in a sentence: `rank 3`, `ranks 0-2,5`.
 * @param {Iterable<number>} ranks
 */
export function ranksInWords(ranks) {
  const list = [...ranks];
  return `rank${list.length === 1 ? "" : "s"} ${ranksShort(list)}`;
}

/**
 * Parse a typed set of ranks: `"0-3, 7"`, `"all"`, `"-2"` is an error.
 * @param {string} text
 * @param {number} worldSize
 * @returns {Set<number>|null} null: all ranks
 * @throws {RangeError} naming the invalid part and the valid range
 */
export function parseRanks(text, worldSize) {
  const trimmed = text.trim().toLowerCase();
  if (trimmed === "" || trimmed === "all") return null;
  const found = new Set();
  for (const part of trimmed.split(/[\s,;]+/).filter(Boolean)) {
    const match = /^(\d+)(?:[-:–](\d+))?$/.exec(part);
    if (!match) throw new RangeError(`“${part}” is no rank; write for example 0-3,7 or all`);
    const first = Number(match[1]);
    const last = match[2] === undefined ? first : Number(match[2]);
    if (last < first) throw new RangeError(`“${part}” runs backwards`);
    if (last >= worldSize) throw new RangeError(`rank ${last} does not exist; the ranks are 0 to ${worldSize - 1}`);
    for (let rank = first; rank <= last; rank++) found.add(rank);
  }
  return found.size === worldSize ? null : found;
}

/** `1 step`, `12 steps`. @param {number} count @param {string} word */
export function plural(count, word) {
  return `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
}
