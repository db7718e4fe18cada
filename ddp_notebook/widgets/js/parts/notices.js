/** Text of the lines above and below the picture: hanging ranks, the state of the run, left-out data. */

import { plural, ranksInWords } from "../data/format.js";
import { LATE } from "../data/run.js";

/** @type {Record<string, string>} */
const STATES = { stuck: "hangs" };

/**
 * Waiting ranks and what they wait for, largest group first: `ranks 0,1,3 wait for rank 2 in all_reduce #12 (cell line
 * 7)`.
 * @param {Iterable<Record<string, any>>} rows
 * @returns {{ranks: number[], words: string}[]}
 *
 */
export function waiting(rows) {
  /** @type {Map<string, number[]>} */
  const found = new Map();
  for (const row of rows) {
    if (!row.waits_for) continue;
    const ranks = found.get(row.waits_for) ?? [];
    ranks.push(row.rank);
    found.set(row.waits_for, ranks);
  }
  return [...found]
    .sort((a, b) => b[1].length - a[1].length)
    .map(([what, ranks]) => ({ ranks, words: `${ranksInWords(ranks)} wait${ranks.length === 1 ? "s" : ""} for ${what}` }));
}

/** @param {string} words */
function capital(words) {
  return words.charAt(0).toUpperCase() + words.slice(1);
}

/** A sentence about a hang; empty if there is none. @param {import("../data/store.js").Store} store */
export function alarmOf(store) {
  if (store.alert) return capital(store.alert);
  if (store.state !== "stuck") return "";
  const found = waiting(store.ranks.values());
  return found.length ? capital(`${found.map(({ words }) => words).join("; ")}.`) : "The ranks wait for each other and cannot go on.";
}

/**
 * The state of the view, for the chip at the top and for the status line. The line changes only with the state, and not
 * with each message.
 * @param {import("../data/store.js").Store} store
 * @param {string} interrupt result of an interrupt
 *
 */
export function stateOf(store, interrupt) {
  const { state, choice, only } = store;
  const cell = capital(store.cellName(store.cell));
  const chip = STATES[state] ?? state;
  if (interrupt) return { chip, words: interrupt };
  const lacks = store.missed ? `${plural(store.missed, "message")} did not arrive` : "this view has come late";
  if (store.catchingUp) return { chip, words: `Catching up: ${lacks}.` };
  const alarm = alarmOf(store);
  if (alarm) return { chip, words: `${cell} hangs. ${alarm}` };
  /** @type {Record<string, string>} */
  const whats = {
    running: `${cell} is running.`,
    idle: `No cell is running${store.cell ? `; the last one was ${store.cellName(store.cell)}` : ""}.`,
    stopped: "The session has ended.",
    gone: "The kernel of this view has ended; this is the last picture of it.",
    recorded: only === null ? "This was recorded." : `${capital(store.cellName(only))} was recorded.`,
  };
  const what = store.messages ? (whats[state] ?? "") : "Waiting for the first message.";
  return { chip, words: choice.paused ? `Paused; what comes is taken in. ${what}`.trim() : what };
}

/**
 * Text about when the kernel answers clicks; empty if it answers immediately, if this is not known yet, or if no cell
 * can run.
 * @param {import("../data/store.js").Store} store
 */
export function answersInWords({ answersWhen, state }) {
  if (!answersWhen || ["recorded", "stopped", "gone"].includes(state)) return "";
  return answersWhen === LATE ? "buttons here work only after the cell; while it runs, the notebook's stop button (■) interrupts it" : "";
}

/** Texts for the notes of the kernel; empty if nothing is missing. @type {Record<string, (value: any) => string[]>} */
const NOTES = {
  units_shown_of: () => [], // added below, because it changes when left-out steps arrive
  remote_shown_of: () => [], // the timeline shows it
  rows_left_out: () => [], // the timeline shows it
  dropped_rows: (count) => (count ? [`${plural(count, "row")} lost on the ranks`] : []),
  values_left_out: () => [], // shown next to the tensors
  answers: () => [],
};

/**
 * Texts about left-out data: `notes` of the kernel, and data missing in this view.
 * @param {import("../data/store.js").Store} store
 * @param {string[]} panels shown panels; notes about other panels are left out
 * @returns {string[]}
 *
 */
export function inWords(store, panels = ["loss", "sync", "timeline"]) {
  const found = [];
  // The timeline shows this itself for steps and remote calls.
  if (store.stepsShownOf > 1 && panels.includes("sync")) found.push(`buckets: one of ${store.stepsShownOf} steps is shown`);
  if (panels.includes("timeline")) {
    const leftOut = store.answeredShownOf === 1 ? 0 : (store.notes.rows_left_out ?? 0) - store.rowsLeftOutCame;
    if (leftOut > 0) found.push(`${plural(leftOut, "row")} of the timeline left out`);
  }
  for (const [name, value] of Object.entries(store.notes)) {
    const known = NOTES[name];
    if (known) found.push(...known(value));
    else if (typeof value === "string" && value) found.push(value);
    else if (value) found.push(`${name.replaceAll("_", " ")}: ${value}`);
  }
  if (panels.includes("loss") && store.metrics.leftOut.size) found.push(`${plural(store.metrics.leftOut.size, "metric")} of earlier cells not drawn`);
  if (store.missed && !store.catchingUp) found.push(`${plural(store.missed, "message")} did not arrive; a snapshot filled in what it holds`);
  return found;
}
