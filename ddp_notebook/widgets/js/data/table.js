/**
 * Rows in columns, in bounded memory: the newest `limit` rows.
 *
 * Rows are stored one after another in the columns, from `first` to `end`. The index of a row changes when old rows are
 * dropped and the columns are moved to the front. The row number `moved + index` never changes. References to rows
 * store this number; `find` returns the current index, or -1.
 */

/** @typedef {import("./unpack.js").Column} Column */
/** @typedef {[string, new (length: number) => Column, number?]} ColumnType name, type, values per row */

export class Table {
  /**
   * @param {ColumnType[]} types
   * @param {number} limit rows
   */
  constructor(types, limit) {
    this.types = types;
    this.limit = limit;
    this.first = 0;
    this.end = 0;
    this.moved = 0;
    this.capacity = Math.min(256, limit);
    /** @type {Record<string, any>} */
    this.columns = {};
    for (const [name, Type, width = 1] of types) this.columns[name] = new Type(this.capacity * width);
  }

  get length() {
    return this.end - this.first;
  }

  /** Total number of rows so far. */
  get total() {
    return this.moved + this.end;
  }

  /**
   * Append all rows of a message, and return their first index. Columns that the message lacks are NaN or 0.
   * @param {import("./unpack.js").Rows} rows
   */
  append({ rows, columns, widths }) {
    const count = Math.min(rows, this.limit);
    const skipped = rows - count;
    this.#makeRoom(count);
    const begin = this.end;
    for (const [name, , width = 1] of this.types) {
      const into = this.columns[name];
      const from = columns[name];
      const own = widths?.[name] ?? width;
      if (from && own === width) into.set(from.subarray(skipped * width, rows * width), begin * width);
      else if (from) {
        // The rows of a message have the width of the longest one.
        into.fill(NaN, begin * width, (begin + count) * width);
        for (let row = 0; row < count; row++) {
          into.set(from.subarray((skipped + row) * own, (skipped + row + 1) * own), (begin + row) * width);
        }
      } else into.fill(into instanceof Float64Array || into instanceof Float32Array ? NaN : 0, begin * width, (begin + count) * width);
    }
    this.end += count;
    this.first = Math.max(0, this.end - this.limit);
    return begin;
  }

  /** The index of the row with this number, -1 if it was dropped. @param {number} number */
  find(number) {
    const index = number - this.moved;
    return index >= this.first && index < this.end ? index : -1;
  }

  /** One row as an object. @param {number} index */
  row(index) {
    /** @type {Record<string, any>} */
    const found = {};
    for (const [name, , width = 1] of this.types) {
      const column = this.columns[name];
      found[name] = width === 1 ? column[index] : column.subarray(index * width, (index + 1) * width);
    }
    return found;
  }

  clear() {
    this.moved += this.end;
    this.first = this.end = 0;
  }

  /** @param {number} count */
  #makeRoom(count) {
    if (this.end + count <= this.capacity) return;
    // Space for half as many additional rows, so that moving is rare.
    const most = this.limit + Math.ceil(this.limit / 2);
    if (this.capacity < most) {
      this.#resize(Math.min(most, Math.max(this.capacity * 2, this.end + count)));
      if (this.end + count <= this.capacity) return;
    }
    const kept = Math.min(this.length, this.limit - count);
    const from = this.end - kept;
    for (const [name, , width = 1] of this.types) this.columns[name].copyWithin(0, from * width, this.end * width);
    this.moved += from;
    this.first = 0;
    this.end = kept;
  }

  /** @param {number} capacity */
  #resize(capacity) {
    for (const [name, Type, width = 1] of this.types) {
      const larger = new Type(capacity * width);
      larger.set(/** @type {any} */ (this.columns[name].subarray(0, this.end * width)));
      this.columns[name] = larger;
    }
    this.capacity = capacity;
  }
}
