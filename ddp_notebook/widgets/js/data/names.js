/**
 * Which collective, send or receive a row is of: they are counted by group, kind and cell, since a group that was formed anew
 * counts from the beginning.
 */

/** @typedef {{kind: number, cell: number, group: number, number: number}} Name */

/** @param {Name} one @returns {string} */
export const keyOf = ({ kind, cell, group, number }) => `${kind}:${cell}:${group}:${number}`;

/** Nothing but the name. @param {Name} one @returns {Name} */
export const nameOf = ({ kind, cell, group, number }) => ({ kind, cell, group, number });

/** @param {Record<string, ArrayLike<number>>} columns of a table @param {number} at @returns {Name} */
export const nameAt = ({ kind, cell, group, number }, at) => ({ kind: kind[at], cell: cell[at], group: group[at], number: number[at] });

/** @param {Name|null|undefined} one @param {Name|null|undefined} other */
export const isSameName = (one, other) => !!one && !!other && keyOf(one) === keyOf(other);
