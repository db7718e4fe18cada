/**
 * Formats, compares and summarises elements of tensors. Pure functions.
 *
 * @typedef {object} Tensor of one rank and side
 * @property {number} rank
 * @property {0|1} side input or output
 * @property {string} dtype
 * @property {number[]} shape shape of the tensor; for several tensors of one collective, the number of all elements
 * @property {number} numel
 * @property {Float32Array|number[]} data the first elements, or all of them
 * @property {number} lookedAt number of elements in the statistics
 * @property {number} low
 * @property {number} high
 * @property {number} mean
 * @property {number} nans
 * @property {number} infs
 */

/** @type {Record<string, string>} */
const SHORT = { float32: "f32", float64: "f64", float16: "f16", bfloat16: "bf16", int64: "i64", int32: "i32", int16: "i16", int8: "i8", uint8: "u8", bool: "bool", complex64: "c64", complex128: "c128" };
const EXACT = 2 ** 24; // elements are sent as float32, which is exact for integers up to this

/** @param {string} dtype */
export const isInteger = (dtype) => /^u?int/.test(dtype);

/**
 * Text of an element, in at most `room` characters if possible.
 *
 * @param {number} value
 * @param {string} dtype
 * @param {number} [room]
 */
export function element(value, dtype, room = 7) {
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "Inf" : "-Inf";
  if (dtype === "bool") return value ? (room < 4 ? "T" : "True") : room < 5 ? "F" : "False";
  if (isInteger(dtype)) {
    const text = String(value);
    if (Math.abs(value) <= EXACT && text.length <= room) return text;
    return `${Math.abs(value) > EXACT ? "≈" : ""}${exponential(value, room - 1)}`;
  }
  if (value === 0) return Object.is(value, -0) ? "-0" : "0";
  const size = Math.abs(value);
  if (size >= 1e-3 && size < 10 ** Math.max(room - 1, 3)) {
    const whole = Math.max(1, Math.floor(Math.log10(size)) + 1) + (value < 0 ? 1 : 0);
    const places = Math.max(0, Math.min(4, room - whole - 1));
    const text = value.toFixed(places);
    if (text.length <= room && Number(text) !== 0) return places ? text.replace(/\.?0+$/, "") : text;
  }
  return exponential(value, room);
}

/** @param {number} value @param {number} room */
function exponential(value, room) {
  for (let places = 3; places > 0; places--) {
    const text = value.toExponential(places).replace("e+", "e");
    if (text.length <= room) return text;
  }
  return value.toExponential(0).replace("e+", "e");
}

/** The value with all known digits, for the element under the pointer. @param {number} value @param {string} dtype */
export function exactly(value, dtype) {
  if (!Number.isFinite(value) || dtype === "bool") return element(value, dtype);
  if (isInteger(dtype)) return Math.abs(value) <= EXACT ? String(value) : `about ${value}`;
  return String(Number(value.toPrecision(7)));
}

/**
 * Parse a shape of the feed, with the number of tensors if there are several: `[[2, 3]]`.
 *
 * @param {string} text
 * @param {number} numel
 * @returns {{shape: number[], words: string}}
 */
export function shapeOf(text, numel) {
  const shapes = shapesIn(text);
  if (!shapes.length) return { shape: [numel], words: `[${numel}]` };
  const [first] = shapes;
  const one = /** @param {number[]} shape */ (shape) => `[${shape.join(", ")}]`;
  if (shapes.length === 1) {
    const own = first.reduce((product, size) => product * size, 1);
    if (own === numel) return { shape: first, words: one(first) };
    // The feed has the shape of the input. A gathered output contains several inputs; a scattered one is part of an
    // input.
    const times = numel / own;
    return Number.isInteger(times) ? { shape: [times, ...first], words: `${times} × ${one(first)}` } : { shape: [numel], words: `[${numel}]` };
  }
  const areSame = shapes.every((shape) => one(shape) === one(first));
  return { shape: [numel], words: areSame ? `${shapes.length} × ${one(first)}` : `${shapes.length} tensors` };
}

/** The shapes in a text; empty if its format is unknown. @param {string} text @returns {number[][]} */
function shapesIn(text) {
  try {
    const parsed = JSON.parse(text);
    if (!Array.isArray(parsed)) return [];
    return typeof parsed[0] === "number" ? [parsed] : parsed;
  } catch {
    return [];
  }
}

/**
 * Summary of a tensor in one line, in the style of lovely-tensors: `[64, 10] f32 n=640 x∈[-2.1, 2.6] μ=0.03 NaN! 3`.
 *
 * @param {Tensor & {words?: string}} tensor
 * @returns {string}
 */
export function range(tensor) {
  const { dtype, numel, lookedAt, low, high, mean, nans, infs, data } = tensor;
  const parts = [`${tensor.words ?? `[${tensor.shape.join(", ")}]`}`, SHORT[dtype] ?? dtype, `n=${numel.toLocaleString("en")}`];
  const write = /** @param {number} value */ (value) => element(value, isInteger(dtype) ? dtype : "", 8);
  if (dtype === "bool") parts.push(Number.isNaN(mean) ? "" : `true ${(100 * mean).toPrecision(3).replace(/\.?0+$/, "")} %`);
  else if (low === high) parts.push(`all ${write(low)}`);
  else if (!Number.isNaN(low)) parts.push(`${dtype.startsWith("complex") ? "|x|" : "x"}∈[${write(low)}, ${write(high)}]`, `μ=${element(mean, "", 6)}`);
  if (nans) parts.push(`NaN! ${nans}`);
  if (infs) parts.push(`Inf! ${infs}`);
  if (lookedAt < numel) parts.push(`(of a sample of ${lookedAt.toLocaleString("en")})`);
  if (data.length < numel && data.length) parts.push(`first ${data.length} shown`);
  return parts.filter(Boolean).join(" ");
}

/** Mean, standard deviation and range of the finite elements. @param {ArrayLike<number>} data */
export function statistics(data) {
  let count = 0, sum = 0, low = Infinity, high = -Infinity, nans = 0, infs = 0;
  for (let i = 0; i < data.length; i++) {
    const value = data[i];
    if (Number.isNaN(value)) nans++;
    else if (!Number.isFinite(value)) infs++;
    else {
      count++;
      sum += value;
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
  }
  const mean = sum / count;
  let square = 0;
  for (let i = 0; i < data.length; i++) if (Number.isFinite(data[i])) square += (data[i] - mean) ** 2;
  return { count, mean, deviation: Math.sqrt(square / count), low: count ? low : NaN, high: count ? high : NaN, nans, infs };
}

/** Same value: NaN equals NaN. @param {number} one @param {number} other */
export const isSame = (one, other) => one === other || (Number.isNaN(one) && Number.isNaN(other));

/**
 * Flags of the elements that differ from another tensor; null if the two cannot be compared.
 *
 * @param {Tensor|null|undefined} tensor
 * @param {Tensor|null|undefined} other
 * @returns {Uint8Array|null} 1: differs
 */
export function differences(tensor, other) {
  if (!tensor?.data.length || !other?.data.length || tensor.numel !== other.numel || tensor.dtype !== other.dtype) return null;
  const count = Math.min(tensor.data.length, other.data.length);
  const found = new Uint8Array(count);
  for (let i = 0; i < count; i++) found[i] = isSame(tensor.data[i], other.data[i]) ? 0 : 1;
  return found;
}

/**
 * @typedef {{marks: Uint8Array, count: number, ranks: number[]}} Across  marks: 1 if different; ranks: those that differ from the majority
 */

/**
 * Flags of the elements that differ between ranks.
 *
 * @param {Tensor[]} tensors one per rank
 * @returns {Across|null} null if they cannot be compared
 */
export function acrossRanks(tensors) {
  const [first] = tensors;
  if (tensors.length < 2 || tensors.some((one) => one.numel !== first.numel || one.data.length !== first.data.length || one.dtype !== first.dtype)) return null;
  const marks = new Uint8Array(first.data.length);
  const groups = new Map(); // groups of equal tensors
  for (const tensor of tensors) {
    for (let i = 0; i < marks.length; i++) if (!isSame(tensor.data[i], first.data[i])) marks[i] = 1;
    const name = Array.prototype.join.call(tensor.data.length > 64 ? tensor.data.slice(0, 64) : tensor.data, " ") + tensor.low + tensor.mean;
    groups.set(name, [...(groups.get(name) ?? []), tensor.rank]);
  }
  const sizes = [...groups.values()].sort((a, b) => b.length - a.length);
  const isClear = sizes.length > 1 && sizes[0].length > tensors.length / 2;
  return { marks, count: marks.reduce((sum, one) => sum + one, 0), ranks: isClear ? sizes.slice(1).flat().sort((a, b) => a - b) : [] };
}
