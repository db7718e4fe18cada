/**
 * The panel of gradient synchronisation: stacked bars show how the time of each step was spent. Below, the chosen step
 * is shown by rank, or with its buckets over the backward pass and the names of their parameters.
 */

import { bytes, duration, percent, plural } from "../data/format.js";
import { askForSteps, barOf, bucketsOf, newBar } from "../data/steps.js";
import { PARTS } from "../data/tables.js";
import { Surface } from "../drawing/canvas.js";
import { highest, stack } from "../drawing/stepbars.js";
import { Brush, RIGHT, ROW, drawBars, drawBuckets, drawRanks } from "../drawing/sync_draw.js";
import { detailControls, stepControl } from "../parts/controls.js";
import { make } from "../parts/dom.js";
import { WORDS, legend } from "../parts/legend.js";

const MOST_ROWS = 16;

/** @typedef {import("../data/steps.js").Bar} Bar */

/**
 * @param {HTMLElement} el
 * @param {import("../data/store.js").Store} store
 * @param {import("./index.js").Env} env
 * @returns {import("./index.js").Panel}
 */
export function syncPanel(el, store, env) {
  const { compact } = env;
  const document = el.ownerDocument;
  const key = compact ? null : legend(el, env);
  const surface = new Surface(el);
  const { canvas } = surface;
  const brush = new Brush(surface, env);
  const tip = make(document, "div", { class: "ddpm-tip", hidden: true, "aria-hidden": "true" });
  el.append(tip);
  const left = compact ? 40 : 58;
  /** @type {"buckets"|"ranks"} */
  let detail = "buckets";
  /** @type {number|null} */
  let bucketRank = null;
  /** @type {{first: number, row: number}|null} */
  let bucketRows = null; // position of the rows
  let size = [600, 420];
  /** @type {import("../drawing/stepbars.js").Label[]} */
  let labels = []; // labels below the bars
  let picture = measure();

  function draw() {
    surface.resize(size[0], size[1], env.dpr);
    surface.clear();
    if (!compact) askForSteps(store, env);
    picture = measure();
    labels = drawBars(brush, picture, compact, (cell) => store.cellName(cell));
    if (!compact) drawBelow();
    key?.update(detail);
  }

  /** Compute the content of the picture. */
  function measure() {
    const steps = store.steps();
    const width = surface.width - left - RIGHT;
    const pitch = steps.length ? Math.min(34, Math.max(compact ? 5 : 9, width / steps.length)) : 12;
    const fit = Math.max(1, Math.floor(width / pitch));
    const entry = store.chosenStep();
    const at = entry ? steps.indexOf(entry) : -1;
    // The newest steps, or the steps around the chosen one if it is older.
    let from = Math.max(0, steps.length - fit);
    if (store.choice.step && at >= 0 && at < from) from = Math.max(0, at - Math.floor(fit / 2));
    const bars = steps.slice(from, from + fit).map((one) => barOf(store, one, store.choice.ranks)).filter((one) => one !== null);
    const high = highest(bars.map((bar) => bar.duration));
    const frame = { left, top: compact ? 20 : 34, width, height: compact ? surface.height - 46 : 160, high, pitch, gap: pitch > 14 ? 3 : pitch > 6 ? 1.5 : 0.5 };
    const chosen = entry ? bars.findIndex((bar) => bar.cell === entry.cell && bar.step === entry.step) : -1;
    const ranks = store.shownRanks();
    const rank = bucketRank !== null && ranks.includes(bucketRank) ? bucketRank : (ranks[0] ?? 0);
    const byRank = entry && detail === "ranks" ? ranks.map((one) => newBar(store, entry, new Set([one]))).filter((one) => one !== null) : [];
    const buckets = entry && !compact ? { rank, ...bucketsOf(store, entry, rank) } : null;
    // The compact view shows the loss next to these bars with the same step numbers.
    const before = compact && bars.length ? store.stepsBefore(bars[0].cell) : 0;
    return { bars, before, rects: stack(bars, frame), high, hidden: steps.length - bars.length, chosen, frame, buckets, byRank };
  }

  /** Draw the chosen step. */
  function drawBelow() {
    const { frame, buckets, byRank } = picture;
    const top = frame.top + frame.height + 44;
    const entry = store.chosenStep();
    bucketRows = null;
    if (!entry) return;
    const where = `Step ${entry.step}, ${store.cellName(entry.cell)}`;
    if (detail === "ranks") {
      if (byRank.length) drawRanks(brush, byRank, where, left, top);
    } else if (buckets?.buckets.length) bucketRows = drawBuckets(brush, buckets, `${where}, rank ${buckets.rank}`, top);
    else if (buckets) {
      brush.title(`${where}, rank ${buckets.rank}: no bucket is known`, top);
      surface.write(noBuckets(), 0, top + 20, { colour: env.colours.soft, size: 12, width: surface.width });
    }
  }

  function noBuckets() {
    const every = store.stepsShownOf;
    if (every > 1) return `One of ${every} steps is sent with its buckets; choose a neighbouring step.`;
    return "It synchronises none, or it has gone from memory. A model in DistributedDataParallel has buckets.";
  }

  // ---- pointing

  /** @param {PointerEvent} event */
  function onMove(event) {
    const found = hit(event);
    tip.hidden = !found;
    if (!found) return;
    const lines = found.bucket ? bucketLines(found.bucket) : barLines(picture.bars[found.bar], picture.before, store.cellName(picture.bars[found.bar].cell));
    tip.replaceChildren(...lines.map((words, at) => make(document, at ? "div" : "strong", { textContent: words })));
    const box = el.getBoundingClientRect();
    const x = event.clientX - box.left;
    tip.style.left = `${Math.max(0, Math.min(x + 14, box.width - tip.offsetWidth - 4))}px`;
    tip.style.top = `${event.clientY - box.top + 16}px`;
  }

  /** @param {MouseEvent} event @returns {{bar: number, bucket: import("../data/steps.js").Bucket|null}|null} */
  function hit(event) {
    const { frame, bars, buckets } = picture;
    const box = canvas.getBoundingClientRect();
    const x = event.clientX - box.left;
    const y = event.clientY - box.top;
    const bar = Math.floor((x - left) / frame.pitch);
    if (y < frame.top + frame.height + 22) return bars[bar] && x >= left ? { bar, bucket: null } : null;
    const bucket = bucketRows && buckets?.buckets[Math.floor((y - bucketRows.first) / bucketRows.row) - 1];
    return bucket ? { bar: -1, bucket } : null;
  }

  /** @param {MouseEvent} event */
  function onClick(event) {
    const found = hit(event);
    if (!found || found.bar < 0) return;
    const { cell, step } = picture.bars[found.bar];
    store.choose({ step: { cell, step } });
  }

  canvas.addEventListener("pointermove", onMove);
  canvas.addEventListener("pointerleave", () => (tip.hidden = true));
  if (!compact) canvas.addEventListener("click", onClick);

  return {
    controls: compact ? [] : [stepControl(document, store), detailControls(document, store, { showDetail, showRank })],
    draw,
    resize(width, height) {
      size = [width, height - (key?.height() ?? 0)];
    },
    height() {
      if (!store.steps().length) return 250;
      const rows = detail === "ranks" ? store.shownRanks().length : (picture.buckets?.buckets.length ?? 4) + 1;
      return 34 + 170 + 44 + 60 + 26 + ROW * Math.min(Math.max(rows, 4), MOST_ROWS);
    },
    describe() {
      const { bars, before, chosen } = picture;
      const bar = bars[chosen] ?? bars[bars.length - 1];
      if (!bar) return "No step has ended yet.";
      const told = PARTS.map((part, at) => ({ part, value: bar.parts[at] })).filter(({ value }) => value > 0.005 * bar.duration);
      return `Step ${bar.step + before} of ${store.cellName(bar.cell)} took ${duration(bar.duration)}, mean of ${plural(bar.ranks.length, "rank")}: ${told.map(({ part, value }) => `${WORDS[part]} ${duration(value)}, ${percent(value / bar.duration)}`).join("; ")}.`;
    },
    table() {
      const rows = picture.bars.slice(-20).reverse().map((bar) => [`${store.cellName(bar.cell)}, step ${bar.step + picture.before}`, duration(bar.duration), ...bar.parts.map(duration)]);
      return { head: ["step", "in all", ...PARTS.map((part) => WORDS[part])], rows };
    },
    isEmpty: () => !store.steps().length,
    notes() {
      const { hidden, bars, before } = picture;
      const earlier = bars.length ? firstStep(store.steps(), bars[0].cell) : 0;
      if (compact) return bars.length ? [inShort(bars[bars.length - 1], before)] : [];
      const { training, only } = store;
      const notes = [];
      if (training && (only === null || only === training.cell)) notes.push(`${training.label}: ${training.per_step} (${training.definition})`);
      if (hidden > 0 && bars.length) notes.push(`${plural(bars.length, "step")} of ${(hidden + bars.length).toLocaleString("en")} are in the picture; choose a step to see older ones`);
      if (store.stepsLeftOut) notes.push("earlier steps are asked for");
      else if (earlier > 0) notes.push(`${store.cellName(bars[0].cell)}: ${earlier === 1 ? "step 0 is" : `steps 0 to ${earlier - 1} are`} not here`);
      return notes;
    },
    state() {
      const { bars, rects, high, buckets, byRank, chosen } = picture;
      return { bars, rects, high, buckets, byRank, detail, labels, chosen: chosen >= 0 ? { cell: bars[chosen].cell, step: bars[chosen].step } : null };
    },
    onKey(event) {
      const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
      if (event.key === "End" || event.key === "Escape") store.choose({ step: null });
      else if (by !== undefined) store.chooseNeighbour(by);
      else return false;
      return true;
    },
    destroy() {
      surface.destroy();
      key?.destroy();
    },
  };

  /** @param {"buckets"|"ranks"} value */
  function showDetail(value) {
    detail = value;
    env.redraw(true);
  }

  /** @param {number} value */
  function showRank(value) {
    bucketRank = value;
    env.redraw(true);
  }
}

// ---- in words

/** @param {Bar} bar @param {number} before the number of step 0 @param {string} cell its name */
function barLines(bar, before, cell) {
  const parts = PARTS.map((part, at) => ({ part, value: bar.parts[at] })).filter(({ value }) => value > 0);
  return [
    `step ${bar.step + before}, ${cell}: ${duration(bar.duration)}`,
    ...parts.reverse().map(({ part, value }) => `${WORDS[part]}  ${duration(value)}  (${percent(value / bar.duration)})`),
  ];
}

/** @param {import("../data/steps.js").Bucket} one */
function bucketLines(one) {
  const names = one.names.length > 6 ? [...one.names.slice(0, 5), `and ${one.names.length - 5} more`] : one.names;
  return [
    `bucket ${one.bucket}, ${bytes(one.nbytes)}${one.isOpen ? ", under way" : `: ${duration(one.end - one.start)}`}`,
    Number.isNaN(one.wait) ? "its wait is not known" : `waited ${duration(one.arrived - one.start)}`,
    `hidden behind compute ${duration(one.hidden - one.arrived)}`,
    `exposed ${duration(one.end - one.hidden)}`,
    ...names,
  ];
}

/** @param {import("../data/tables.js").StepEntry[]} steps @param {number} cell */
function firstStep(steps, cell) {
  return steps.find((one) => one.cell === cell)?.step ?? 0;
}

/**
 * Short summary of the last step: `step 119: 49 ms, 4 % exposed communication`.
 * @param {Bar} bar
 * @param {number} before the number of step 0
 */
function inShort(bar, before) {
  const told = ["exposed", "waiting"].map((part) => ({ words: WORDS[part], share: bar.parts[PARTS.indexOf(part)] / bar.duration }));
  return [`step ${bar.step + before}: ${duration(bar.duration)}`, ...told.filter(({ share }) => share > 0.005).map(({ words, share }) => `${percent(share)} ${words}`)].join(", ");
}
