/**
 * Identity of the collective, send or receive that a row belongs to: group, kind, cell and number. The cell is needed
 * because the numbers start again when a group is formed again.
 */

/** @typedef {{kind: number, cell: number, group: number, number: number}} Name */

/** @param {Name} one @returns {string} */
export const keyOf = ({ kind, cell, group, number }) => `${kind}:${cell}:${group}:${number}`;

/** Only the fields of the name. @param {Name} one @returns {Name} */
export const nameOf = ({ kind, cell, group, number }) => ({ kind, cell, group, number });

/** @param {Record<string, ArrayLike<number>>} columns of a table @param {number} at @returns {Name} */
export const nameAt = ({ kind, cell, group, number }, at) => ({ kind: kind[at], cell: cell[at], group: group[at], number: number[at] });

/** @param {Name|null|undefined} one @param {Name|null|undefined} other */
export const isSameName = (one, other) => !!one && !!other && keyOf(one) === keyOf(other);
