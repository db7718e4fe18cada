/** The top of a view: its title and state, and the controls that apply to all panels. */

import { LATE } from "./data/run.js";
import { rankPicker } from "./parts/controls.js";
import { make, show } from "./parts/dom.js";
import { stateOf } from "./parts/notices.js";

const INTERRUPT_MS = 1000;
const NOT_HEARD = "press the notebook's stop button (■), which does the same.";

export class Head {
  /**
   * @param {Document} document
   * @param {import("./hub.js").Hub} hub
   * @param {{compact: boolean, open: () => void, mark: () => void}} view open: replaces the compact view by all panels; mark: requests a redraw
   */
  constructor(document, hub, { compact, open, mark }) {
    this.hub = hub;
    this.store = hub.store;
    this.mark = mark;
    this.interrupt = ""; // result of an interrupt, as text
    this.interruptState = ""; // state of the run at the time of the interrupt
    /** @type {(() => void)[]} */
    this.cleanup = [];
    this.title = make(document, "span", { class: "ddpm-title" });
    this.chip = make(document, "span", { class: "ddpm-chip" });
    this.picker = compact ? null : rankPicker(document, this.store);
    this.pause = compact ? null : this.#pauseButton(document);
    this.stop = compact || !hub.canSend ? null : make(document, "button", { type: "button", class: "ddpm-interrupt", textContent: "Interrupt ranks", onclick: () => this.#interrupt() });
    const opener = compact ? make(document, "button", { type: "button", textContent: "Open all panels", onclick: open }) : null;
    const actions = [opener, this.picker?.el, this.pause, this.stop].filter((one) => !!one);
    this.el = make(document, "div", { class: "ddpm-head" }, make(document, "span", { class: "ddpm-what" }, this.title, this.chip), make(document, "span", { class: "ddpm-actions" }, ...actions));
  }

  /** @param {Document} document */
  #pauseButton(document) {
    const { store } = this;
    const onclick = () => store.choose({ paused: !store.choice.paused });
    return make(document, "button", { type: "button", class: "ddpm-pause", "aria-pressed": "false", textContent: "Pause", title: "The picture stands still; what comes is taken in", onclick });
  }

  #interrupt() {
    const { store } = this;
    if (store.answersWhen === LATE) {
      this.#tellInterrupt(`The kernel hears this view only after the cell: ${NOT_HEARD}`);
      return;
    }
    const before = store.state;
    const request = this.hub.ask({ kind: "interrupt" });
    this.#tellInterrupt("Interrupting the ranks …");
    const timer = setTimeout(() => {
      const answer = store.answers.get(request)?.message;
      const isHeard = answer || store.state !== before;
      this.#tellInterrupt(isHeard ? sentence(answer?.said || answer?.error || "The ranks were interrupted") : `The kernel is busy and has not heard it: ${NOT_HEARD}`);
    }, INTERRUPT_MS);
    this.cleanup.push(() => clearTimeout(timer));
  }

  /** @param {string} words */
  #tellInterrupt(words) {
    this.interrupt = words;
    this.interruptState = this.store.state;
    this.mark();
  }

  /** Update from the store. @returns {string} the state in a sentence */
  update() {
    const { store } = this;
    if (this.interrupt && store.state !== this.interruptState) this.interrupt = "";
    const { chip, words } = stateOf(store, this.interrupt);
    if (this.chip.textContent !== chip) this.chip.textContent = chip;
    const title = store.title || (store.worldSize ? `${store.worldSize} ranks` : "Monitor");
    if (this.title.textContent !== title) this.title.textContent = title;
    if (this.stop) this.stop.disabled = !["running", "stuck"].includes(store.state);
    if (this.pause) {
      const { paused } = store.choice;
      show(this.pause, paused || !["recorded", "stopped", "gone"].includes(store.state));
      this.pause.setAttribute("aria-pressed", String(paused));
      const label = paused ? "Resume" : "Pause";
      if (this.pause.textContent !== label) this.pause.textContent = label;
    }
    return words;
  }

  destroy() {
    for (const one of this.cleanup) one();
    this.picker?.destroy();
  }
}

/** @param {string} words */
function sentence(words) {
  return `${words.charAt(0).toUpperCase()}${words.slice(1)}${words.endsWith(".") ? "" : "."}`;
}
