/**
 * Converts a message of the feed and its buffer to tables.
 *
 * The `tables` of a message give the number of rows of each table and the offsets of its columns in one buffer. Columns
 * are little endian and aligned to 8 bytes. `tables.py` packs them as follows:
 *
 *     ["cell", 5]                     same value in all rows; null is NaN
 *     ["value", "f4", 16]             type and byte offset; "32f4" has 32 values per row
 *     ["start", "u2", 32, 1e-4, 812]  the value is 1e-4 * raw + 812, and the greatest raw number means NaN
 */

/** @type {Record<string, {new (buffer: ArrayBufferLike, offset: number, count: number): Column, BYTES_PER_ELEMENT: number}>} */
const TYPES = {
  u1: Uint8Array,
  i1: Int8Array,
  u2: Uint16Array,
  i2: Int16Array,
  u4: Uint32Array,
  i4: Int32Array,
  f4: Float32Array,
  f8: Float64Array,
};
/** @type {Record<string, number>} */
const GREATEST = { u1: 0xff, u2: 0xffff, u4: 0xffffffff };

/** @typedef {Uint8Array|Int8Array|Uint16Array|Int16Array|Uint32Array|Int32Array|Float32Array|Float64Array} Column */
/** @typedef {{rows: number, columns: Record<string, Column>, widths: Record<string, number>}} Rows */

/**
 * @param {{tables?: Record<string, {rows: number, columns: any[][]}>}} header
 * @param {(ArrayBuffer|ArrayBufferView)[]} [buffers] as passed by the front end; only the first is read
 * @returns {Record<string, Rows>} some columns are views of the buffer: copy them to keep them
 * @throws {RangeError} if the header does not fit the buffer
 */
export function unpack(header, buffers = []) {
  const bytes = aligned(buffers?.[0]);
  /** @type {Record<string, Rows>} */
  const found = {};
  for (const [name, { rows, columns }] of Object.entries(header.tables ?? {})) {
    /** @type {Rows} */
    const table = { rows, columns: {}, widths: {} };
    for (const [column, type, offset, scale, base] of columns) {
      const isConstant = offset === undefined;
      const width = isConstant ? 1 : Number(/^\d+/.exec(type)?.[0] ?? 1);
      table.widths[column] = width;
      table.columns[column] = isConstant
        ? new Float64Array(rows).fill(type ?? NaN)
        : read(bytes, type.slice(-2), offset, rows * width, scale, base, `table ${name}, column ${column}`);
    }
    found[name] = table;
  }
  return found;
}

/**
 * @param {Uint8Array} bytes
 * @param {string} type
 * @param {number} offset
 * @param {number} count
 * @param {number|undefined} scale
 * @param {number} base
 * @param {string} where
 * @returns {Column}
 */
function read(bytes, type, offset, count, scale, base, where) {
  const Type = TYPES[type];
  if (!Type) throw new RangeError(`${where}: unknown type ${type}`);
  if (offset + count * Type.BYTES_PER_ELEMENT > bytes.byteLength) {
    throw new RangeError(`${where}: ends behind the buffer's ${bytes.byteLength} bytes`);
  }
  const raw = new Type(bytes.buffer, bytes.byteOffset + offset, count);
  if (scale === undefined) return raw;
  const greatest = GREATEST[type];
  const meant = new Float64Array(count);
  for (let at = 0; at < count; at++) meant[at] = raw[at] === greatest ? NaN : raw[at] * scale + base;
  return meant;
}

/**
 * The bytes at an aligned address. Front ends may pass views into larger messages.
 * @param {ArrayBuffer|ArrayBufferView|undefined} buffer
 * @returns {Uint8Array}
 */
function aligned(buffer) {
  if (!buffer) return new Uint8Array(0);
  if (buffer instanceof ArrayBuffer) return new Uint8Array(buffer);
  const view = new Uint8Array(buffer.buffer, buffer.byteOffset, buffer.byteLength);
  return view.byteOffset % 8 ? view.slice() : view;
}

/** Decode base64, which saved pages contain. @param {string} text @returns {ArrayBuffer} */
export function fromBase64(text) {
  const letters = atob(text);
  const bytes = new Uint8Array(letters.length);
  for (let at = 0; at < bytes.length; at++) bytes[at] = letters.charCodeAt(at);
  return bytes.buffer;
}
