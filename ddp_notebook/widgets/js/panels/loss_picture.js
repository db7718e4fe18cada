/**
 * The content of the metrics panel as numbers: the lines of one run, or of several runs in one picture. Pure functions.
 */

import { number, plural, ranksInWords } from "../data/format.js";
import { rankStyle } from "../drawing/colours.js";
import { MOST_LINES, alike, lines, range, smooth } from "../drawing/curves.js";

// points per rank, for few and for many ranks; with more points, a software rasteriser does not reach 30 Hz
const POINTS = { few: 1000, many: 250 };
const MOST_LABELS = 8;

/** @typedef {{key: string, label: string, values: (number|null|undefined)[], colour: string, dash: number[], width: number, alpha: number, ranks: number[], broken: string, unit?: string}} Line */
/**
 * @typedef {Omit<Line, "values"> & {course: import("../drawing/curves.js").Course}} Raw  a line before neighbouring steps are binned
 */
/** @typedef {{colours: import("../drawing/colours.js").Palette, everyRank: boolean, compact?: boolean}} Options */
/** @typedef {{run: import("../data/courses.js").RunOfCells, name: string, points: Map<number, import("../data/courses.js").Points>}} Shown */

/**
 * @param {import("../data/store.js").Store} store
 * @param {Options} options
 */
export function lossPicture(store, { colours, everyRank, compact = false }) {
  const name = store.chosenMetric();
  const runs = store.shownRuns(name).map((run) => ({ run, name: store.runName(run), points: store.pointsOf(run) }));
  const { smoothing, log } = store.choice;
  const isBand = runs.length === 1 && runs[0].points.size > MOST_LINES && !everyRank;
  const options = { colours, everyRank, compact };
  const found = isBand ? bandOf(store, runs[0], options) : linesOf(store, runs, options);
  const notes = [...found.notes];
  for (const line of found.lines) if (line.broken && line.label) notes.push(`× ${line.label}: ${line.broken}`);
  if (smoothing > 0) notes.push(`smoothed: exponential average, weight ${smoothing.toFixed(2)}`);
  const counts = countsOf(runs, found.drawn);
  if (counts.drawn < counts.logged) notes.push(drawnOf(counts, smoothing > 0, isBand));
  if (log) {
    const dropped = found.lines.reduce((sum, line) => sum + line.values.filter((value) => value !== null && value !== undefined && value <= 0).length, 0);
    if (dropped) notes.push(`${plural(dropped, "point")} at or below 0 cannot be drawn on a logarithmic axis`);
  }
  const { x, ends, lines: drawn, band, each } = found;
  const ranks = [...new Set(runs.flatMap(({ points }) => [...points.keys()]))];
  const unit = [...new Set(runs.map(({ run }) => run.unit))].join(" or ") || "step";
  return { name, unit, runs, isBand, x, ends, lines: drawn, band, notes, ranks, each, ...counts, most: smoothing > 0 ? Infinity : POINTS.few * Math.max(1, ranks.length) };
}

/**
 * The range of many ranks, their median, and the ranks furthest from it.
 * @param {import("../data/store.js").Store} store
 * @param {Shown} shown
 * @param {Options} options
 */
function bandOf(store, { run, points }, { colours, compact }) {
  const ranks = [...points.keys()];
  const found = range([...points.values()], compact ? 125 : POINTS.many, store.choice.smoothing);
  /** @type {Line[]} */
  const drawn = [{ key: "median", label: "median", values: found.median, colour: colours.ink, dash: [], width: 2, alpha: 1, ranks, broken: "" }];
  // Three ranks out of 64 often have similar colours, so they get three distinct colours here.
  found.worst.sort((a, b) => a - b).forEach((at, index) => {
    const line = { ...lineOf(colours, [ranks[at]], 1), values: found.means[at] };
    drawn.push({ ...line, colour: colours.ranks[index + 1], dash: [], broken: brokenOf(points.get(ranks[at]), run.unit) });
  });
  const notes = [`band: lowest to highest of ${ranks.length} ranks${compact ? "" : "; lines: the median and the three ranks furthest from it"}`];
  if (found.each > 1 && !compact) notes.push(`a point of a line is the mean of ${found.each} ${run.unit}s`);
  const held = [...points.values()].reduce((sum, { steps }) => sum + steps.length, 0);
  return { x: found.x, ends: found.ends, lines: drawn, band: { low: found.low, high: found.high }, notes, drawn: held, each: found.each };
}

/** A line for each rank of each run. @param {import("../data/store.js").Store} store @param {Shown[]} runs @param {Options} options */
function linesOf(store, runs, { colours, compact }) {
  const { smoothing } = store.choice;
  const notes = [];
  const groups = runs.map(({ points }) => alike(points));
  const count = groups.reduce((sum, one) => sum + one.length, 0);
  const many = count > MOST_LINES;
  const isMedian = runs.length > 1 && many;
  const raw = runs.flatMap((shown, at) => (isMedian ? mediansOf(colours, shown, at) : runLines(store, runs, groups, at, colours)));
  if (isMedian) notes.push("of each run: the median of its ranks, and dashed their lowest and their highest");
  const smoothed = raw.map((line) => (smoothing > 0 ? { ...line.course, values: smooth(line.course.values, smoothing) } : line.course));
  const found = lines(smoothed, compact || many ? POINTS.many : POINTS.few);
  /** @type {Line[]} */
  const drawn = [];
  if (smoothing > 0 && count <= 4 && found.each === 1) {
    const logged = lines(raw.map(({ course }) => course), POINTS.few);
    raw.forEach((line, at) => drawn.push({ ...line, values: logged.lines[at], width: 1, key: `raw ${line.key}`, label: "", alpha: 0.35 }));
    notes.push("pale: as logged");
  }
  let points = 0;
  raw.forEach((line, at) => {
    const values = found.lines[at];
    points += line.ranks.length * values.reduce((/** @type {number} */ sum, value) => sum + Number(value !== undefined), 0);
    drawn.push({ ...line, values, width: many && !isMedian ? 0.6 : line.width, label: many && !isMedian ? "" : line.label });
  });
  if (isMedian) points = runs.reduce((sum, one) => sum + heldOf(one), 0);
  return { x: found.x, ends: found.ends, lines: drawn, band: null, notes, drawn: points, each: found.each };
}

/** @param {Shown} shown */
function heldOf({ points }) {
  return [...points.values()].reduce((sum, { steps }) => sum + steps.length, 0);
}

/**
 * The lines of one run. The ranks of a single run have different colours. If there are several runs, each run has one
 * colour.
 * @param {import("../data/store.js").Store} store
 * @param {Shown[]} runs
 * @param {ReturnType<typeof alike>[]} groups of each run
 * @param {number} at
 * @param {import("../drawing/colours.js").Palette} colours
 * @returns {Raw[]}
 *
 */
function runLines(store, runs, groups, at, colours) {
  const isLabelled = groups.reduce((sum, one) => sum + one.length, 0) <= MOST_LABELS;
  return groups[at].map(({ ranks, course }, place) => {
    const line = { ...lineOf(colours, ranks, 1.6), course, broken: brokenOf(course, runs[at].run.unit), unit: runs[at].run.unit };
    const label = ranks.length > 1 && ranks.length === store.worldSize ? "all ranks" : ranksInWords(ranks);
    if (runs.length === 1) return { ...line, label };
    const name = groups[at].length === 1 ? runs[at].name : isLabelled ? `${runs[at].name} ${label}` : place ? "" : runs[at].name;
    return { ...line, ...ofRun(colours, at), key: `${runs[at].name} rank ${ranks[0]}`, label: name };
  });
}

/** @param {import("../drawing/colours.js").Palette} colours @param {Shown} shown @param {number} at @returns {Raw[]} */
function mediansOf(colours, { run, name, points }, at) {
  const { x, low, high, median } = range([...points.values()], POINTS.many);
  const one = /** @param {string} what @param {(number|null)[]} values @param {Partial<Raw>} more */ (what, values, more) => ({
    ...lineOf(colours, [...points.keys()], 1.6),
    ...ofRun(colours, at),
    unit: run.unit,
    key: `${name} ${what}`,
    label: "",
    course: { steps: Float64Array.from(x), values: Float64Array.from(values, (value) => value ?? NaN) },
    ...more,
  });
  return [one("median", median, { label: name }), one("lowest", low, { dash: [2, 3], width: 0.8 }), one("highest", high, { dash: [2, 3], width: 0.8 })];
}

/** @param {import("../drawing/colours.js").Palette} colours @param {number} at */
function ofRun(colours, at) {
  return rankStyle(colours, at);
}

/**
 * The number of points that the shown ranks have logged, and the number of drawn points.
 * @param {Shown[]} runs
 * @param {number} drawn drawn points of those in this view
 *
 */
function countsOf(runs, drawn) {
  let logged = 0;
  for (const { run, points } of runs) {
    const held = [...points.values()].reduce((sum, { steps }) => sum + steps.length, 0);
    // The kernel counts all ranks together. Assume the same share for the shown ranks.
    logged += run.held ? (held * run.logged) / run.held : points.size ? 0 : run.logged;
  }
  return { logged: Math.round(logged), drawn };
}

/** `1 of 12 points drawn`. @param {{logged: number, drawn: number}} counts @param {boolean} isSmoothed @param {boolean} isBand */
function drawnOf({ logged, drawn }, isSmoothed, isBand) {
  const ratio = logged / drawn;
  const words = drawn === 0 ? `none of ${plural(logged, "point")} drawn` : ratio < 2 ? `${drawn.toLocaleString("en")} of ${plural(logged, "point")} drawn` : `1 of ${Number(ratio.toPrecision(2)).toLocaleString("en")} points drawn`;
  const means = isSmoothed || isBand ? "; averages and medians are of these" : "";
  return `${words}: the lowest and the highest of neighbours${means}`;
}

/** @param {import("../drawing/colours.js").Palette} colours @param {number[]} ranks @param {number} width */
function lineOf(colours, ranks, width) {
  const { colour, dash } = rankStyle(colours, ranks[0]);
  return { key: `rank ${ranks[0]}`, label: ranksInWords(ranks), colour, dash, width, alpha: 1, ranks, broken: "" };
}

/** The last value of a line and its index. @param {Line} line */
export function endOf(line) {
  let at = line.values.length - 1;
  while (at >= 0 && (line.values[at] === null || line.values[at] === undefined)) at--;
  return { at, value: at < 0 ? NaN : /** @type {number} */ (line.values[at]) };
}

/**
 * The value of a line at the pointer, or its last one. Its step is returned if the line ends before the others.
 * @param {Line} line
 * @param {{x: number[], ends: number[]}} picture
 * @param {number|null|undefined} pointed index of the pointer; null without a pointer
 * @returns {{value: number|null|undefined, step: number|null}} value: null if it is not finite
 *
 */
export function lastValue({ values }, { x, ends }, pointed) {
  if (pointed !== null && pointed !== undefined) {
    const isBetween = values[pointed] === undefined && pointed > 0;
    return { value: values[isBetween ? pointed - 1 : pointed], step: null };
  }
  let at = values.length - 1;
  while (at > 0 && values[at] === undefined) at--;
  const isEarlier = at >= 0 && ends[at] < x[Math.max(0, x.length - 2)];
  return { value: values[at], step: isEarlier ? ends[at] : null };
}

/**
 * The first value of a course that is not finite, and its step.
 * @param {import("../drawing/curves.js").Course|undefined} course
 * @param {string} unit
 */
function brokenOf(course, unit) {
  const at = course ? course.values.findIndex((value) => !Number.isFinite(value)) : -1;
  return at < 0 || !course ? "" : `${number(course.values[at])} from ${unit} ${course.steps[at]}`;
}
