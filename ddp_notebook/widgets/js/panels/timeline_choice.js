/**
 * The choice on the timeline: a collective, as in other panels, or a remote call. Keys step through both in the order
 * of time.
 *
 */

import { keyOf, nameOf } from "../data/names.js";
import { COMMUNICATION } from "../data/lanes.js";
import { EXECUTION, REMOTE_CALL } from "../data/tables.js";
import { callsOf, endsOf } from "../drawing/links.js";

/** @typedef {import("../drawing/links.js").Call} Call */
/** @typedef {import("../data/names.js").Name} Name */

export class Chosen {
  /**
   * @param {import("../data/store.js").Store} store
   * @param {import("../data/lanes.js").Lanes} lanes
   */
  constructor(store, lanes) {
    this.store = store;
    this.lanes = lanes;
    this.known = { key: "", calls: /** @type {Call[]} */ ([]) };
  }

  get isAny() {
    return !!(this.store.choice.collective || this.store.choice.remote);
  }

  /** @param {Name|null} collective @param {{rank: number, call: number}|null} [remote] rank: of its caller */
  choose(collective, remote = null) {
    this.store.choose({ collective, remote });
  }

  /**
   * The choice for a click on a bar; null if it is not a remote call.
   * @param {{rank: number, lane: import("../data/lanes.js").Lane, at: number}} one
   */
  remoteAt({ rank, lane, at }) {
    const index = this.store.tables.span.find(lane.row[at]);
    if (lane.kind[at] === REMOTE_CALL) return { rank, call: lane.call[at] };
    return lane.kind[at] === EXECUTION && index >= 0 ? { rank: this.store.tables.span.columns.peer[index], call: lane.call[at] } : null;
  }

  /** The calls of the chosen collective, by rank. */
  calls() {
    const { collective } = this.store.choice;
    if (!collective) return [];
    const { span } = this.store.tables;
    const ranks = this.store.shownRanks();
    const key = `${keyOf(collective)}:${span.total}:${ranks.length}`;
    if (this.known.key !== key) this.known = { key, calls: callsOf(this.lanes, span, collective, ranks, this.store.collectiveOf(collective)?.start) };
    return this.known.calls;
  }

  /** The caller's bar of the chosen remote call; null if it is hidden or was dropped. @returns {Call|null} */
  remote() {
    const { remote } = this.store.choice;
    const row = remote ? this.store.shownRanks().indexOf(remote.rank) : -1;
    if (!remote || row < 0) return null;
    const lane = this.lanes.of(remote.rank)[COMMUNICATION];
    for (let at = lane.length - 1; at >= 0; at--) if (lane.kind[at] === REMOTE_CALL && lane.call[at] === remote.call) return { rank: remote.rank, row, lane, at };
    return null;
  }

  /** Both ends of the chosen remote call. */
  ends() {
    const one = this.remote();
    return one && endsOf(this.lanes, this.store.tables.span, this.store.shownRanks(), one);
  }

  /** Collectives and remote calls, sorted by start. */
  all() {
    /** @type {{start: number, collective: Name|null, remote: {rank: number, call: number}|null}[]} */
    const found = [];
    for (const one of this.store.collectives()) if (one.spans.size) found.push({ start: one.start, collective: nameOf(one), remote: null });
    for (const rank of this.store.shownRanks()) {
      const lane = this.lanes.of(rank)[COMMUNICATION];
      for (let at = 0; at < lane.length; at++) if (lane.kind[at] === REMOTE_CALL) found.push({ start: lane.start[at], collective: null, remote: { rank, call: lane.call[at] } });
    }
    return found.sort((a, b) => a.start - b.start);
  }

  /** Choose the previous or next one. @param {number} by @returns {number|null} its start; null if there is none */
  next(by) {
    const all = this.all();
    if (!all.length) return null;
    const { collective, remote } = this.store.choice;
    const key = collective && keyOf(collective);
    const chosen = all.findIndex((one) => (key ? one.collective && keyOf(one.collective) === key : remote && one.remote?.call === remote.call));
    const at = this.isAny && chosen >= 0 ? chosen : by < 0 ? all.length : -1;
    const one = all[Math.min(Math.max(at + by, 0), all.length - 1)];
    this.choose(one.collective, one.remote);
    return one.start;
  }

  /**
   * The time range of the choice; null if nothing is chosen.
   * @param {number} now
   * @returns {{t0: number, t1: number}|null}
   */
  extent(now) {
    const one = this.remote();
    const calls = one ? [one] : this.calls();
    if (!calls.length) return null;
    return { t0: Math.min(...calls.map(({ lane, at }) => lane.start[at])), t1: Math.max(...calls.map(({ lane, at }) => Math.min(lane.end[at], now))) };
  }
}
