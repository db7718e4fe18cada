/**
 * Controls to choose ranks, metric, step and collective. Native elements, each with a label.
 *
 * Each function returns its element and `update`, which updates the element from the store.
 */

import { make, newId, show } from "./dom.js";
import { parseRanks, plural, ranksShort } from "../data/format.js";
import { MOST_LINES } from "../drawing/curves.js";
import { isSameName, nameOf } from "../data/names.js";

/** @typedef {import("../data/store.js").Store} Store */
/** @typedef {{el: HTMLElement, update(): void, destroy(): void}} Control */

/**
 * A button for the previous or next item.
 * @param {Document} document
 * @param {string} sign
 * @param {string} label
 * @param {() => void} press
 */
function arrow(document, sign, label, press) {
  return make(document, "button", { type: "button", class: "ddpm-arrow", textContent: sign, "aria-label": label, title: label, onclick: press });
}

/**
 * Choice of ranks: a box for each, and a text field for ranges.
 * @param {Document} document
 * @param {Store} store
 *
 */
export function rankPicker(document, store) {
  const summary = make(document, "summary", {});
  const error = make(document, "p", { class: "ddpm-error", id: newId("error") });
  const id = newId("ranks");
  const line = make(document, "input", { type: "text", id, placeholder: "all", size: 14, "aria-describedby": error.id, autocomplete: "off", spellcheck: false });
  const boxes = make(document, "div", { class: "ddpm-boxes", role: "group", "aria-label": "Ranks" });
  const all = make(document, "button", { type: "button", textContent: "All", onclick: () => choose(null) });
  const el = make(
    document,
    "details",
    { class: "ddpm-picker" },
    summary,
    make(document, "div", { class: "ddpm-drop" }, make(document, "label", { for: id }, "Ranks, for example 0-3,7"), make(document, "div", { class: "ddpm-line" }, line, all), error, boxes),
  );
  let count = -1;

  /** @param {Set<number>|null} ranks */
  function choose(ranks) {
    error.textContent = "";
    line.removeAttribute("aria-invalid");
    store.choose({ ranks: ranks && ranks.size ? ranks : null });
    line.value = store.choice.ranks ? ranksShort(store.choice.ranks) : "";
  }

  line.onchange = () => {
    try {
      choose(parseRanks(line.value, store.worldSize));
    } catch (problem) {
      error.textContent = /** @type {Error} */ (problem).message;
      line.setAttribute("aria-invalid", "true");
    }
  };
  boxes.onchange = () => {
    const ticked = [...boxes.querySelectorAll("input")].filter((box) => box.checked).map((box) => Number(box.value));
    choose(ticked.length === store.worldSize ? null : new Set(ticked));
    update();
  };
  const release = closing(document, el, summary);

  function update() {
    const { worldSize, choice } = store;
    if (count !== worldSize) {
      count = worldSize;
      boxes.replaceChildren(
        ...Array.from({ length: worldSize }, (_, rank) => make(document, "label", {}, make(document, "input", { type: "checkbox", value: String(rank) }), String(rank))),
      );
      boxes.style.setProperty("--columns", String(worldSize > 32 ? 8 : 4));
    }
    const words = choice.ranks ? ranksShort(choice.ranks) : worldSize ? `all ${worldSize}` : "all";
    const told = `Ranks: ${words.length > 16 ? `${words.slice(0, 15)}…` : words}`;
    if (summary.textContent !== told) summary.textContent = told;
    for (const box of boxes.querySelectorAll("input")) {
      const isChosen = !choice.ranks || choice.ranks.has(Number(box.value));
      if (box.checked !== isChosen) box.checked = isChosen;
    }
  }

  return { el, update, destroy: release };
}

/**
 * Make a list close like a menu: on Escape, or when the focus or a click is outside.
 * @param {Document} document
 * @param {HTMLDetailsElement} el
 * @param {HTMLElement} summary
 * @returns {() => void} removes the listeners
 *
 */
function closing(document, el, summary) {
  el.onkeydown = (event) => {
    if (event.key !== "Escape" || !el.open) return;
    el.open = false;
    summary.focus();
    event.stopPropagation();
  };
  el.addEventListener("focusout", (event) => {
    if (event.relatedTarget && !el.contains(/** @type {Node} */ (event.relatedTarget))) el.open = false;
  });
  const outside = /** @param {Event} event */ (event) => {
    if (el.open && !event.composedPath().includes(el)) el.open = false;
  };
  document.addEventListener("pointerdown", outside);
  return () => document.removeEventListener("pointerdown", outside);
}

/**
 * Choice of the runs of the metric: a box for each, the newest first. Several runs are drawn over each other.
 * @param {Document} document
 * @param {Store} store
 * @returns {Control}
 *
 */
export function runPicker(document, store) {
  const summary = make(document, "summary", {});
  const boxes = make(document, "div", { class: "ddpm-runs", role: "group", "aria-label": "Runs" });
  const newest = make(document, "button", { type: "button", textContent: "Newest", title: "Show the newest run, and each new one", onclick: () => store.choose({ runs: null }) });
  const details = make(document, "details", { class: "ddpm-picker" }, summary, make(document, "div", { class: "ddpm-drop" }, make(document, "div", { class: "ddpm-line" }, newest), boxes));
  const alone = make(document, "span", { class: "ddpm-only" }); // replaces the menu if there is only one choice
  const el = make(document, "span", { class: "ddpm-field" }, details, alone);
  let told = "";
  boxes.onchange = () => {
    const ticked = [...boxes.querySelectorAll("input")].filter((box) => box.checked).map((box) => Number(box.value));
    store.choose({ runs: ticked.length ? new Set(ticked) : null });
  };
  function update() {
    const name = store.chosenMetric();
    const runs = store.runs(name).slice().reverse();
    const shown = store.shownRuns(name);
    const labels = runs.map((run) => store.runName(run));
    show(el, runs.length > 0);
    show(details, runs.length > 1);
    show(alone, runs.length === 1);
    if (told !== labels.join("|")) {
      told = labels.join("|");
      boxes.replaceChildren(...runs.map(({ key }, at) => make(document, "label", {}, make(document, "input", { type: "checkbox", value: String(key) }), labels[at])));
    }
    for (const box of boxes.querySelectorAll("input")) {
      const isShown = shown.some(({ key }) => key === Number(box.value));
      if (box.checked !== isShown) box.checked = isShown;
    }
    const names = shown.map((run) => store.runName(run));
    const last = runs.length ? Math.max(...runs[0].cells) : -1;
    const others = store.newestLogged() > last; // a later run has other metrics
    const newestWords = store.choice.runs ? "" : others ? " (newest with this metric)" : " (newest)";
    const words = `${names.length > 1 ? "Runs" : "Run"}: ${names.length > 2 ? `${names.length} of ${runs.length}` : names.join(", ")}${newestWords}`;
    if (summary.textContent !== words) summary.textContent = words;
    const only = others ? ", the only one with this metric" : store.cell > last ? ", the only one with logged values" : "";
    const one = runs.length === 1 ? `Run: ${labels[0]}${only}` : "";
    if (alone.textContent !== one) alone.textContent = one;
  }
  return { el, update, destroy: closing(document, details, summary) };
}

/**
 * Choice of the metric, and how it is drawn.
 * @param {Document} document
 * @param {Store} store
 * @param {(value: boolean) => void} showEveryRank
 *
 */
export function metricControls(document, store, showEveryRank) {
  const [metricId, smoothId] = [newId("metric"), newId("smoothing")];
  const metric = make(document, "select", { id: metricId, onchange: () => store.choose({ metric: metric.value }) });
  const log = make(document, "input", { type: "checkbox", onchange: () => store.choose({ log: log.checked }) });
  const every = make(document, "input", { type: "checkbox", onchange: () => showEveryRank(every.checked) });
  const everyLabel = make(document, "label", {}, every, "every rank");
  const told = make(document, "output", { for: smoothId });
  const smoothing = make(document, "input", {
    type: "range",
    id: smoothId,
    min: "0",
    max: "0.98",
    step: "0.02",
    value: "0",
    oninput: () => store.choose({ smoothing: Number(smoothing.value) }),
  });
  const el = make(
    document,
    "div",
    { class: "ddpm-controls" },
    make(document, "span", { class: "ddpm-field" }, make(document, "label", { for: metricId }, "Metric"), metric),
    make(document, "label", {}, log, "log scale"),
    make(document, "span", { class: "ddpm-field" }, make(document, "label", { for: smoothId }, "Smoothing"), smoothing, told),
    everyLabel,
  );
  let names = "";
  function update() {
    const found = store.metricNames();
    if (names !== found.join()) {
      names = found.join();
      metric.replaceChildren(...found.map((name) => make(document, "option", { value: name, textContent: name })));
    }
    metric.disabled = !found.length;
    const chosen = store.chosenMetric();
    if (chosen && metric.value !== chosen) metric.value = chosen;
    if (log.checked !== store.choice.log) log.checked = store.choice.log;
    if (Number(smoothing.value) !== store.choice.smoothing) smoothing.value = String(store.choice.smoothing);
    const words = store.choice.smoothing ? store.choice.smoothing.toFixed(2) : "off";
    if (told.textContent !== words) told.textContent = words;
    show(everyLabel, store.worldSize > MOST_LINES);
  }
  return { el, update, destroy() {} };
}

/**
 * Choice of the step: a slider over the kept steps, and buttons for the previous, next and newest step.
 * @param {Document} document
 * @param {Store} store
 *
 */
export function stepControl(document, store) {
  const id = newId("step");
  const slider = make(document, "input", {
    type: "range",
    id,
    min: "0",
    max: "0",
    oninput() {
      const entry = store.steps()[Number(slider.value)];
      if (entry) store.choose({ step: { cell: entry.cell, step: entry.step } });
    },
  });
  const told = make(document, "output", { for: id, class: "ddpm-wide-output" });
  const latest = make(document, "input", { type: "checkbox", onchange: () => follow(latest.checked) });
  const el = make(
    document,
    "div",
    { class: "ddpm-controls" },
    make(
      document,
      "span",
      { class: "ddpm-field" },
      make(document, "label", { for: id }, "Step"),
      arrow(document, "‹", "Previous step", () => store.chooseNeighbour(-1)),
      slider,
      arrow(document, "›", "Next step", () => store.chooseNeighbour(1)),
      told,
    ),
    make(document, "label", {}, latest, "latest"),
  );
  /** @param {boolean} isOn */
  function follow(isOn) {
    const entry = store.chosenStep();
    store.choose({ step: isOn || !entry ? null : { cell: entry.cell, step: entry.step } });
  }
  function update() {
    const steps = store.steps();
    const entry = store.chosenStep();
    const at = entry ? steps.indexOf(entry) : -1;
    slider.max = String(Math.max(0, steps.length - 1));
    slider.disabled = steps.length < 2;
    if (at >= 0 && Number(slider.value) !== at) slider.value = String(at);
    const words = entry ? `${entry.step} (${store.cellName(entry.cell)})` : store.choice.step ? `${store.choice.step.step} is gone` : "none yet";
    if (told.textContent !== words) told.textContent = words;
    slider.setAttribute("aria-valuetext", words);
    if (latest.checked !== !store.choice.step) latest.checked = !store.choice.step;
  }
  return { el, update, destroy() {} };
}

/**
 * Controls of the sync panel: the detail below the bars, and the rank of the buckets.
 * @param {Document} document
 * @param {Store} store
 * @param {{showDetail(value: "buckets"|"ranks"): void, showRank(value: number): void}} panel
 *
 */
export function detailControls(document, store, panel) {
  const [detailId, rankId] = [newId("detail"), newId("rank")];
  const rank = make(document, "select", { id: rankId, onchange: () => panel.showRank(Number(rank.value)) });
  const rankField = make(document, "span", { class: "ddpm-field" }, make(document, "label", { for: rankId }, "of rank"), rank);
  const detail = make(
    document,
    "select",
    {
      id: detailId,
      onchange() {
        panel.showDetail(detail.value === "ranks" ? "ranks" : "buckets");
        show(rankField, detail.value === "buckets");
      },
    },
    make(document, "option", { value: "buckets", textContent: "buckets" }),
    make(document, "option", { value: "ranks", textContent: "time by rank" }),
  );
  const el = make(document, "div", { class: "ddpm-controls" }, make(document, "span", { class: "ddpm-field" }, make(document, "label", { for: detailId }, "Below"), detail), rankField);
  let known = "";
  function update() {
    const ranks = store.shownRanks();
    if (known === ranks.join()) return;
    known = ranks.join();
    const before = rank.value;
    rank.replaceChildren(...ranks.map((one) => make(document, "option", { value: String(one), textContent: String(one) })));
    rank.value = ranks.includes(Number(before)) && before !== "" ? before : String(ranks[0] ?? "");
  }
  return { el, update, destroy() {} };
}

/**
 * Choice of the collective: a slider, and buttons for the previous, next and newest one.
 * @param {Document} document
 * @param {Store} store
 * @param {boolean} [withValues] only collectives with known tensor values
 *
 */
export function collectiveControl(document, store, withValues = false) {
  const id = newId("collective");
  const slider = make(document, "input", { type: "range", id, min: "0", max: "0", oninput: () => pick(Number(slider.value)) });
  const told = make(document, "output", { for: id, class: "ddpm-wide-output" });
  const latest = make(document, "input", { type: "checkbox", onchange: () => (latest.checked ? store.choose({ collective: null }) : pick(all().length - 1)) });
  const el = make(
    document,
    "div",
    { class: "ddpm-controls" },
    make(
      document,
      "span",
      { class: "ddpm-field" },
      make(document, "label", { for: id }, "Collective"),
      arrow(document, "‹", "Previous collective", () => pick(where() - 1)),
      slider,
      arrow(document, "›", "Next collective", () => pick(where() + 1)),
      told,
    ),
    make(document, "label", {}, latest, "latest"),
  );
  const all = () => (withValues ? store.collectives().filter((one) => one.values.size > 0) : store.collectives());
  /** @param {number} at */
  function pick(at) {
    const found = all();
    const one = found[Math.min(Math.max(at, 0), found.length - 1)];
    if (one) store.choose({ collective: nameOf(one) });
  }
  function where() {
    const found = all();
    const { collective } = store.choice;
    const at = collective ? found.findIndex((one) => isSameName(one, collective)) : -1;
    return at < 0 ? found.length - 1 : at;
  }
  function update() {
    const found = all();
    const at = where();
    slider.max = String(Math.max(0, found.length - 1));
    slider.disabled = found.length < 2;
    if (at >= 0 && Number(slider.value) !== at) slider.value = String(at);
    const one = found[at];
    const words = one ? `${store.text(one.op)} #${one.number}` : "none yet";
    if (told.textContent !== words) told.textContent = words;
    slider.setAttribute("aria-valuetext", one ? `${words}, ${at + 1} of ${plural(found.length, "collective")}` : words);
    if (latest.checked !== !store.choice.collective) latest.checked = !store.choice.collective;
  }
  return { el, update, destroy() {} };
}
