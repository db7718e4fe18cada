/**
 * Draws the gradient synchronisation on its canvas: the bars of the steps, and below them the buckets of the chosen
 * step over its backward pass, or the time of each rank.
 */

import { bytes, duration, plural, ranksInWords } from "../data/format.js";
import { PARTS } from "../data/tables.js";
import { timeTicks } from "./axis.js";
import { font } from "./canvas.js";
import { hatch, textOn } from "./colours.js";
import { cutLabels, stepLabels } from "./stepbars.js";

/** @typedef {import("../data/steps.js").Bar} Bar */
/** @typedef {import("../data/steps.js").Bucket} Bucket */
/** @typedef {ReturnType<typeof import("../data/steps.js").bucketsOf>} Buckets */

export const RIGHT = 14; // px at the right edge
export const ROW = 20; // px, maximum height of a bucket or a rank

/** A canvas, and the fill styles for the parts of a step. */
export class Brush {
  /** @param {import("./canvas.js").Surface} surface @param {{colours: import("./colours.js").Palette, dpr: number}} env */
  constructor(surface, env) {
    this.surface = surface;
    this.env = env;
    this.patternKey = "";
    /** @type {CanvasPattern|null} */
    this.pattern = null;
  }

  /** @param {string} part @param {number} x @param {number} y @param {number} width @param {number} height */
  fill(part, x, y, width, height) {
    const { pen } = this.surface;
    const fills = this.env.colours.fill;
    if (part === "overlapped") {
      pen.fillStyle = this.#hatched();
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

  #hatched() {
    const { colours, dpr } = this.env;
    const key = `${colours.theme} ${dpr}`;
    if (this.patternKey !== key || !this.pattern) {
      this.pattern = hatch(this.surface.pen, colours.fill.overlapped, colours.fill.overlappedStripe, dpr);
      this.pattern.setTransform(new DOMMatrix().scale(1 / dpr));
      this.patternKey = key;
    }
    return this.pattern;
  }

  /** @param {string} words @param {number} y @param {number} [width] the most */
  title(words, y, width) {
    this.surface.write(words, 0, y, { colour: this.env.colours.ink, size: 12.5, weight: "600", width });
  }
}

/**
 * @param {Brush} brush
 * @param {{bars: Bar[], rects: import("./stepbars.js").Rectangle[], chosen: number, before: number, frame: import("./stepbars.js").Frame}} picture chosen: index of a bar; before: the number of step 0
 * @param {boolean} compact
 * @param {(cell: number) => string} cellName
 * @returns {import("./stepbars.js").Label[]} the labels below the bars
 */
export function drawBars(brush, { bars, rects, chosen, before, frame }, compact, cellName) {
  const { surface } = brush;
  const { colours } = brush.env;
  const { pen } = surface;
  const { left, high } = frame;
  const bottom = frame.top + frame.height;
  if (!bars.length) {
    surface.write("No step has ended yet.", surface.width / 2, bottom / 2 + 8, { colour: colours.soft, align: "center", size: 13 });
    return [];
  }
  if (!compact) {
    const { ranks } = bars[bars.length - 1];
    brush.title(`What each step took, ${ranks.length > 1 ? `mean of ${plural(ranks.length, "rank")}` : ranksInWords(ranks)}`, 10, surface.width - 10);
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
  for (const rect of rects) brush.fill(rect.part, rect.x, rect.y, rect.width, rect.height);
  if (chosen >= 0 && !compact) {
    const x = left + (chosen + 0.5) * frame.pitch;
    pen.fillStyle = colours.ink;
    pen.beginPath();
    pen.moveTo(x - 4, bottom + 6);
    pen.lineTo(x + 4, bottom + 6);
    pen.lineTo(x, bottom + 1);
    pen.fill();
  }
  const numbered = bars.map(({ cell, step }) => ({ cell, step: step + before }));
  const labels = drawStepNumbers(brush, numbered, frame, cellName);
  // Bars beyond the axis are cut and labelled with their length.
  pen.font = font(11);
  for (const { words, x } of cutLabels(bars, frame, surface.width, (text) => pen.measureText(text).width)) {
    surface.write(words, x, frame.top - 7, { colour: colours.ink, size: 11 });
  }
  return labels;
}

/** @param {Brush} brush @param {{cell: number, step: number}[]} bars @param {import("./stepbars.js").Frame} frame @param {(cell: number) => string} cellName */
function drawStepNumbers({ surface, env: { colours } }, bars, frame, cellName) {
  const { left, top, height, pitch } = frame;
  const bottom = top + height;
  bars.forEach((bar, at) => {
    if (at && bars[at - 1].cell !== bar.cell) surface.rule(left + at * pitch, top - 6, left + at * pitch, bottom + 6, colours.line);
  });
  surface.pen.font = font(11);
  const labels = stepLabels(bars, frame, surface.width, cellName, (words) => surface.pen.measureText(words).width);
  for (const { words, x } of labels) surface.write(words, x, bottom + 15, { colour: colours.soft, size: 11, align: "center" });
  surface.write("step", left - 7, bottom + 15, { colour: colours.soft, size: 11, align: "right" });
  return labels;
}

/**
 * @param {Brush} brush
 * @param {Buckets} found
 * @param {string} where the step and the rank, as text
 * @param {number} top
 * @returns {{first: number, row: number}} start of the rows, and their height; the first row is the backward pass
 */
export function drawBuckets(brush, found, where, top) {
  const { surface } = brush;
  const { colours } = brush.env;
  const { pen } = surface;
  const total = found.buckets.reduce((sum, one) => sum + one.nbytes, 0);
  brush.title(`${where}: ${plural(found.buckets.length, "bucket")} of gradients (${bytes(total)}) over the backward`, top, surface.width);
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
    if (t1 > t0) brush.fill(part, x(t0), first + at * row + (row - thick) / 2, Math.max(0.75, x(t1) - x(t0)), thick);
  };
  const backward = found.backward ?? [found.from, found.lastIssue];
  bar("backward", 0, backward[0], Math.min(backward[1], Math.max(backward[0], found.lastIssue)));
  // After the last bucket was issued, the backward pass only waits for them: draw an outline.
  bar("waiting", 0, Math.max(found.lastIssue, backward[0]), backward[1]);
  if (row >= 9) surface.write("backward", gutter, first + row / 2, { colour: colours.ink, size: 11.5, align: "right" });
  const every = Math.ceil(11 / row);
  const known = cutNames(found.buckets.map((one) => one.names[0] ?? ""));
  found.buckets.forEach((one, index) => {
    const at = index + 1;
    bar("waiting", at, one.start, one.arrived);
    bar("hidden", at, one.arrived, one.hidden);
    bar("exposed", at, one.hidden, one.end);
    if (one.isOpen) surface.write("…", x(one.end) + 3, first + (at + 0.5) * row - 2, { colour: colours.ink, size: 12 });
    if (index % every === 0) {
      const y = first + (at + 0.5) * row;
      const right = `${bytes(one.nbytes)}  #${one.bucket}`;
      surface.write(right, gutter, y, { colour: colours.soft, size: 11, align: "right" });
      const taken = pen.measureText(right).width + 10;
      pen.font = font(11.5);
      const name = namesIn(one.names, known, gutter - taken, (words) => pen.measureText(words).width);
      surface.write(name, gutter - taken, y, { colour: colours.ink, size: 11.5, align: "right", width: gutter - taken });
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
  return { first, row };
}

/**
 * The names of a bucket in limited space: `blocks.3.norm1.weight, 11 more`, `blocks.3.norm1.weight +11`, `blocks.3…
 * +11` or `…3…`. Uses the longest part of the first name that fits and that no other bucket has.
 * @param {string[]} names
 * @param {Map<string, number>} known of `cutNames`
 * @param {number} room pixels
 * @param {(words: string) => number} measure
 */
export function namesIn(names, known, room, measure) {
  const [name = "", ...others] = names;
  const more = others.length ? [`, ${others.length} more`, ` +${others.length}`] : [""];
  const whole = more.map((end) => name + end);
  const fits = /** @param {string} words */ (words) => measure(words) <= room;
  const found = whole.find(fits);
  if (found !== undefined) return found;
  const cut = cutsOf(name).sort((a, b) => b.words.length - a.words.length);
  const own = cut.filter(({ key }) => known.get(key) === 1);
  const words = (own.length ? own : cut).flatMap((one) => [one.words + more[more.length - 1], one.words]);
  return words.find(fits) ?? words[words.length - 1] ?? whole[whole.length - 1];
}

/** Count the names that share each dotted part at the same position. @param {string[]} names */
export function cutNames(names) {
  /** @type {Map<string, number>} */
  const known = new Map();
  for (const { key } of names.flatMap(cutsOf)) known.set(key, (known.get(key) ?? 0) + 1);
  return known;
}

/** Parts of a name, with an ellipsis for the removed text. @param {string} name */
function cutsOf(name) {
  const parts = name.split(".");
  const ends = parts.flatMap((_, from) => parts.map((_, to) => ({ from, to: to + 1 }))).filter(({ from, to }) => from < to);
  return ends
    .filter(({ from, to }) => to - from < parts.length)
    .map(({ from, to }) => {
      const kept = parts.slice(from, to).join(".");
      return { key: `${from} ${kept}`, words: `${from ? "\u2026" : ""}${kept}${to < parts.length ? "\u2026" : ""}` };
    });
}

/**
 * How the time of each rank was spent.
 * @param {Brush} brush
 * @param {Bar[]} byRank
 * @param {string} where of which step
 * @param {number} left
 * @param {number} top
 */
export function drawRanks(brush, byRank, where, left, top) {
  const { surface } = brush;
  const { colours } = brush.env;
  const longest = Math.max(...byRank.map((bar) => bar.duration));
  brush.title(`${where}: what each rank's time went into`, top, surface.width);
  const first = top + 18;
  const width = surface.width - 78 - left;
  const row = Math.min(ROW, Math.max(3, (surface.height - first - 26) / byRank.length));
  const bottom = first + row * byRank.length;
  const { unit, ticks } = timeTicks(0, longest, Math.max(2, width / 90));
  for (const { value, label } of ticks) {
    const x = left + (width * value) / longest;
    surface.rule(x, first, x, bottom, colours.grid);
    surface.write(value ? label : `0 ${unit}`, x, bottom + 11, { colour: colours.soft, size: 11, align: "center" });
  }
  const every = Math.ceil(11 / row);
  byRank.forEach((bar, at) => {
    let base = 0;
    bar.parts.forEach((part, index) => {
      const name = PARTS[index];
      const x0 = left + (width * base) / longest;
      const pixels = (width * part) / longest;
      const y = first + at * row + (row > 8 ? 1.5 : 0.25);
      brush.fill(name, x0, y, pixels, row - (row > 8 ? 3 : 0.5));
      if (pixels > 52 && row > 14 && name !== "overlapped") {
        surface.write(duration(part), x0 + pixels / 2, first + (at + 0.5) * row, { colour: textOn(colours.fill[name]), size: 11, align: "center" });
      }
      base += part;
    });
    if (at % every) return;
    surface.write(row > 12 ? `rank ${bar.ranks[0]}` : String(bar.ranks[0]), left - 7, first + (at + 0.5) * row, { colour: colours.ink, size: 11, align: "right" });
    surface.write(duration(bar.duration), left + (width * base) / longest + 7, first + (at + 0.5) * row, { colour: colours.soft, size: 11 });
  });
}
