/** The controls of the timeline: buttons, the legend, following the newest data, and requests for left-out steps. */

import { colourOf } from "../drawing/timeline_draw.js";
import { MEANINGS } from "../drawing/bars.js";
import { GOING_ON } from "../data/run.js";
import { make } from "../parts/dom.js";
import { follow } from "../drawing/timewindow.js";

const LENGTHS = [
  ["5000", "last 5 s"], ["500", "last 0.5 s"], ["1000", "last 1 s"], ["2000", "last 2 s"], ["20000", "last 20 s"], ["60000", "last minute"],
  ["1 step", "last step"], ["3 steps", "last 3 steps"], ["10 steps", "last 10 steps"],
];
/** @typedef {import("../data/store.js").Store} Store */
/** @typedef {import("../data/lanes.js").Lanes} Lanes */
/** @typedef {import("../data/stepmarks.js").StepMark} StepMark */
/** @typedef {import("../drawing/timewindow.js").TimeWindow} TimeWindow */

const MOST_ASKED_MS = 20000; // longer windows are not requested
const ROWS_ASKED = 3000; // an answer holds up to 4000
const ROWS_OF_STEP = 10; // per rank, for a small model
const MOST_ROWS = 65536; // half of the limit of the span table: more rows would drop earlier answers
const PATIENCE_MS = 1200;

/** Window of the newest data, with a fixed length or with the last steps. */
export class Follow {
  constructor() {
    this.length = LENGTHS[0][0];
  }

  /** The time up to which there can be new data. @param {Store} store @param {Lanes} lanes */
  newest(store, lanes) {
    // The picture of an idle run stands still. It continues for a hanging run.
    const isGoingOn = GOING_ON.has(store.state) || lanes.hasOpen;
    return isGoingOn || !lanes.count ? store.now : Math.min(lanes.last, store.now);
  }

  /**
   * @param {Store} store @param {Lanes} lanes @param {StepMark[]} marks @param {number} pixels @param {boolean} inPages
   * @returns {TimeWindow}
   */
  window(store, lanes, marks, pixels, inPages) {
    const newest = this.newest(store, lanes);
    const [count, isSteps] = this.length.split(" ");
    const over = isSteps ? marks.filter((one) => one.end <= newest).slice(-Number(count)) : [];
    if (over.length) {
      const t0 = over[0].start, t1 = over[over.length - 1].end;
      return { t0: t0 - (t1 - t0) / 40, t1: t1 + (t1 - t0) / 40 };
    }
    return follow(newest, isSteps ? 5000 : Number(count), pixels, inPages);
  }
}

/**
 * @param {HTMLElement} el
 * @param {Follow} following
 * @param {{zoomBy: (factor: number) => void, redraw: () => void, setWindow: (wanted: TimeWindow|null) => void, whole: () => TimeWindow}} actions
 */
export function controls(el, following, { zoomBy, redraw, setWindow, whole }) {
  const document = el.ownerDocument;
  const button = /** @param {string} text @param {string} label @param {() => void} onclick */ (text, label, onclick) => make(document, "button", { type: "button", textContent: text, title: label, "aria-label": label, onclick });
  const newest = button("Follow", "Follow the newest (F)", () => setWindow(null));
  const onchange = () => {
    following.length = lengths.value;
    setWindow(null);
    redraw();
  };
  const lengths = make(document, "select", { "aria-label": "How much of the newest is shown", onchange }, ...LENGTHS.map(([value, text]) => new Option(text, value)));
  const row = make(
    document,
    "div",
    { class: "ddpm-controls", title: "Drag to move. Ctrl and wheel, or a wheel after a click, zooms. Keys: A D, W S, + -, F follows, comma and full stop go from collective to collective" },
    make(
      document,
      "span",
      { class: "ddpm-field" },
      newest,
      lengths,
      button("All", "Show everything that is here (Home)", () => setWindow(whole())),
      button("−", "Zoom out (-)", () => zoomBy(1 / 1.6)),
      button("+", "Zoom in (+)", () => zoomBy(1.6)),
    ),
  );
  row.style.marginBottom = "4px";
  el.append(row);
  return {
    height: () => row.offsetHeight + 4,
    update: /** @param {boolean} isFollowing */ (isFollowing) => newest.setAttribute("aria-pressed", String(isFollowing)),
  };
}

const LEGEND = ["forward", "backward", "optimizer", "input", "execution", "transfer", "waiting"];
/** @type {Record<string, string>} */
const LEGEND_WORDS = { execution: "runs a remote call", transfer: "communication", waiting: "waits for the last rank" };
const ONLY_WHERE_SEEN = "execution";

/** @param {HTMLElement} el */
export function legend(el) {
  const document = el.ownerDocument;
  const patches = LEGEND.map((name) => ({ name, patch: make(document, "i") }));
  const row = make(document, "ul", { class: "ddpm-legend" }, ...patches.map(({ name, patch }) => make(document, "li", {}, patch, LEGEND_WORDS[name] ?? name)));
  row.style.padding = "4px 0 0";
  el.append(row);
  /** @type {object|null} */
  let shown = null;
  return {
    height: () => row.offsetHeight,
    /** @param {import("../drawing/colours.js").Palette} colours @param {Set<number>} kinds existing kinds */
    update(colours, kinds) {
      for (const { name, patch } of patches) if (patch.parentElement) patch.parentElement.hidden = name === ONLY_WHERE_SEEN && !kinds.has(MEANINGS.indexOf(name));
      if (shown === colours) return;
      shown = colours;
      for (const { name, patch } of patches) {
        patch.style.background = colourOf(colours, MEANINGS.indexOf(name));
        if (name === "waiting") patch.style.borderColor = colours.fill.waitingLine;
      }
    },
  };
}

/**
 * Requests the visible steps that were left out, when the window is at rest or no cell runs. There is one request at a
 * time. Each covers only as many steps as probably fit an answer, because an answer with too many rows keeps only the
 * longest.
 *
 */
export class Asking {
  /** @param {Store} store @param {import("./index.js").Env} env */
  constructor(store, env) {
    this.store = store;
    this.env = env;
    /** @type {Set<string>} requested steps for these ranks */
    this.asked = new Set();
    this.ofRanks = "";
    /** @type {{number: number, steps: string[], sentAt: number}|null} the open request */
    this.request = null;
    this.mostSteps = Infinity; // most steps per request
    this.error = ""; // error of the last answer
    this.words = "";
    this.isWaiting = false;
    /** @type {ReturnType<typeof setTimeout>|undefined} */
    this._timer = undefined;
    // Also while paused, when nothing else is drawn.
    this.unsubscribe = store.subscribe(() => {
      if (this.isWaiting) env.redraw();
    });
  }

  clear() {
    clearTimeout(this._timer);
    this.asked.clear();
    this.request = null;
    this.mostSteps = Infinity;
    this.error = "";
    this.words = "";
    this.isWaiting = false;
  }

  /**
   * @param {StepMark[]} missing
   * @param {TimeWindow} view
   * @param {number[]} ranks
   * @param {() => void} redraw
   * @returns {string} the text on the hatch: a long and a short form, separated by a bar
   *
   */
  about(missing, view, ranks, redraw) {
    clearTimeout(this._timer);
    this.words = "";
    this.isWaiting = false;
    this._takeAnswer();
    if (!missing.length) return "";
    if (!this.env.canSend || this.store.state === "gone") return "not on this page";
    if (this.ofRanks !== ranks.join()) this.asked.clear();
    this.ofRanks = ranks.join();
    const rows = ROWS_OF_STEP * ranks.length; // rows per step
    const isGoingOn = GOING_ON.has(this.store.state);
    const isAtRest = this.store.choice.window !== null || !isGoingOn; // while following, the next picture is different
    if (!isAtRest || view.t1 - view.t0 > MOST_ASKED_MS || missing.length * rows > MOST_ROWS) {
      this.words = isAtRest ? ": zoom in to ask for them" : ": stop here and zoom in to ask for them";
      return "not sent";
    }
    const fresh = missing.filter((one) => !this.asked.has(keyOf(one)));
    if (fresh.length && !this.request) {
      const steps = fresh.slice(0, Math.min(this.mostSteps, Math.ceil(ROWS_ASKED / rows)));
      this._timer = setTimeout(() => this._ask(steps, ranks, redraw), 150);
    }
    this.isWaiting = fresh.length > 0 || this.request !== null;
    if (!this.isWaiting) {
      this.words = `: ${this.error || "the recording has no more of them"}`;
      return "not in the recording any more|not kept";
    }
    const isLate = this.request !== null && performance.now() - this.request.sentAt > PATIENCE_MS && isGoingOn;
    this.words = isLate ? ": asked the kernel, which answers when the cell is over" : ": asking the kernel";
    return isLate ? "asked; the kernel answers after the cell|asked" : "asking the kernel …|asking";
  }

  /** @param {StepMark[]} steps @param {number[]} ranks @param {() => void} redraw */
  _ask(steps, ranks, redraw) {
    const number = this.env.ask({ kind: "ask", what: "spans", t0: steps[0].start, t1: Math.max(...steps.map((one) => one.end)), ranks });
    this.request = { number, steps: steps.map(keyOf), sentAt: performance.now() };
    for (const one of this.request.steps) this.asked.add(one);
    setTimeout(redraw, PATIENCE_MS + 50);
    redraw();
  }

  _takeAnswer() {
    const { request } = this;
    // no answer will arrive; a kernel that comes back gets a new request
    if (request && this.store.state === "gone") this.clear();
    if (!request || !this.store.isAnswered(request.number)) return;
    const message = this.store.answers.get(request.number)?.message; // the store keeps the last answers
    this.request = null;
    this.error = message?.error ?? "";
    if (!message?.notes?.rows_left_out) this.mostSteps *= 2;
    else if (request.steps.length > 1) {
      this.mostSteps = Math.ceil(request.steps.length / 2);
      for (const one of request.steps) this.asked.delete(one); // steps that are still missing are requested again
    }
  }
}

/** @param {StepMark} step */
function keyOf({ cell, step }) {
  return `${cell}.${step}`;
}
