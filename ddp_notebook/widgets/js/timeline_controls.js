/**
 * What stands around the timeline: buttons, the legend, the tooltip, following the newest, and asking for what was left out.
 */

import { colourOf } from "./timeline_draw.js";
import { MEANINGS } from "./bars.js";
import { follow } from "./timewindow.js";

const LENGTHS = [
  ["5000", "last 5 s"], ["500", "last 0.5 s"], ["1000", "last 1 s"], ["2000", "last 2 s"], ["20000", "last 20 s"], ["60000", "last minute"],
  ["1 step", "last step"], ["3 steps", "last 3 steps"], ["10 steps", "last 10 steps"],
];
const MOST_ASKED_MS = 20000; // a longer window is too much to ask for
const PATIENCE_MS = 1200;

/** The newest stretch of time, of a fixed length or of the last steps. */
export class Follow {
  constructor() {
    this.length = LENGTHS[0][0];
  }

  /** The time at which there may be something new. */
  newest(store, lanes) {
    // An idle run does not run away to the left; one that hangs goes on.
    const isGoingOn = store.state === "running" || store.state === "stuck" || lanes.hasOpen;
    return isGoingOn || !lanes.count ? store.now : Math.min(lanes.last, store.now);
  }

  window(store, lanes, steps, pixels, inPages) {
    const newest = this.newest(store, lanes);
    const [count, isSteps] = this.length.split(" ");
    const over = isSteps ? steps.marks.filter((one) => one.end <= newest).slice(-Number(count)) : [];
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
 * @param {{zoomBy: (factor: number) => void, redraw: () => void, setWindow: (wanted: any) => void, whole: () => any}} actions
 */
export function controls(el, following, { zoomBy, redraw, setWindow, whole }) {
  const row = el.appendChild(document.createElement("div"));
  row.className = "ddp-tools";
  row.style.cssText = "display:flex;flex-wrap:wrap;align-items:center;gap:4px 6px;min-height:26px;margin-bottom:4px;font-size:12px";
  const button = (text, label, action) => {
    const made = row.appendChild(document.createElement("button"));
    made.type = "button";
    made.textContent = text;
    made.title = label;
    if (text.length < 2) made.setAttribute("aria-label", label);
    made.addEventListener("click", action);
    return made;
  };
  const newest = button("Follow", "Follow the newest (F)", () => setWindow(null));
  const lengths = row.appendChild(document.createElement("select"));
  lengths.setAttribute("aria-label", "How much of the newest is shown");
  for (const [value, text] of LENGTHS) lengths.append(new Option(text, value));
  lengths.addEventListener("change", () => {
    following.length = lengths.value;
    setWindow(null);
    redraw();
  });
  button("All", "Show everything that is here (Home)", () => setWindow(whole()));
  button("−", "Zoom out (-)", () => zoomBy(1 / 1.6));
  button("+", "Zoom in (+)", () => zoomBy(1.6));
  const words = row.appendChild(document.createElement("span"));
  words.className = "ddp-note";
  words.style.cssText = "flex:1 1 12em;opacity:.8;min-width:0;overflow:hidden;text-overflow:ellipsis;white-space:nowrap";
  let said = "";
  return {
    height: () => row.offsetHeight + 4,
    say({ isFollowing, isPaused, words: text }) {
      newest.setAttribute("aria-pressed", String(isFollowing));
      const all = text || (isFollowing ? (isPaused ? "paused" : "") : "Drag to move; Ctrl and wheel, or + and −, zoom");
      if (all === said) return;
      words.textContent = words.title = said = all;
    },
  };
}

const LEGEND = ["forward", "backward", "optimizer", "input", "transfer", "waiting"];
const LEGEND_WORDS = { transfer: "communication", waiting: "waits for the last rank" };

/** @param {HTMLElement} el */
export function legend(el) {
  const row = el.appendChild(document.createElement("div"));
  row.className = "ddp-legend";
  row.style.cssText = "display:flex;flex-wrap:wrap;gap:0 12px;padding-top:4px;font-size:11px;line-height:16px";
  const patches = LEGEND.map((name) => {
    const item = row.appendChild(document.createElement("span"));
    const patch = item.appendChild(document.createElement("i"));
    patch.style.cssText = "display:inline-block;width:14px;height:9px;margin-right:4px;border:1px solid transparent;box-sizing:border-box";
    item.append(LEGEND_WORDS[name] ?? name);
    return { name, patch };
  });
  let shown = null;
  return {
    height: () => row.offsetHeight,
    colours(colours) {
      if (shown === colours) return;
      shown = colours;
      for (const { name, patch } of patches) {
        patch.style.background = colourOf(colours, MEANINGS.indexOf(name));
        if (name === "waiting") patch.style.borderColor = colours.fill.waitingLine;
      }
    },
  };
}

/** Words beside the pointer. For the eye only: a screen reader has the table. @param {HTMLElement} el */
export function tooltip(el) {
  el.style.position = "relative";
  const box = el.appendChild(document.createElement("div"));
  box.className = "ddp-tip";
  box.setAttribute("aria-hidden", "true");
  box.style.cssText =
    "position:absolute;z-index:3;pointer-events:none;display:none;max-width:340px;padding:4px 8px;border-radius:3px;font-size:12px;line-height:1.4;white-space:pre-line;" +
    "background:var(--jp-layout-color0,Canvas);color:var(--jp-content-font-color1,CanvasText);border:1px solid #888;box-shadow:0 1px 4px #0004";
  let said = "";
  return {
    hide: () => {
      box.style.display = "none";
    },
    show(lines, x, y, width) {
      const text = lines.join("\n");
      if (text !== said) box.textContent = said = text;
      box.style.display = "block";
      const right = x + 14 + box.offsetWidth <= width;
      box.style.left = `${right ? x + 14 : Math.max(x - 14 - box.offsetWidth, 0)}px`;
      box.style.top = `${y + 16}px`;
    },
  };
}

/** Asks the kernel for the steps in sight that were left out, once each, when the window has come to rest. */
export class Asking {
  constructor(store, env) {
    this.store = store;
    this.env = env;
    this.clear();
  }

  clear() {
    clearTimeout(this._timer);
    /** @type {Map<string, number>} request by step */
    this.requests = new Map();
    this.sentAt = new Map();
    this.words = "";
    this.isWaiting = false;
    this._timer = 0;
  }

  /**
   * @param {import("./stepmarks.js").StepMark[]} missing
   * @param {{t0: number, t1: number}} view
   * @param {number[]} ranks
   * @param {() => void} redraw
   * @returns {string} what stands on the hatch: the longer and the shorter, with a bar between
   */
  about(missing, view, ranks, redraw) {
    clearTimeout(this._timer);
    this.words = "";
    this.isWaiting = false;
    if (!missing.length) return "";
    const name = ({ cell, step }) => `${cell}.${step}`;
    const isChosen = this.store.choice.window !== null; // while following the next picture is another one
    const canAsk = isChosen && view.t1 - view.t0 <= MOST_ASKED_MS && this.env.send;
    if (!canAsk) {
      this.words = isChosen ? ": zoom in to ask for them" : ": stop here and zoom in to ask for them";
      return "not sent|…";
    }
    const fresh = missing.filter((one) => !this.requests.has(name(one)));
    if (fresh.length) {
      this._timer = setTimeout(() => {
        const request = Math.floor(Math.random() * 2 ** 31);
        for (const one of fresh) this.requests.set(name(one), request);
        this.sentAt.set(request, performance.now());
        this.env.send({ kind: "ask", request, what: "spans", t0: fresh[0].start, t1: Math.max(...fresh.map((one) => one.end)), ranks });
        setTimeout(redraw, PATIENCE_MS + 50);
        redraw();
      }, 150);
    }
    const waiting = missing.filter((one) => !this.store.answers.has(this.requests.get(name(one)) ?? -1));
    this.isWaiting = waiting.length > 0;
    if (!this.isWaiting) {
      const [{ message }] = missing.map((one) => this.store.answers.get(this.requests.get(name(one))));
      this.words = `: ${message.error ?? "the recording has no more of them"}`;
      return "not in the recording any more|not kept";
    }
    const since = Math.min(...waiting.map((one) => this.sentAt.get(this.requests.get(name(one))) ?? Infinity));
    const isLate = performance.now() - since > PATIENCE_MS;
    this.words = isLate && this.store.state === "running" ? ": asked the kernel, which answers when the cell is over" : ": asking the kernel";
    return isLate && this.store.state === "running" ? "asked; the kernel answers after the cell|asked" : "asking the kernel …|asking";
  }
}
