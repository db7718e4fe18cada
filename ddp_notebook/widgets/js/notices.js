/**
 * The words of the lines below the picture.
 */

import { plural } from "./format.js";
import { alarmOf } from "./ranks.js";

const STATES = { running: "running", idle: "idle", hang: "hanging", ended: "ended", "": "" };

/**
 * What the view is in: for the chip at the top, and for the line that is read out. The line changes only when a state
 * does, not with each message.
 * @param {import("./store.js").Store} store
 * @param {string} interrupt what became of an interrupt
 */
export function stateOf(store, interrupt) {
  const { state, cell, choice } = store;
  const running = state === "running" || state === "hang";
  const chip = STATES[state] ?? state;
  if (interrupt) return { chip, words: interrupt };
  if (store.catchingUp) return { chip, words: `Catching up: ${plural(store.missed, "message")} did not arrive.` };
  const alarm = alarmOf(store);
  if (alarm) return { chip, words: `Cell ${cell} hangs. ${alarm}` };
  const what = !store.messages
    ? "Waiting for the first message."
    : running
      ? `Cell ${cell} is running.`
      : state === "ended"
        ? "The session has ended."
        : state === "idle"
          ? `No cell is running${cell ? `; the last one was ${cell}` : ""}.`
          : "";
  return { chip, words: choice.paused ? `Paused; what comes is taken in. ${what}`.trim() : what };
}

/**
 * What was left out, in words: `notes` of the kernel, and what is missing here.
 * @param {import("./store.js").Store} store
 * @returns {string[]}
 */
export function inWords(store) {
  const found = [];
  for (const [name, value] of Object.entries(store.notes)) {
    if (value === null || value === undefined || value === false || value === 0 || value === "") continue;
    if (name === "steps_shown_of" && Array.isArray(value)) {
      if (value[1] > value[0]) found.push(`timeline and buckets show ${value[0]} of ${value[1]} steps`);
    } else if (name === "metric_every") {
      if (value > 1) found.push(`metrics: every ${ordinal(value)} step`);
    } else if (name === "dropped_rows") found.push(`${plural(value, "row")} left out`);
    else if (typeof value === "string") found.push(value);
    else found.push(`${name.replaceAll("_", " ")}: ${Array.isArray(value) ? value.join(" of ") : value}`);
  }
  if (store.missed && !store.catchingUp) found.push(`${plural(store.missed, "message")} did not arrive; a snapshot filled in what it holds`);
  return found;
}

/** @param {number} count */
function ordinal(count) {
  const last = count % 100 > 10 && count % 100 < 14 ? 0 : count % 10;
  return `${count}${["th", "st", "nd", "rd"][last] ?? "th"}`;
}
