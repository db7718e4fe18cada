/**
 * The panel of the gradients' synchronisation: what each step's time went into, as stacked bars; below, for the step
 * that is chosen, the same by rank or the buckets over the backward, with the names of their parameters.
 */

import { niceStep, plainTicks, timeTicks } from "../drawing/axis.js";
import { Surface, font } from "../drawing/canvas.js";
import { hatch, textOn } from "../drawing/colours.js";
import { bytes, duration, percent, plural, ranksInWords } from "../parts/format.js";
import { WORDS, legend } from "../parts/legend.js";
import { barOf, bucketsOf, cutLabels, highest, newBar, stack } from "../data/steps.js";
import { PARTS } from "../data/tables.js";

const RIGHT = 14;
const ROW = 20;
const MOST_ROWS = 16;

/**
 * @param {HTMLElement} el
 * @param {import("../data/store.js").Store} store
 * @param {any} env
 */
export function syncPanel(el, store, env) {
  const { compact } = env;
  const key = compact ? null : legend(el, env);
  const surface = new Surface(el);
  const { pen, canvas } = surface;
  const tip = el.ownerDocument.createElement("div");
  tip.className = "ddpm-tip";
  tip.hidden = true;
  tip.setAttribute("aria-hidden", "true");
  el.append(tip);
  let detail = "buckets";
  let bucketRank = /** @type {number|null} */ (null);
  let picture = { bars: /** @type {any[]} */ ([]), rects: /** @type {any[]} */ ([]), high: 1, hidden: 0, chosen: -1, frame: /** @type {any} */ (null), buckets: /** @type {any} */ (null), byRank: /** @type {any[]} */ ([]) };
  let size = [600, 420];

  const left = compact ? 40 : 58;
  const barsHeight = () => (compact ? surface.height - 34 : 170);

  function draw() {
    surface.resize(size[0], size[1], env.dpr);
    surface.clear();
    measure();
    drawBars();
    if (!compact) {
      if (detail === "ranks") drawRanks();
      else drawBuckets();
    }
    key?.update(detail);
  }

  /** What is drawn, in numbers. */
  function measure() {
    const steps = store.steps();
    const width = surface.width - left - RIGHT;
    const pitch = steps.length ? Math.min(34, Math.max(compact ? 5 : 9, width / steps.length)) : 12;
    const fit = Math.max(1, Math.floor(width / pitch));
    const entry = store.chosenStep();
    const at = entry ? steps.indexOf(entry) : -1;
    // The newest steps, unless the chosen one is older than these: then it is in their middle.
    let from = Math.max(0, steps.length - fit);
    if (store.choice.step && at >= 0 && at < from) from = Math.max(0, at - Math.floor(fit / 2));
    const shown = steps.slice(from, from + fit);
    const bars = shown.map((one) => barOf(store, one, store.choice.ranks)).filter((one) => one !== null);
    const high = highest(bars.map((bar) => bar.duration));
    const top = compact ? 8 : 34;
    const frame = { left, top, width, height: barsHeight() - (compact ? 0 : 10), high, pitch, gap: pitch > 14 ? 3 : pitch > 6 ? 1.5 : 0.5 };
    const chosen = entry ? bars.findIndex((bar) => bar.cell === entry.cell && bar.step === entry.step) : -1;
    const rank = bucketRank !== null && store.shownRanks().includes(bucketRank) ? bucketRank : (store.shownRanks()[0] ?? 0);
    const byRank = entry && detail === "ranks" ? store.shownRanks().map((one) => newBar(store, entry, new Set([one]))).filter((one) => one !== null) : [];
    picture = { bars, rects: stack(bars, frame), high, hidden: steps.length - bars.length, chosen, frame, buckets: entry && !compact ? { rank, ...bucketsOf(store, entry, rank) } : null, byRank };
  }

  function drawBars() {
    const { colours } = env;
    const { frame, bars, chosen, rects, high } = picture;
    const bottom = frame.top + frame.height;
    if (!bars.length) {
      surface.write("No step has ended yet.", surface.width / 2, bottom / 2 + 8, { colour: colours.soft, align: "center", size: 13 });
      return;
    }
    if (!compact) {
      const ranks = picture.bars[bars.length - 1].ranks;
      surface.write(`What each step took, ${ranks.length > 1 ? `mean of ${plural(ranks.length, "rank")}` : ranksInWords(ranks)}`, 0, 10, { colour: colours.ink, size: 12.5, weight: "600", width: surface.width - 10 });
    }
    const { unit, ticks } = timeTicks(0, high, compact ? 3 : 4);
    for (const { value, label } of ticks) {
      const y = bottom - (frame.height * value) / high;
      surface.rule(left, y, surface.width - RIGHT, y, value ? colours.grid : colours.line);
      surface.write(value ? label : `0 ${unit}`, left - 7, y, { colour: colours.soft, size: 11, align: "right" });
    }
    if (chosen >= 0 && !compact) {
      pen.fillStyle = colours.hover;
      pen.fillRect(left + chosen * frame.pitch, frame.top - 4, frame.pitch, frame.height + 4);
    }
    for (const rect of rects) fill(rect.part, rect.x, rect.y, rect.width, rect.height);
    if (chosen >= 0 && !compact) {
      const x = left + (chosen + 0.5) * frame.pitch;
      pen.fillStyle = colours.ink;
      pen.beginPath();
      pen.moveTo(x - 4, bottom + 6);
      pen.lineTo(x + 4, bottom + 6);
      pen.lineTo(x, bottom + 1);
      pen.fill();
    }
    drawStepNumbers(bottom);
    drawCut();
  }

  /** @param {number} bottom */
  function drawStepNumbers(bottom) {
    const { colours } = env;
    const { bars, frame } = picture;
    const first = bars[0].step;
    const last = bars[bars.length - 1].step;
    const isOneCell = bars[0].cell === bars[bars.length - 1].cell;
    const wanted = isOneCell ? new Set(plainTicks(first, last, Math.max(2, (bars.length * frame.pitch) / 70)).map(({ value }) => value)) : null;
    const every = Math.max(1, niceStep(70, frame.pitch));
    // Where two cells begin next to each other the newer one is named.
    const second = bars.findIndex((bar, at) => at > 0 && bars[at - 1].cell !== bar.cell);
    let free = second > 0 && second * frame.pitch < 100 ? left + second * frame.pitch - 20 : -Infinity;
    bars.forEach((bar, at) => {
      const isNewCell = at === 0 || bars[at - 1].cell !== bar.cell;
      if (isNewCell && at) surface.rule(left + at * frame.pitch, frame.top - 6, left + at * frame.pitch, bottom + 6, colours.line);
      if (wanted ? !wanted.has(bar.step) && bars.length > 1 : !isNewCell && bar.step % every) return;
      const x = left + (at + 0.5) * frame.pitch;
      const words = wanted ? String(bar.step) : isNewCell ? `cell ${bar.cell}: ${bar.step}` : String(bar.step);
      pen.font = font(11);
      const half = pen.measureText(words).width / 2 + 6;
      if (x - half < free) return;
      free = x + half;
      surface.write(words, Math.max(x, left + half - 6), bottom + 15, { colour: colours.soft, size: 11, align: "center" });
    });
    surface.write("step", left - 7, bottom + 15, { colour: colours.soft, size: 11, align: "right" });
  }

  /** Bars that go beyond the axis are cut, and say how long they are. */
  function drawCut() {
    if (compact) return;
    const { bars, frame } = picture;
    pen.font = font(11);
    for (const { words, x } of cutLabels(bars, frame, surface.width, (text) => pen.measureText(text).width)) {
      surface.write(words, x, frame.top + 4, { colour: env.colours.ink, size: 11 });
    }
  }

  /** @param {string} part @param {number} x @param {number} y @param {number} width @param {number} height */
  function fill(part, x, y, width, height) {
    const fills = env.colours.fill;
    if (part === "overlapped") {
      pen.fillStyle = pattern();
      pen.fillRect(x, y, width, height);
      return;
    }
    pen.fillStyle = fills[part];
    pen.fillRect(x, y, width, height);
    if (part === "waiting" && height > 1.5 && width > 1.5) {
      pen.strokeStyle = fills.waitingLine;
      pen.lineWidth = 1;
      pen.setLineDash([]);
      pen.strokeRect(x + 0.5, y + 0.5, width - 1, height - 1);
    }
  }

  let cached = { key: "", value: /** @type {CanvasPattern|null} */ (null) };
  function pattern() {
    const { fill: fills, theme } = env.colours;
    const now = `${theme} ${env.dpr}`;
    if (cached.key !== now || !cached.value) {
      const value = hatch(pen, fills.overlapped, fills.overlappedStripe, env.dpr);
      value.setTransform(new DOMMatrix().scale(1 / env.dpr));
      cached = { key: now, value };
    }
    return /** @type {CanvasPattern} */ (cached.value);
  }

  // ---- below: the chosen step

  const belowTop = () => picture.frame.top + picture.frame.height + 44;

  function drawBuckets() {
    const { colours } = env;
    const { buckets: found } = picture;
    const entry = store.chosenStep();
    if (!entry || !found) return;
    const top = belowTop();
    const where = `Step ${entry.step}, cell ${entry.cell}, rank ${found.rank}`;
    if (!found.buckets.length) {
      surface.write(`${where}: no bucket is known`, 0, top, { colour: colours.ink, size: 12.5, weight: "600" });
      surface.write(noBuckets(), 0, top + 20, { colour: colours.soft, size: 12, width: surface.width });
      return;
    }
    const total = found.buckets.reduce((/** @type {number} */ sum, /** @type {any} */ one) => sum + one.nbytes, 0);
    surface.write(`${where}: ${plural(found.buckets.length, "bucket")} of gradients (${bytes(total)}) over the backward`, 0, top, { colour: colours.ink, size: 12.5, weight: "600", width: surface.width });
    const gutter = Math.min(270, Math.max(150, surface.width * 0.34));
    const from = gutter + 10;
    const width = surface.width - RIGHT - from;
    const span = Math.max(1e-6, found.to - found.from);
    const rows = found.buckets.length + 1;
    const row = Math.min(ROW, Math.max(3, (surface.height - top - 44) / rows));
    const first = top + 18;
    const x = /** @param {number} time */ (time) => from + (width * (time - found.from)) / span;
    const bottom = first + rows * row;
    const { unit, ticks } = timeTicks(0, span, Math.max(2, width / 80));
    for (const { value, label } of ticks) {
      const at = from + (width * value) / span;
      surface.rule(at, first, at, bottom, colours.grid);
      surface.write(value ? label : `0 ${unit}`, at, bottom + 11, { colour: colours.soft, size: 11, align: value ? "center" : "left" });
    }
    surface.write("since the backward began", from - 10, bottom + 11, { colour: colours.soft, size: 11, align: "right" });
    const thick = Math.max(2, row - Math.min(6, row * 0.25));
    const bar = /** @param {string} part @param {number} at @param {number} t0 @param {number} t1 */ (part, at, t0, t1) => {
      if (t1 > t0) fill(part, x(t0), first + at * row + (row - thick) / 2, Math.max(0.75, x(t1) - x(t0)), thick);
    };
    const backward = found.backward ?? [found.from, found.lastIssue];
    bar("backward", 0, backward[0], Math.min(backward[1], Math.max(backward[0], found.lastIssue)));
    // After the last bucket was issued the backward only waits for them: outlined.
    bar("waiting", 0, Math.max(found.lastIssue, backward[0]), backward[1]);
    if (row >= 9) surface.write("backward", gutter, first + row / 2, { colour: colours.ink, size: 11.5, align: "right" });
    const every = Math.ceil(11 / row);
    found.buckets.forEach((/** @type {any} */ one, /** @type {number} */ index) => {
      const at = index + 1;
      bar("waiting", at, one.start, one.arrived);
      bar("communication", at, one.arrived, one.hidden);
      bar("exposed", at, one.hidden, one.end);
      if (one.isOpen) surface.write("…", x(one.end) + 3, first + (at + 0.5) * row - 2, { colour: colours.ink, size: 12 });
      if (index % every === 0) {
        const y = first + (at + 0.5) * row;
        const right = `${bytes(one.nbytes)}  #${one.bucket}`;
        surface.write(right, gutter, y, { colour: colours.soft, size: 11, align: "right" });
        const taken = pen.measureText(right).width + 10;
        surface.write(namesOf(one.names), gutter - taken, y, { colour: colours.ink, size: 11.5, align: "right", width: gutter - taken });
      }
    });
    if (found.lastIssue < found.to) {
      const at = x(found.lastIssue);
      pen.setLineDash([3, 3]);
      pen.strokeStyle = colours.ink;
      pen.lineWidth = 1;
      pen.beginPath();
      pen.moveTo(at, first - 3);
      pen.lineTo(at, bottom);
      pen.stroke();
      pen.setLineDash([]);
    }
    picture.buckets.geometry = { first, row, from, width, span };
  }

  function noBuckets() {
    const every = store.notes.units_shown_of;
    if (every > 1) return `One of ${every} steps is sent with its buckets; choose a neighbouring step.`;
    return "It synchronises none, or it has gone from memory. A model in DistributedDataParallel has buckets.";
  }

  function drawRanks() {
    const { colours } = env;
    const entry = store.chosenStep();
    const { byRank } = picture;
    if (!entry || !byRank.length) return;
    const top = belowTop();
    const longest = Math.max(...byRank.map((bar) => bar.duration));
    surface.write(`Step ${entry.step}, cell ${entry.cell}: what each rank's time went into`, 0, top, { colour: colours.ink, size: 12.5, weight: "600" });
    const first = top + 18;
    const from = left;
    const width = surface.width - 78 - from;
    const row = Math.min(ROW, Math.max(3, (surface.height - first - 26) / byRank.length));
    const bottom = first + row * byRank.length;
    const { unit, ticks } = timeTicks(0, longest, Math.max(2, width / 90));
    for (const { value, label } of ticks) {
      const x = from + (width * value) / longest;
      surface.rule(x, first, x, bottom, colours.grid);
      surface.write(value ? label : `0 ${unit}`, x, bottom + 11, { colour: colours.soft, size: 11, align: "center" });
    }
    const every = Math.ceil(11 / row);
    byRank.forEach((bar, at) => {
      let base = 0;
      bar.parts.forEach((/** @type {number} */ part, /** @type {number} */ index) => {
        const x0 = from + (width * base) / longest;
        const pixels = (width * part) / longest;
        const y = first + at * row + (row > 8 ? 1.5 : 0.25);
        fill(PARTS[index], x0, y, pixels, row - (row > 8 ? 3 : 0.5));
        if (pixels > 52 && row > 14 && PARTS[index] !== "overlapped") {
          surface.write(duration(part), x0 + pixels / 2, first + (at + 0.5) * row, { colour: textOn(colours.fill[PARTS[index]]), size: 11, align: "center" });
        }
        base += part;
      });
      if (at % every) return;
      surface.write(row > 12 ? `rank ${bar.ranks[0]}` : String(bar.ranks[0]), from - 7, first + (at + 0.5) * row, { colour: colours.ink, size: 11, align: "right" });
      surface.write(duration(bar.duration), from + (width * base) / longest + 7, first + (at + 0.5) * row, { colour: colours.soft, size: 11 });
    });
  }

  // ---- pointing

  /** @param {PointerEvent} event */
  function onMove(event) {
    const { frame, bars } = picture;
    const found = hit(event);
    if (!found || !frame) {
      tip.hidden = true;
      return;
    }
    const bar = found.bucket ? null : bars[found.bar];
    const lines = bar
      ? [`step ${bar.step}, cell ${bar.cell}: ${duration(bar.duration)}`, ...PARTS.map((part, at) => [part, bar.parts[at]]).filter(([, part]) => part > 0).reverse().map(([part, value]) => `${WORDS[part]}  ${duration(value)}  (${percent(value / bar.duration)})`)]
      : bucketLines(found.bucket);
    tip.replaceChildren(...lines.map((words, at) => Object.assign(el.ownerDocument.createElement(at ? "div" : "strong"), { textContent: words })));
    tip.hidden = false;
    const box = el.getBoundingClientRect();
    const x = event.clientX - box.left;
    tip.style.left = `${Math.max(0, Math.min(x + 14, box.width - tip.offsetWidth - 4))}px`;
    tip.style.top = `${event.clientY - box.top + 16}px`;
  }

  /** @param {any} one */
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

  /** @param {MouseEvent} event */
  function hit(event) {
    const { frame, bars, buckets } = picture;
    if (!frame) return null;
    const box = canvas.getBoundingClientRect();
    const x = event.clientX - box.left;
    const y = event.clientY - box.top;
    const bar = Math.floor((x - left) / frame.pitch);
    if (y < frame.top + frame.height + 22) return bars[bar] && x >= left ? { bar, bucket: null } : null;
    const geometry = detail === "buckets" ? buckets?.geometry : null;
    const bucket = geometry ? buckets.buckets[Math.floor((y - geometry.first) / geometry.row) - 1] : null;
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
    draw,
    /** @param {number} width @param {number} height */
    resize(width, height) {
      size = [width, height - (key?.height() ?? 0)];
    },
    height() {
      if (!store.steps().length) return 250;
      const rows = detail === "ranks" ? store.shownRanks().length : (picture.buckets?.buckets.length ?? 4) + 1;
      return 34 + 170 + 44 + 60 + 26 + ROW * Math.min(Math.max(rows, 4), MOST_ROWS);
    },
    /** @param {string} value "buckets" or "ranks" */
    showDetail(value) {
      detail = value;
      env.redraw(true);
    },
    /** @param {number} value */
    showRank(value) {
      bucketRank = value;
      env.redraw(true);
    },
    describe() {
      const { bars, chosen } = picture;
      const bar = bars[chosen] ?? bars[bars.length - 1];
      if (!bar) return "No step has ended yet.";
      const told = PARTS.map((part, at) => ({ part, value: bar.parts[at] })).filter(({ value }) => value > 0.005 * bar.duration);
      return `Step ${bar.step} of cell ${bar.cell} took ${duration(bar.duration)}, mean of ${plural(bar.ranks.length, "rank")}: ${told.map(({ part, value }) => `${WORDS[part]} ${duration(value)}, ${percent(value / bar.duration)}`).join("; ")}.`;
    },
    table() {
      const rows = picture.bars.slice(-20).reverse().map((bar) => [`cell ${bar.cell}, step ${bar.step}`, duration(bar.duration), ...bar.parts.map(duration)]);
      return { head: ["step", "in all", ...PARTS.map((part) => WORDS[part])], rows };
    },
    notes() {
      const { hidden, bars } = picture;
      if (compact) return bars.length ? [inShort(bars[bars.length - 1])] : [];
      return hidden > 0 && bars.length ? [`${plural(bars.length, "step")} of ${(hidden + bars.length).toLocaleString("en")} are in the picture; choose a step to see older ones`] : [];
    },
    state() {
      const { bars, rects, high, buckets, byRank, chosen } = picture;
      return { bars, rects, high, buckets, byRank, detail, chosen: chosen >= 0 ? { cell: bars[chosen].cell, step: bars[chosen].step } : null };
    },
    /** @param {KeyboardEvent} event */
    onKey(event) {
      const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
      if (event.key === "End" || event.key === "Escape") store.choose({ step: null });
      else if (by !== undefined) chooseNeighbour(store, by);
      else return false;
      return true;
    },
    destroy() {
      surface.destroy();
      key?.destroy();
    },
  };
}

/** Choose the step that is so many further. @param {import("../data/store.js").Store} store @param {number} by */
export function chooseNeighbour(store, by) {
  const steps = store.steps();
  const entry = store.chosenStep();
  if (!entry) return;
  const to = Math.min(Math.max(steps.indexOf(entry) + by, 0), steps.length - 1);
  store.choose({ step: { cell: steps[to].cell, step: steps[to].step } });
}

/** The last step in few words: `step 119: 49 ms, 4 % exposed communication`. @param {any} bar */
function inShort(bar) {
  const told = ["exposed", "waiting"].map((part) => [WORDS[part], bar.parts[PARTS.indexOf(part)] / bar.duration]);
  return [`step ${bar.step}: ${duration(bar.duration)}`, ...told.filter(([, share]) => share > 0.005).map(([words, share]) => `${percent(share)} ${words}`)].join(", ");
}

/** `layers.3.weight, 2 more`. @param {string[]} names */
function namesOf(names) {
  return names.length > 1 ? `${names[0]}, ${names.length - 1} more` : (names[0] ?? "");
}
