/**
 * Text for the timeline: labels of bars, text next to the pointer, and the sentence and the table for screen readers.
 */

import { TRANSFER } from "../drawing/bars.js";
import { bytes, duration, percent, plural, ranksInWords } from "../data/format.js";
import { COMMUNICATION, COMPUTE, FAILED, UNWAITED } from "../data/lanes.js";
import { EXECUTION, KINDS, REMOTE_CALL } from "../data/tables.js";

/** @type {Record<string, string>} */
const LETTER = { forward: "F", backward: "B", "input gradient": "I", "weight gradient": "W" };
const SAYABLE = 50; // rows of the table for screen readers

/** @typedef {{lane: import("../data/lanes.js").Lane, at: number}} Place of a span */

/** Labels of a part of a step, an action of a pipeline, or a named block. @param {string} kind @param {string} name */
function labels(kind, name) {
  if (kind === "block") return [name];
  const microbatch = /^stage \d+, microbatch (\d+)$/.exec(name)?.[1];
  return microbatch ? [`${kind} of ${name}`, `${LETTER[kind] ?? ""}${microbatch}`] : [`${kind} ${name}`, kind];
}

/** @param {string} words */
const capital = (words) => words[0].toUpperCase() + words.slice(1);

/**
 * @param {import("../data/store.js").Store} store
 * @param {import("../data/lanes.js").Lanes} lanes
 */
export function timelineWords(store, lanes) {
  const span = () => store.tables.span;

  /** The row of a span as an object; null if the store has dropped it. @param {Place} place */
  function rowOf({ lane, at }) {
    const index = span().find(lane.row[at]);
    return index < 0 ? null : span().row(index);
  }

  /** Labels of a bar, the longest first. @param {import("../data/lanes.js").Lane} lane @param {number} at @returns {string[]} */
  function wordsOf(lane, at) {
    const index = span().find(lane.row[at]);
    const kind = lane.kind[at];
    if (index < 0) return [KINDS[kind]];
    const { op, number, name, peer } = span().columns;
    if (kind === EXECUTION) return [`${store.text(name[index])} for rank ${peer[index]}`, store.text(name[index])];
    if (kind === REMOTE_CALL) return [`${store.text(op[index])} ${store.text(name[index])} → rank ${peer[index]}`, store.text(name[index]), `→ ${peer[index]}`];
    if (kind < TRANSFER) return name[index] && kind ? labels(KINDS[kind], store.text(name[index])) : [KINDS[kind]];
    const words = store.text(op[index]) || KINDS[kind];
    return [`${words} #${number[index]}`, words, `#${number[index]}`];
  }

  /**
   * Lines about a remote call: caller, callee, and how the time was spent.
   * @param {Place & {rank: number}} one either end
   * @param {import("../drawing/links.js").Ends|null} ends
   *
   */
  function aboutRemote(one, ends) {
    const row = rowOf(one);
    if (!row) return [];
    const isCaller = row.kind === REMOTE_CALL;
    const caller = isCaller ? one.rank : row.peer, callee = isCaller ? row.peer : one.rank;
    const where = callee === caller ? "by itself" : callee < 0 ? "by a rank that is not known" : `by ${store.rankName(callee)}`;
    const lines = [`${store.rankName(caller)}: ${store.text(row.op)} of ${store.text(row.name)}, run ${where}`];
    const sent = ends?.caller.lane.start[ends.caller.at], returned = ends?.caller.lane.end[ends.caller.at];
    const begun = ends?.callee?.lane.start[ends.callee.at], ended = ends?.callee?.lane.end[ends.callee.at];
    const failed = row.state === FAILED ? ", failed" : "";
    if (one.lane.end[one.at] === Infinity || returned === Infinity) {
      const since = sent ?? row.start;
      lines.push(`under way for ${duration(store.now - since)}${begun === undefined ? "" : `: ${duration(Math.max(begun - since, 0))} until it began`}`);
    } else if (sent !== undefined && returned !== undefined && begun !== undefined && ended !== undefined) {
      const parts = [[Math.max(begun - sent, 0), "until it began"], [ended - begun, "running"], [Math.max(returned - ended, 0), "back"]];
      lines.push(`${duration(returned - sent)}${failed}: ${parts.map(([ms, words]) => `${duration(Number(ms))} ${words}`).join(", ")}`);
    } else lines.push(`${duration(row.end - row.start)}${failed}${isCaller && callee !== caller ? "; when it ran is not known" : ""}`);
    if (row.nbytes >= 0) lines.push(isCaller ? `${bytes(row.nbytes)} sent` : `${bytes(row.nbytes)} of tensors in its result`);
    return lines;
  }

  /**
   * Lines about an operation.
   * @param {Place & {rank: number, count: number}} one
   * @param {import("../drawing/links.js").Ends|null} [ends] of a remote call
   */
  function about(one, ends = null) {
    if (one.lane.kind[one.at] === EXECUTION || one.lane.kind[one.at] === REMOTE_CALL) return [...aboutRemote(one, ends), ...places(one)];
    const row = rowOf(one);
    const { lane, at } = one;
    const isOpen = lane.end[at] === Infinity;
    const length = isOpen ? store.now - lane.start[at] : lane.end[at] - lane.start[at];
    const lines = [`${store.rankName(one.rank)}: ${wordsOf(lane, at)[0]}`];
    if (isOpen) lines.push(`under way for ${duration(length)}`);
    else lines.push(row?.state === UNWAITED ? "nobody waited for it: its end is unknown" : duration(length) + (row?.state === FAILED ? ", failed" : ""));
    if (row && row.kind >= TRANSFER) {
      if (row.wait > 0) lines[1] += `, of which ${duration(row.wait)} waited for the last rank`;
      else if (row.wait === 0 && row.kind === TRANSFER) lines[1] += ", the last to arrive";
      lines.push([bytes(row.nbytes), store.text(row.group)].filter(Boolean).join(", "));
    }
    return [...lines, ...places(one)];
  }

  /**
   * Lines about the source of an operation, and about further operations under the pointer.
   * @param {Place & {count: number}} one
   */
  function places(one) {
    const row = rowOf(one);
    const step = row && row.kind !== EXECUTION && row.kind !== REMOTE_CALL ? `step ${row.step}` : "";
    const place = [step, row?.cell ? store.cellName(row.cell) : "", row ? store.text(row.site) : ""].filter(Boolean);
    const more = one.count > 1 ? [`and ${one.count - 1} more under the pointer: zoom in to see them`] : [];
    return [...(place.length ? [place.join(", ")] : []), ...more];
  }

  /** How long each shown rank computed, communicated and waited within the window, in ms. @param {{t0: number, t1: number}} seen */
  function sums(seen) {
    return store.shownRanks().map((rank) => {
      const sum = { rank, compute: 0, communication: 0, waited: 0, count: 0 };
      for (const which of [COMPUTE, COMMUNICATION]) {
        const lane = lanes.of(rank)[which];
        const until = lane.until(seen.t1);
        let covered = seen.t0; // overlapping time counts once
        for (let i = lane.from(seen.t0); i < until; i++) {
          const end = Math.min(lane.end[i], store.now, seen.t1);
          const more = Math.max(0, end - Math.max(lane.start[i], covered));
          covered = Math.max(covered, end);
          sum.count++;
          if (which === COMPUTE) sum.compute += more;
          else sum.communication += more;
          if (lane.wait[i] > 0) sum.waited += lane.wait[i];
        }
      }
      return sum;
    });
  }

  /** @param {{t0: number, t1: number}} seen @param {string} notes notes about left-out or merged data */
  function describe(seen, notes) {
    const each = sums(seen);
    const count = each.reduce((sum, one) => sum + one.count, 0);
    const length = seen.t1 - seen.t0;
    if (!count) return `nothing was recorded in these ${duration(length)}.`;
    const part = /** @param {"compute"|"communication"} name */ (name) => percent(each.reduce((sum, one) => sum + one[name], 0) / each.length / length);
    const byWait = [...each].filter((one) => one.communication).sort((a, b) => a.waited - b.waited);
    const least = byWait[0], most = byWait[byWait.length - 1];
    const slow = byWait.length > 1 && most.waited > 2 * least.waited + length / 100 ? ` ${capital(store.rankName(least.rank))} waits least, ${duration(least.waited)}; ${store.rankName(most.rank)} most, ${duration(most.waited)}.` : "";
    return (
      `${ranksInWords(each.map((one) => one.rank))}, ${duration(length)} up to ${duration(seen.t1)}: ` +
      `${plural(count, "operation")}; a rank computes ${part("compute")} and communicates ${part("communication")} of the time.${slow}${notes ? ` ${notes}.` : ""}`
    );
  }

  /** @param {{t0: number, t1: number}} seen */
  function table(seen) {
    const rows = [];
    const ranks = store.shownRanks();
    const most = Math.max(1, Math.floor(SAYABLE / Math.max(ranks.length, 1)));
    for (const rank of ranks) {
      const own = [];
      for (const which of [COMPUTE, COMMUNICATION]) {
        const lane = lanes.of(rank)[which];
        for (let i = lane.until(seen.t1) - 1, n = 0; i >= lane.from(seen.t0) && n < most; i--, n++) own.push({ lane, at: i });
      }
      own.sort((a, b) => b.lane.start[b.at] - a.lane.start[a.at]);
      for (const one of own.slice(0, most)) {
        const { lane, at } = one;
        const row = rowOf(one);
        const length = lane.end[at] === Infinity ? "under way" : duration(lane.end[at] - lane.start[at]);
        rows.push([store.hosts.length ? `${rank} (${store.hosts[rank]})` : `${rank}`, wordsOf(lane, at)[0], duration(lane.start[at]), length, lane.wait[at] > 0 ? duration(lane.wait[at]) : "", row ? store.text(row.site) : ""]);
      }
    }
    return { head: ["rank", "operation", "start", "duration", "waited", "line"], rows };
  }

  return { rowOf, wordsOf, about, describe, table };
}
