/**
 * From a message and its buffer to tables.
 *
 * A message's `tables` say for each table how many rows it has and where its columns lie:
 *
 *     {"metric": {"rows": 2, "columns": [["rank", "u16", 0], ["value", "f32", 8], ["first", "f32x32", 16]]}}
 *
 * All columns are in one buffer, little endian, each aligned to 8 bytes. `f32x32` is 32 values a row; a fourth entry
 * says how many values a column has that is not as long as the table (whole tensors, one after another).
 */

const TYPES = {
  u8: Uint8Array,
  i8: Int8Array,
  u16: Uint16Array,
  i16: Int16Array,
  u32: Uint32Array,
  i32: Int32Array,
  f32: Float32Array,
  f64: Float64Array,
};

/** @typedef {Uint8Array|Int8Array|Uint16Array|Int16Array|Uint32Array|Int32Array|Float32Array|Float64Array} Column */
/** @typedef {{rows: number, columns: Record<string, Column>, widths: Record<string, number>}} Rows */

/**
 * @param {{tables?: Record<string, {rows: number, columns: [string, string, number, number?][]}>}} header
 * @param {(ArrayBuffer|ArrayBufferView)[]} [buffers] as a front end hands them over; the first is read
 * @returns {Record<string, Rows>} views of the buffer: whoever keeps them copies them
 * @throws {RangeError} if the header does not fit the buffer
 */
export function unpack(header, buffers = []) {
  const bytes = aligned(buffers[0]);
  /** @type {Record<string, Rows>} */
  const found = {};
  for (const [name, { rows, columns }] of Object.entries(header.tables ?? {})) {
    const table = { rows, columns: {}, widths: {} };
    for (const [column, dtype, offset, length] of columns) {
      const [type, times] = dtype.split("x");
      const Type = TYPES[type];
      if (!Type) throw new RangeError(`table ${name}, column ${column}: unknown type ${dtype}`);
      const width = times ? Number(times) : 1;
      const count = length ?? rows * width;
      if (offset + count * Type.BYTES_PER_ELEMENT > bytes.byteLength) {
        throw new RangeError(`table ${name}, column ${column}: ends behind the buffer's ${bytes.byteLength} bytes`);
      }
      table.columns[column] = new Type(bytes.buffer, bytes.byteOffset + offset, count);
      table.widths[column] = width;
    }
    found[name] = table;
  }
  return found;
}

/**
 * The bytes, at an address that any type can be read at. Front ends hand over views into larger messages.
 * @param {ArrayBuffer|ArrayBufferView|undefined} buffer
 * @returns {Uint8Array}
 */
function aligned(buffer) {
  if (!buffer) return new Uint8Array(0);
  if (buffer instanceof ArrayBuffer) return new Uint8Array(buffer);
  const view = new Uint8Array(buffer.buffer, buffer.byteOffset, buffer.byteLength);
  return view.byteOffset % 8 ? view.slice() : view;
}

const NAMES = new Map(Object.entries(TYPES).map(([name, Type]) => [Type, name]));

/**
 * The reverse of `unpack`, for pages and tests that have no kernel.
 * @param {Record<string, {rows: number, columns: Record<string, Column>}>} tables
 * @returns {{tables: object, buffer: ArrayBuffer}}
 */
export function pack(tables) {
  const head = {};
  /** @type {[number, Column][]} */
  const parts = [];
  let size = 0;
  for (const [name, { rows, columns }] of Object.entries(tables)) {
    const listed = Object.entries(columns).map(([column, values]) => {
      const type = NAMES.get(/** @type {any} */ (values.constructor));
      const width = rows && values.length % rows === 0 ? values.length / rows : 1;
      const entry = [column, width > 1 ? `${type}x${width}` : type, size];
      parts.push([size, values]);
      size += Math.ceil(values.byteLength / 8) * 8;
      return entry;
    });
    head[name] = { rows, columns: listed };
  }
  const buffer = new ArrayBuffer(size);
  for (const [offset, values] of parts) {
    new Uint8Array(buffer, offset).set(new Uint8Array(values.buffer, values.byteOffset, values.byteLength));
  }
  return { tables: head, buffer };
}

/** Bytes of a text in base64, as a saved page holds them. @param {string} text @returns {ArrayBuffer} */
export function fromBase64(text) {
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer;
}
