/**
 * The panel of calls between ranks: those of the last cell that made some, moment by moment.
 *
 * The kernel does not send them by itself. The panel requests them while it is shown.
 */

import { plural } from "../data/format.js";
import { make } from "../parts/dom.js";
import { moments, sequence, short } from "../parts/sequence.js";

/** @typedef {import("../parts/sequence.js").Drawn} Drawn */
/** @typedef {{of_cell: number, in_all: number, drawn: Drawn}} Told */

const PACE_MS = 1500; // between two requests

/**
 * @param {HTMLElement} el
 * @param {import("../data/store.js").Store} store
 * @param {import("./index.js").Env} env
 * @returns {import("./index.js").Panel}
 */
export function callsPanel(el, store, env) {
  const document = el.ownerDocument;
  const step = make(document, "input", { type: "range", min: "0", step: "1", "aria-label": "moment" });
  const words = make(document, "p", { class: "ddpm-waits", role: "status" });
  const picture = make(document, "div", { class: "ddpm-scroller", tabIndex: 0, role: "region", "aria-label": "Calls between ranks" });
  el.append(make(document, "p", {}, step), words, picture);
  step.addEventListener("input", () => goTo(Number(step.value)));
  let request = 0, askedAt = -Infinity, at = Infinity; // moments to show; Infinity: all
  /** @type {Told|null} */
  let told = null;
  let drawnAs = "";

  function ask() {
    const answer = store.answers.get(request)?.message;
    if (answer?.notes?.drawn) told = answer.notes;
    const now = performance.now();
    if (!env.canSend || now - askedAt < PACE_MS || (request && !answer)) return;
    askedAt = now;
    request = env.ask({ kind: "ask", what: "calls" });
  }

  /** @param {number} moment */
  function goTo(moment) {
    const last = told ? moments(told.drawn).length : 0;
    at = moment >= last ? Infinity : Math.max(0, moment);
    env.redraw();
  }

  function draw() {
    ask();
    const key = `${JSON.stringify(told)} ${at} ${env.colours.theme}`;
    if (key === drawnAs) return;
    drawnAs = key;
    env.colours.ranks.forEach((colour, rank) => el.style.setProperty(`--rank${rank}`, colour));
    const all = told ? moments(told.drawn) : [];
    const shown = Math.min(at, all.length);
    step.hidden = !all.length;
    step.max = String(all.length);
    step.value = String(shown);
    words.textContent = shown && at !== Infinity ? `${all[shown - 1].words}.` : describe();
    picture.replaceChildren(...(told && all.length ? [sequence(document, told.drawn, shown, describe())] : []));
  }

  function describe() {
    if (!told || !told.in_all) return env.canSend ? "No call between ranks is known yet." : "Calls between ranks are shown where there is a kernel.";
    const { drawn, in_all: all } = told;
    const some = drawn.calls.length < all ? `; the first ${drawn.calls.length} are drawn` : "";
    return `${plural(all, "call")} between ranks in ${store.cellName(told.of_cell)}${some}.`;
  }

  return {
    controls: [],
    draw,
    resize: () => env.redraw(),
    height: () => 420,
    describe,
    table: () => (told ? { head: ["caller", "runs on", "function", "sent, ms", "answered, ms"], rows: told.drawn.calls.map((call) => [call.src, call.dst, short(call.function), call.sent.toFixed(2), call.returned === null ? "not yet" : call.returned.toFixed(2)].map(String)) } : null),
    notes: () => [],
    state: () => ({ at: at === Infinity ? null : at, calls: told?.drawn.calls ?? [], inAll: told?.in_all ?? 0 }),
    onKey(event) {
      if (event.key !== "." && event.key !== ",") return false;
      const all = told ? moments(told.drawn).length : 0;
      goTo(Math.min(at, all) + (event.key === "." ? 1 : -1));
      return true;
    },
    destroy: () => undefined,
  };
}
