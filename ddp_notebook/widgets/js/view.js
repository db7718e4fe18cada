/**
 * One view: tabs or the compact row, the lines above and below the picture, and the times of drawing.
 *
 * A panel is drawn in an animation frame if something has changed and the view is visible.
 */

import { palette, themeOf } from "./drawing/colours.js";
import { Head } from "./head.js";
import { THRESHOLDS, follow, isWellSeen, tellGone, tellSeen } from "./neighbours.js";
import { PANELS } from "./panels/index.js";
import { behind, statusLine } from "./parts/a11y.js";
import { make, newId, show } from "./parts/dom.js";
import { alarmOf, answersInWords, inWords } from "./parts/notices.js";
import sequenceStyle from "./parts/sequence.css";
import style from "./style.css";

const COMPACT_HEIGHT = 150;
const MOST_LATENCIES = 5000;

/** @typedef {{name: string, el: HTMLElement, panel: import("./panels/index.js").Panel, behind: ReturnType<typeof behind>, width: number, height: number}} Shown */

/**
 * @param {HTMLElement} el
 * @param {import("./hub.js").Hub} hub
 * @param {{panel: string, compact: boolean, key?: string, group?: string, place?: string}} options group, place: see `neighbours.js`
 * @returns {() => void} removes the view
 *
 */
export function makeView(el, hub, { panel = "loss", compact = false, key = "", group = "", place = "" }) {
  const document = el.ownerDocument;
  const root = make(document, "section", { class: "ddpm", role: "region", "aria-label": "Monitor of the ranks", "data-lm-suppress-shortcuts": "true" });
  const sheet = make(document, "style", { textContent: style + sequenceStyle });
  if (key) root.dataset.key = key;
  el.append(sheet, root);
  let view = new View(root, hub, { panel: panel in PANELS ? panel : "loss", compact, open, whose: { group, place } });

  /** Replace the compact view by all panels. */
  function open() {
    view.destroy();
    root.classList.remove("ddpm-elsewhere");
    view = new View(root, hub, { panel: "loss", compact: false, open, whose: { group: "", place: "" } });
    /** @type {HTMLElement|null} */ (root.querySelector("[role=tab]"))?.focus();
  }

  return () => {
    view.destroy();
    root.remove();
    sheet.remove();
  };
}

class View {
  /** @param {HTMLElement} root @param {import("./hub.js").Hub} hub @param {{panel: string, compact: boolean, open: () => void, whose: {group: string, place: string}}} options */
  constructor(root, hub, { panel, compact, open, whose }) {
    const document = root.ownerDocument;
    this.root = root;
    this.document = document;
    this.store = hub.store;
    this.compact = compact;
    this.whose = whose;
    /** @type {Shown[]} */
    this.shown = [];
    /** @type {(() => void)[]} */
    this.cleanup = [];
    this.isDirty = true;
    this.isVisible = true;
    this.frame = 0;
    this.freshSeen = 0;
    this.drawnDpr = 0;
    // Read by tests.
    this.hook = {
      store: this.store,
      /** @type {object[]} */ latency: [],
      draws: 0,
      frames: 0,
      drawMs: /** @type {number[]} */ ([]),
      state: () => this.state(),
    };
    Object.assign(root, { ddpMonitor: this.hook });
    /** @type {import("./panels/index.js").Env} */
    this.env = {
      colours: palette("light"),
      dpr: devicePixelRatio || 1,
      reducedMotion: false,
      compact,
      canSend: hub.canSend,
      ask: (message) => hub.ask(message),
      redraw: (resized) => (resized ? this.layout() : this.mark()),
    };
    root.classList.toggle("ddpm-compact", compact);
    this.head = new Head(document, hub, { compact, open, mark: () => this.mark() });
    this.alarm = make(document, "div", { class: "ddpm-alarm", hidden: true });
    this.body = make(document, "div", { class: "ddpm-body" });
    this.statusEl = make(document, "span", { class: "ddpm-status" });
    this.status = statusLine(this.statusEl);
    this.notes = make(document, "span", { class: "ddpm-notes" });
    this.neighbour = compact && whose.group ? follow(root, whose.group, () => this.layout()) : null;
    const foot = make(document, "div", { class: "ddpm-foot" }, this.statusEl, this.notes);
    root.replaceChildren(...(this.neighbour ? [this.neighbour.el] : []), this.head.el, this.alarm, this.body, foot);
    this.panelName = panel;
    this.empty = ""; // see #showFilled
    /** @type {Map<string, {tab: HTMLButtonElement, area: HTMLElement}>} */
    this.tabs = new Map();
    if (compact) {
      this.#panel("loss", make(document, "div", { class: "ddpm-panel" }));
      this.#panel("sync", make(document, "div", { class: "ddpm-panel" }));
    } else this.#tabs(panel);
    this.#observe();
    this.restyle();
    this.layout();
    this.neighbour?.update();
  }

  // ---- tabs

  /** @param {string} chosen */
  #tabs(chosen) {
    const { document, tabs } = this;
    const list = make(document, "div", { class: "ddpm-tabs", role: "tablist", "aria-label": "Panels" });
    this.body.append(list);
    for (const [name, { title }] of Object.entries(PANELS)) {
      const area = make(document, "div", { class: "ddpm-panel", role: "tabpanel", id: newId(name), hidden: true });
      const tab = make(document, "button", { type: "button", role: "tab", id: newId(`tab-${name}`), "aria-controls": area.id, textContent: title, onclick: () => this.choosePanel(name) });
      area.setAttribute("aria-labelledby", tab.id);
      list.append(tab);
      this.body.append(area);
      tabs.set(name, { tab, area });
    }
    list.onkeydown = (event) => {
      const names = [...tabs.keys()];
      const at = names.findIndex((name) => tabs.get(name)?.tab === event.target);
      const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: names.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      this.choosePanel(names[(to + names.length) % names.length]);
      tabs.get(this.panelName)?.tab.focus();
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
      if (other === name && !this.shown.some((one) => one.name === name)) this.#panel(name, area);
    }
    this.layout();
  }

  /** @param {string} name @param {HTMLElement} area */
  #panel(name, area) {
    const { document } = this;
    const { title, make: makePanel } = PANELS[name];
    if (!area.parentNode) this.body.append(area);
    const toolbar = make(document, "div", { class: "ddpm-toolbar" });
    const el = make(document, "div", { class: `ddpm-canvas-area ddpm-${name}` });
    area.append(toolbar, el);
    const panel = makePanel(el, this.store, this.env);
    toolbar.append(...panel.controls.map((control) => control.el));
    show(toolbar, panel.controls.length > 0);
    el.addEventListener("keydown", (event) => {
      if (event.altKey || event.ctrlKey || event.metaKey || !panel.onKey(event)) return;
      event.preventDefault();
      event.stopPropagation();
      this.mark();
    });
    this.shown.push({ name, el, panel, behind: behind(el, panel, title), width: 0, height: 0 });
  }

  /** The visible panels. */
  get current() {
    return this.compact ? this.shown : this.shown.filter((one) => one.name === this.panelName);
  }

  // ---- when to draw

  #observe() {
    const resized = new ResizeObserver(() => this.layout());
    resized.observe(this.body);
    const seen = new IntersectionObserver((entries) => {
      const last = entries[entries.length - 1];
      this.isVisible = last.isIntersecting;
      if (!this.compact) tellSeen(this.root, this.whose, isWellSeen(last));
      if (this.isVisible) this.mark();
    }, { threshold: THRESHOLDS });
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
      () => this.neighbour?.destroy(),
      () => this.compact || tellGone(this.root),
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

  /**
   * Hide the panels of a compact view that have nothing to draw, unless all are empty. Returns whether this has
   * changed.
   */
  #showFilled() {
    if (!this.compact) return false;
    const empty = this.shown.map(({ panel }) => panel.isEmpty?.() ?? false);
    const isAny = empty.includes(false);
    const words = isAny ? empty.join() : "";
    if (this.empty === words) return false;
    this.empty = words;
    this.shown.forEach(({ el }, at) => el.parentElement && show(el.parentElement, !(isAny && empty[at])));
    this.body.classList.toggle("ddpm-alone", isAny && empty.includes(true));
    return true;
  }

  layout() {
    this.env.dpr = devicePixelRatio || 1;
    this.#showFilled();
    for (const one of this.current) {
      const width = Math.floor(one.el.clientWidth);
      if (width <= 0) continue;
      const height = this.#heightOf(one, width);
      if (one.width === width && one.height === height && this.drawnDpr === this.env.dpr) continue;
      one.width = width;
      one.height = height;
      one.panel.resize(width, height);
    }
    this.drawnDpr = this.env.dpr;
    this.mark();
  }

  /** @param {Shown} one @param {number} width */
  #heightOf(one, width) {
    return this.compact ? COMPACT_HEIGHT : Math.round(one.panel.height(width));
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
    if (this.#showFilled()) this.layout();
    const isElsewhere = this.root.classList.contains("ddpm-elsewhere");
    for (const one of isElsewhere ? [] : this.current) {
      if (!one.width) continue;
      const wanted = this.#heightOf(one, one.width);
      if (wanted !== one.height) one.panel.resize(one.width, (one.height = wanted));
      one.panel.draw();
      for (const control of one.panel.controls) control.update();
      one.behind.update();
      this.hook.draws++;
      if (one.panel.drawn) this.#measure(one.panel.drawn().metric);
    }
    this.head.picker?.update();
    this.tell();
    const { drawMs } = this.hook;
    drawMs.push(performance.now() - begun);
    if (drawMs.length > 1000) drawMs.splice(0, 500);
  }

  /** Measure the age of a logged value when its line is drawn. @param {string|null} metric */
  #measure(metric) {
    const { store, hook } = this;
    const now = performance.now();
    if (store.freshTotal < this.freshSeen) this.freshSeen = 0; // another run has started
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
    const alarm = alarmOf(store);
    show(this.alarm, alarm !== "");
    if (this.alarm.textContent !== alarm) this.alarm.textContent = alarm;
    const words = this.head.update();
    this.root.dataset.state = store.choice.paused ? "paused" : alarm ? "stuck" : store.state;
    this.status.say(words);
    // A hang is shown above; here it is only for screen readers.
    this.statusEl.classList.toggle("ddpm-hidden", alarm !== "" && words.endsWith(alarm));
    const answers = this.compact ? "" : answersInWords(store); // a compact view sends no requests
    const notes = [...this.current.flatMap((one) => one.panel.notes()), ...inWords(store, this.current.map(({ name }) => name)), answers].filter(Boolean).join(" · ");
    if (this.notes.textContent !== notes) this.notes.textContent = notes;
  }

  /** The drawn state. `due`: there is something else to draw in the next frame in which the view is visible. */
  state() {
    const { store } = this;
    const panels = Object.fromEntries(this.current.map((one) => [one.name, one.panel.state()]));
    const { seq, run, worldSize, missed, catchingUp, choice } = store;
    return {
      panel: this.compact ? "compact" : this.panelName,
      panels,
      due: this.isDirty,
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

  destroy() {
    for (const one of this.cleanup) one();
    this.head.destroy();
    for (const one of this.shown) {
      one.behind.destroy();
      for (const control of one.panel.controls) control.destroy();
      one.panel.destroy();
    }
  }
}
