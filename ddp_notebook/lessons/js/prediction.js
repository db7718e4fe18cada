/** Predictions for a collective: possible sources of an element, its value, and the score. */

/** @typedef {import("./states.js").ExplorerState} State */

/** @type {Record<string, (a: number, b: number, n: number) => number>} */
const COMBINE = {
  SUM: (a, b) => a + b,
  PRODUCT: (a, b) => a * b,
  MIN: Math.min,
  MAX: Math.max,
  AVG: (a, b, n) => a + b / n,
  BAND: (a, b) => a & b,
  BOR: (a, b) => a | b,
  BXOR: (a, b) => a ^ b,
};

/**
 * The inputs that an element of the result can depend on: `[rank, index in its input]`.
 * @param {State} state @param {number} rank @param {number} at
 * @returns {[number, number][]}
 */
export function sources(state, rank, at) {
  const { op, group, root, inputs } = state;
  if (op === "all_reduce" || op === "reduce") return group.map((one) => [one, at]);
  if (op === "barrier") return group.map((one) => [one, 0]);
  if (op === "reduce_scatter") {
    const place = group.indexOf(rank) * state.sizes[0] + at;
    return group.map((one) => [one, place]);
  }
  /** @type {[number, number][]} */
  const found = [];
  for (const one of op === "broadcast" || op === "scatter" || state.messages ? [root] : group) {
    inputs[one].forEach((_, place) => found.push([one, place]));
  }
  return found;
}

/**
 * The prediction of a cell after an input was added: combined with the previous value, or replacing it.
 * @param {State} state @param {string} before @param {number} value
 */
export function broughtIn(state, before, value) {
  if (!state.reduces) return value;
  const n = state.group.length;
  if (before === "") return state.reduce_op === "AVG" ? value / n : value;
  return COMBINE[state.reduce_op](Number(before), value, n);
}

/**
 * The number of correct predictions: `[right, predicted]`.
 * @param {State} state
 * @param {Record<string, string[]>} guesses
 */
export function score(state, guesses) {
  let [right, all] = [0, 0];
  for (const rank of state.specified) {
    (guesses[rank] ?? []).forEach((guess, at) => {
      if (guess === "") return;
      all++;
      if (state.right?.[rank]?.[at]) right++;
    });
  }
  return [right, all];
}
