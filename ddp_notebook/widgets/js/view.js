/**
 * One view: tabs or the compact row, controls, the lines below, and when to draw.
 *
 * A panel is drawn in an animation frame, if something has changed and the view is on the screen.
 */

import { behind, statusLine } from "./parts/a11y.js";
import { palette, themeOf } from "./drawing/colours.js";
import { collectiveControl, detailControls, metricControls, rankPicker, stepControl } from "./parts/controls.js";
import { make, newId, show } from "./parts/dom.js";
import { lossPanel } from "./panels/loss.js";
import { inWords, stateOf } from "./parts/notices.js";
import { alarmOf, ranksPanel } from "./panels/ranks.js";
import style from "./style.css";
import { syncPanel } from "./panels/sync.js";
import { tensorsPanel } from "./panels/tensors.js";
import { timelinePanel } from "./panels/timeline.js";

const PANELS = {
  loss: { title: "Loss", make: lossPanel },
  sync: { title: "Gradient sync", make: syncPanel },
  timeline: { title: "Timeline", make: timelinePanel },
  tensors: { title: "Tensors", make: tensorsPanel },
  ranks: { title: "Ranks", make: ranksPanel },
};
const COMPACT_HEIGHT = 150;
const MOST_LATENCIES = 5000;
const INTERRUPT_MS = 1000;

/** @typedef {ReturnType<typeof lossPanel>} Panel */

/**
 * @param {HTMLElement} el
 * @param {import("./data/hub.js").Hub} hub
 * @param {{panel: string, compact: boolean}} options
 * @returns {() => void} takes the view away
 */
export function makeView(el, hub, { panel = "loss", compact = false }) {
  const document = el.ownerDocument;
  const root = make(document, "section", { class: "ddpm", role: "region", "aria-label": "Monitor of the ranks", "data-lm-suppress-shortcuts": "true" });
  const sheet = make(document, "style", { textContent: style });
  el.append(sheet, root);
  const view = new View(root, hub);
  Object.assign(root, { ddpMonitor: view.hook });
  view.build(compact, panel in PANELS ? panel : "loss");
  return () => {
    view.destroy();
    root.remove();
    sheet.remove();
  };
}

class View {
  /** @param {HTMLElement} root @param {import("./data/hub.js").Hub} hub */
  constructor(root, hub) {
    this.root = root;
    this.hub = hub;
    this.store = hub.store;
    this.document = root.ownerDocument;
    /** @type {{name: string, el: HTMLElement, panel: any, controls: any[], behind: any, width: number, height: number, toolbar: HTMLElement|null}[]} */
    this.shown = [];
    /** @type {(() => void)[]} */
    this.cleanup = [];
    this.isDirty = true;
    this.isVisible = true;
    this.frame = 0;
    this.interrupt = "";
    this.freshSeen = 0;
    const view = this;
    this.hook = {
      store: this.store,
      /** @type {object[]} */ latency: [],
      draws: 0,
      frames: 0,
      drawMs: /** @type {number[]} */ ([]),
      state: () => view.state(),
    };
    this.env = {
      colours: palette("light"),
      dpr: devicePixelRatio || 1,
      reducedMotion: false,
      compact: false,
      canSend: this.hub.canSend,
      send: this.hub.send,
      ask: /** @param {Record<string, any>} message */ (message) => this.hub.ask(message),
      redraw: /** @param {boolean} [resized] */ (resized) => (resized ? this.layout() : this.mark()),
    };
  }

  /** @param {boolean} compact @param {string} panel */
  build(compact, panel) {
    this.compact = this.env.compact = compact;
    this.root.classList.toggle("ddpm-compact", compact);
    this.head = make(this.document, "div", { class: "ddpm-head" });
    this.alarm = make(this.document, "div", { class: "ddpm-alarm", hidden: true });
    this.body = make(this.document, "div", { class: "ddpm-body" });
    const status = (this.statusEl = make(this.document, "span", { class: "ddpm-status" }));
    this.notes = make(this.document, "span", { class: "ddpm-notes" });
    this.root.replaceChildren(this.head, this.alarm, this.body, make(this.document, "div", { class: "ddpm-foot" }, status, this.notes));
    this.status = statusLine(status);
    this.#head();
    if (compact) {
      this.#panel("loss", make(this.document, "div", { class: "ddpm-panel" }));
      this.#panel("sync", make(this.document, "div", { class: "ddpm-panel" }));
    } else this.#tabs(panel);
    this.#observe();
    this.restyle();
    this.layout();
  }

  #head() {
    const { document, store } = this;
    this.title = make(document, "span", { class: "ddpm-title" });
    this.chip = make(document, "span", { class: "ddpm-chip" });
    const controls = make(document, "span", { class: "ddpm-actions" });
    this.head.append(make(document, "span", { class: "ddpm-what" }, this.title, this.chip), controls);
    if (this.compact) {
      controls.append(make(document, "button", { type: "button", textContent: "Open all panels", onclick: () => this.#open() }));
      return;
    }
    this.picker = rankPicker(document, store);
    this.cleanup.push(this.picker.destroy);
    this.pause = make(document, "button", { type: "button", class: "ddpm-pause", "aria-pressed": "false", textContent: "Pause", title: "The picture stands still; what comes is taken in", onclick: () => store.choose({ paused: !store.choice.paused }) });
    controls.append(this.picker.el, this.pause);
    if (!this.hub.canSend) return;
    this.stop = make(document, "button", { type: "button", class: "ddpm-interrupt", textContent: "Interrupt ranks", onclick: () => this.#interrupt() });
    controls.append(this.stop);
  }

  #open() {
    this.#teardown();
    this.build(false, "loss");
    /** @type {HTMLElement} */ (this.root.querySelector("[role=tab]"))?.focus();
  }

  #interrupt() {
    const { store } = this;
    const before = store.state;
    const request = this.hub.ask({ kind: "interrupt" });
    this.#tellInterrupt("Interrupting the ranks …");
    const timer = setTimeout(() => {
      const answer = store.answers.get(request)?.message;
      const isHeard = answer || store.state !== before;
      this.#tellInterrupt(isHeard ? sentence(answer?.said || answer?.error || "The ranks were interrupted") : "The kernel is busy and has not heard it: press the notebook's stop button (■), which does the same.");
    }, INTERRUPT_MS);
    this.cleanup.push(() => clearTimeout(timer));
  }

  /** @param {string} words */
  #tellInterrupt(words) {
    this.interrupt = words;
    this.interruptState = this.store.state;
    this.mark();
  }

  // ---- tabs

  /** @param {string} chosen */
  #tabs(chosen) {
    const { document } = this;
    const list = make(document, "div", { class: "ddpm-tabs", role: "tablist", "aria-label": "Panels" });
    this.body.append(list);
    this.tabs = new Map();
    for (const [name, { title }] of Object.entries(PANELS)) {
      const area = make(document, "div", { class: "ddpm-panel", role: "tabpanel", id: newId(name), hidden: true });
      const tab = make(document, "button", { type: "button", role: "tab", id: newId(`tab-${name}`), "aria-controls": area.id, textContent: title, onclick: () => this.choosePanel(name) });
      area.setAttribute("aria-labelledby", tab.id);
      list.append(tab);
      this.body.append(area);
      this.tabs.set(name, { tab, area });
    }
    list.onkeydown = (event) => {
      const names = [...this.tabs.keys()];
      const at = names.findIndex((name) => this.tabs.get(name).tab === event.target);
      const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: names.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      this.choosePanel(names[(to + names.length) % names.length]);
      this.tabs.get(this.panelName).tab.focus();
    };
    this.choosePanel(chosen);
  }

  /** @param {string} name */
  choosePanel(name) {
    this.panelName = name;
    for (const [other, { tab, area }] of this.tabs) {
      tab.setAttribute("aria-selected", String(other === name));
      tab.tabIndex = other === name ? 0 : -1;
      show(area, other === name);
    }
    const { area } = this.tabs.get(name);
    if (!this.shown.some((one) => one.name === name)) this.#panel(name, area);
    this.layout();
  }

  /** @param {string} name @param {HTMLElement} area */
  #panel(name, area) {
    const { document, store } = this;
    if (!area.parentNode) this.body.append(area);
    const toolbar = make(document, "div", { class: "ddpm-toolbar" });
    const el = make(document, "div", { class: `ddpm-canvas-area ddpm-${name}` });
    area.append(toolbar, el);
    const panel = PANELS[name].make(el, store, this.env);
    const controls = this.compact ? [] : this.#controls(name, panel);
    toolbar.append(...controls.map((control) => control.el));
    show(toolbar, controls.length > 0);
    el.addEventListener("keydown", (event) => {
      if (event.altKey || event.ctrlKey || event.metaKey || !panel.onKey?.(event)) return;
      event.preventDefault();
      event.stopPropagation();
      this.mark();
    });
    this.shown.push({ name, el, panel, controls, behind: behind(el, panel, PANELS[name].title), width: 0, height: 0, toolbar });
  }

  /** @param {string} name @param {any} panel */
  #controls(name, panel) {
    const { document, store } = this;
    if (name === "loss") return [metricControls(document, store, panel.showEveryRank)];
    if (name === "sync") return [stepControl(document, store), detailControls(document, store, panel)];
    if (name === "timeline") return [stepControl(document, store), collectiveControl(document, store)];
    if (name === "tensors") return [collectiveControl(document, store, true)];
    return [];
  }

  /** The panels that can be seen. */
  get current() {
    return this.compact ? this.shown : this.shown.filter((one) => one.name === this.panelName);
  }

  // ---- when to draw

  #observe() {
    const resized = new ResizeObserver(() => this.layout());
    resized.observe(this.body);
    const seen = new IntersectionObserver((entries) => {
      this.isVisible = entries[entries.length - 1].isIntersecting;
      if (this.isVisible) this.mark();
    });
    seen.observe(this.root);
    const themed = new MutationObserver(() => this.restyle());
    for (const one of [this.document.documentElement, this.document.body]) {
      themed.observe(one, { attributes: true, attributeFilter: ["class", "style", "data-jp-theme-light", "data-jp-theme-name", "data-vscode-theme-kind"] });
    }
    const restyle = () => this.restyle();
    const media = ["(prefers-color-scheme: dark)", "(prefers-reduced-motion: reduce)"].map((query) => matchMedia(query));
    for (const one of media) one.addEventListener("change", restyle);
    const unsubscribe = this.store.subscribe((what) => {
      if (what === "data" && this.store.choice.paused) this.tell();
      else this.mark();
    });
    this.cleanup.push(
      () => resized.disconnect(),
      () => seen.disconnect(),
      () => themed.disconnect(),
      () => media.forEach((one) => one.removeEventListener("change", restyle)),
      unsubscribe,
      () => cancelAnimationFrame(this.frame),
    );
  }

  restyle() {
    this.root.style.colorScheme = "";
    const theme = themeOf(this.root);
    this.root.style.colorScheme = theme;
    this.root.dataset.theme = theme;
    this.env.colours = palette(theme, getComputedStyle(this.root).backgroundColor);
    this.env.reducedMotion = matchMedia("(prefers-reduced-motion: reduce)").matches;
    this.mark();
  }

  layout() {
    this.env.dpr = devicePixelRatio || 1;
    for (const one of this.current) {
      const width = Math.floor(one.el.clientWidth);
      if (width <= 0) continue;
      const height = this.compact ? COMPACT_HEIGHT : Math.round(one.panel.height?.(width) ?? 300);
      if (one.width === width && one.height === height && this.drawnDpr === this.env.dpr) continue;
      one.width = width;
      one.height = height;
      one.panel.resize(width, height);
    }
    this.drawnDpr = this.env.dpr;
    this.mark();
  }

  mark() {
    this.isDirty = true;
    if (!this.frame) this.frame = requestAnimationFrame(() => this.#draw());
  }

  #draw() {
    this.frame = 0;
    this.hook.frames++;
    if (!this.isDirty || !this.isVisible || !this.root.isConnected) return;
    this.isDirty = false;
    const begun = performance.now();
    for (const one of this.current) {
      if (!one.width) continue;
      const wanted = this.compact ? COMPACT_HEIGHT : Math.round(one.panel.height?.(one.width) ?? 300);
      if (wanted !== one.height) one.panel.resize(one.width, (one.height = wanted));
      one.panel.draw();
      for (const control of one.controls) control.update();
      one.behind.update();
      this.hook.draws++;
      if (one.name === "loss") this.#measure(one.panel);
    }
    this.picker?.update();
    this.tell();
    const { drawMs } = this.hook;
    drawMs.push(performance.now() - begun);
    if (drawMs.length > 1000) drawMs.splice(0, 500);
  }

  /** How old a logged value is when its line is drawn. @param {Panel} panel */
  #measure(panel) {
    const { store, hook } = this;
    const now = performance.now();
    const { metric } = panel.drawn();
    if (store.freshTotal < this.freshSeen) this.freshSeen = 0; // another run
    const known = store.fresh.length - Math.min(store.fresh.length, store.freshTotal - this.freshSeen);
    this.freshSeen = store.freshTotal;
    for (const one of store.fresh.slice(known)) {
      if (one.name !== metric) continue;
      hook.latency.push({ ...one, unix_ms: Date.now(), age_ms: store.liveNow + now - store.arrivedAt - one.time });
    }
    if (hook.latency.length > MOST_LATENCIES) hook.latency.splice(0, hook.latency.length - MOST_LATENCIES);
  }

  // ---- what is said

  tell() {
    const { store } = this;
    if (this.interrupt && store.state !== this.interruptState) this.interrupt = "";
    const alarm = alarmOf(store);
    show(this.alarm, alarm !== "");
    if (this.alarm.textContent !== alarm) this.alarm.textContent = alarm;
    const { chip, words } = stateOf(store, this.interrupt);
    if (this.chip.textContent !== chip) this.chip.textContent = chip;
    this.root.dataset.state = store.choice.paused ? "paused" : alarm ? "stuck" : store.state;
    const title = store.title || (store.worldSize ? `${store.worldSize} ranks` : "Monitor");
    if (this.title.textContent !== title) this.title.textContent = title;
    this.status.say(words);
    // What hangs is seen above; here it is only read out.
    this.statusEl.classList.toggle("ddpm-hidden", alarm !== "" && words.endsWith(alarm));
    const panels = this.current.flatMap((one) => one.panel.notes?.() ?? []);
    const notes = [...panels, ...inWords(store)].join(" · ");
    if (this.notes.textContent !== notes) this.notes.textContent = notes;
    if (this.pause) {
      const { paused } = store.choice;
      show(this.pause, paused || !["recorded", "stopped"].includes(store.state));
      if (this.stop) this.stop.disabled = !["running", "stuck"].includes(store.state);
      this.pause.setAttribute("aria-pressed", String(paused));
      const label = paused ? "Resume" : "Pause";
      if (this.pause.textContent !== label) this.pause.textContent = label;
    }
  }

  /** What is drawn now. */
  state() {
    const { store } = this;
    const panels = Object.fromEntries(this.current.map((one) => [one.name, one.panel.state()]));
    const { seq, run, worldSize, missed, catchingUp, choice } = store;
    return {
      panel: this.compact ? "compact" : this.panelName,
      panels,
      seq,
      run,
      worldSize,
      missed,
      catchingUp,
      paused: choice.paused,
      theme: this.env.colours.theme,
      status: this.statusEl.textContent,
      notes: this.notes.textContent,
      alarm: this.alarm.hidden ? "" : this.alarm.textContent,
    };
  }

  #teardown() {
    for (const one of this.cleanup) one();
    this.cleanup = [];
    for (const one of this.shown) {
      one.behind.destroy();
      for (const control of one.controls) control.destroy();
      one.panel.destroy();
    }
    this.shown = [];
    this.frame = 0;
  }

  destroy() {
    this.#teardown();
  }
}

/** @param {string} words */
function sentence(words) {
  return `${words.charAt(0).toUpperCase()}${words.slice(1)}${words.endsWith(".") ? "" : "."}`;
}
