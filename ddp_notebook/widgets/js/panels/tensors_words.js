/** Text about the tensors of a collective: differences between ranks, changes, and the element under the pointer. */

import { percent, plural, ranksInWords } from "../data/format.js";
import { element, exactly, isSame, range } from "../data/values.js";
import { indexOf, shareOf } from "../drawing/tiles.js";

/** @typedef {import("../drawing/tiles.js").Tile} Tile */
/** @typedef {import("../drawing/tiles.js").Placed} Placed */

/** All drawn tensors. @param {Tile[]} tiles */
export const tensorsOf = (tiles) => tiles.flatMap((tile) => tile.sides).filter((tensor) => tensor !== null);

/** The tensors of one side, one per rank. @param {Tile[]} tiles @param {number} side */
const ofSide = (tiles, side) => tiles.map((tile) => tile.sides[side]).filter((tensor) => tensor !== null && tensor !== undefined);

/** Whether only the first elements are available. @param {Placed} tensor */
export const isPartial = (tensor) => tensor.data.length < tensor.numel;

/** The changes by the collective. @param {Tile[]} tiles */
export function changedInWords(tiles) {
  const shares = ofSide(tiles, 1).flatMap(({ rank, changed }) => (changed ? [{ rank, share: shareOf(changed) }] : []));
  if (!shares.length) return "";
  if (shares.every(({ share }) => share === 0)) return "nothing changed";
  if (shares.every(({ share }) => share === 1)) return "all elements changed";
  const kept = shares.filter(({ share }) => share === 0).map(({ rank }) => rank);
  const some = shares.length - kept.length;
  const mean = shares.reduce((sum, { share }) => sum + share, 0) / shares.length;
  return `changed: ${percent(mean)} of the elements${kept.length && some ? `, none on ${kept.length <= 4 ? ranksInWords(kept) : plural(kept.length, "rank")}` : ""}`;
}

/**
 * Equality between ranks, by side.
 * @param {(import("../data/values.js").Across|null)[]} across
 * @param {Tile[]} tiles
 */
export function acrossInWords(across, tiles) {
  return across.map((one, side) => {
    if (!one || !one.marks.length) return "";
    const part = ofSide(tiles, side).some(isPartial) ? "of the elements shown " : "";
    const what = side ? "output" : "input";
    if (!one.count) return `${what}: ${part ? "the elements shown are" : ""} the same on all ranks`.replace("  ", " ");
    const who = one.ranks.length && one.ranks.length <= tiles.length / 3 ? `, ${ranksInWords(one.ranks)} unlike the others` : "";
    return `${what}: ${part}${one.count === one.marks.length ? "all" : `${one.count} of ${one.marks.length}`} differ between ranks${who}`;
  });
}

/**
 * Lines about an element: its value, its input or output, and the values of the other ranks.
 * @param {Tile[]} tiles
 * @param {Placed} tensor
 * @param {number} at
 */
export function aboutElement(tiles, tensor, at) {
  const { rank, side, dtype, data, numel } = tensor;
  const lines = [`rank ${rank}, ${side ? "output" : "input"}[${indexOf(at, isPartial(tensor) ? [data.length] : tensor.shape).join(", ")}] = ${exactly(data[at], dtype)}`];
  const comparable = /** @param {Placed} one */ (one) => one.numel === numel && at < one.data.length;
  for (const other of ofSide(tiles, 1 - side).filter((one) => one.rank === rank && comparable(one))) {
    lines.push(isSame(other.data[at], data[at]) ? "not changed by the collective" : `${side ? "input" : "output"} ${exactly(other.data[at], other.dtype)}`);
  }
  const others = ofSide(tiles, side).filter((one) => one.rank !== rank && comparable(one));
  if (others.length) {
    const unlike = others.filter((one) => !isSame(one.data[at], data[at]));
    const some = unlike.slice(0, 4).map((one) => `rank ${one.rank}: ${element(one.data[at], one.dtype, 9)}`).join(", ");
    lines.push(unlike.length ? `other on ${some}${unlike.length > 4 ? ` and ${unlike.length - 4} more` : ""}` : `the same on all ${others.length + 1} ranks`);
  }
  lines.push(range(tensor));
  return lines;
}

/** The shapes of the first rank's tensors. @param {Tile[]} tiles */
export function shapesInWords(tiles) {
  return tensorsOf(tiles.slice(0, 1)).map((tensor) => `${tensor.side ? "output" : "input"} ${tensor.words} ${tensor.dtype}`).join(", ");
}

/** Table for screen readers. @param {Tile[]} tiles */
export function tensorTable(tiles) {
  const rows = tensorsOf(tiles).map((tensor) => {
    const first = Array.from(tensor.data.slice(0, 32), (value) => element(value, tensor.dtype));
    return [`${tensor.rank}`, tensor.side ? "output" : "input", range(tensor), first.join(" ")];
  });
  return { head: ["rank", "side", "range", "first elements"], rows };
}

/** The name of a group, whose text is its description in JSON. @param {string} text */
export function groupName(text) {
  try {
    return JSON.parse(text).title ?? text;
  } catch {
    return text;
  }
}
