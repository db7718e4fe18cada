/**
 * The panel of the metrics: a line per rank, or for more than 16 ranks the range of all, the median and the three ranks
 * furthest from it. Values are drawn as logged; where a point stands for several steps, or is smoothed, the panel says so.
 */

import uPlot from "uplot";
import { logTicks, plainTicks, spread } from "../drawing/axis.js";
import { FONT, font } from "../drawing/canvas.js";
import { rankStyle } from "../drawing/colours.js";
import { MOST_LINES, alike, lines, range, smooth } from "../drawing/curves.js";
import { metricControls } from "../parts/controls.js";
import { number, plural, ranksInWords } from "../data/format.js";

const POINTS = { few: 1000, many: 250 }; // a rank; of many more than these a software rasteriser does not draw at 30 Hz
const LABEL_PX = 14;

/** @typedef {{key: string, label: string, values: (number|null|undefined)[], colour: string, dash: number[], width: number, alpha: number, ranks: number[], broken: string}} Line */

/**
 * What is drawn, as numbers.
 * @param {import("../data/store.js").Store} store
 * @param {{colours: import("../drawing/colours.js").Palette, everyRank: boolean, compact?: boolean}} options
 */
function lossPicture(store, { colours, everyRank, compact = false }) {
  const name = store.chosenMetric();
  const { series, cell, thinned } = store.metric(name);
  const { smoothing, log } = store.choice;
  const isBand = series.size > MOST_LINES && !everyRank;
  /** @type {Line[]} */
  const drawn = [];
  const notes = [];
  let x = /** @type {number[]} */ ([]);
  let ends = x;
  let band = null;
  if (isBand) {
    const ranks = [...series.keys()];
    const found = range([...series.values()], compact ? 125 : POINTS.many, smoothing);
    ({ x, ends } = found);
    band = { low: found.low, high: found.high };
    drawn.push({ key: "median", label: "median", values: found.median, colour: colours.ink, dash: [], width: 2, alpha: 1, ranks, broken: "" });
    // Three ranks out of 64 often have similar colours of their own: here they get three that are far apart.
    found.worst.sort((a, b) => a - b).forEach((at, index) => {
      const line = lineOf(colours, [ranks[at]], found.means[at], 1);
      drawn.push({ ...line, colour: colours.ranks[index + 1], dash: [], broken: brokenOf(series.get(ranks[at])) });
    });
    notes.push(`band: lowest to highest of ${ranks.length} ranks${compact ? "" : "; lines: the median and the three ranks furthest from it"}`);
    if (found.each > 1 && !compact) notes.push(`a point is the mean of ${found.each} steps`);
  } else {
    const groups = alike(series);
    const many = groups.length > MOST_LINES;
    const courses = groups.map(({ course }) => (smoothing > 0 ? { steps: course.steps, values: smooth(course.values, smoothing) } : course));
    const found = lines(courses, compact || many ? POINTS.many : POINTS.few);
    ({ x, ends } = found);
    if (smoothing > 0 && groups.length <= 4 && found.each === 1) {
      const raw = lines(groups.map(({ course }) => course), POINTS.few);
      groups.forEach(({ ranks }, at) => drawn.push({ ...lineOf(colours, ranks, raw.lines[at], 1), key: `raw ${ranks[0]}`, label: "", alpha: 0.35 }));
      notes.push("pale: as logged");
    }
    groups.forEach(({ ranks, course }, at) => {
      drawn.push({ ...lineOf(colours, ranks, found.lines[at], many ? 0.6 : 1.6), broken: brokenOf(course), label: many ? "" : ranksLabel(ranks, store.worldSize) });
    });
    if (found.each > 1) notes.push(`of every ${found.each} steps the lowest and the highest are drawn`);
  }
  for (const line of drawn) if (line.broken && line.label) notes.push(`× ${line.label}: ${line.broken}`);
  if (smoothing > 0) notes.push(`smoothed: exponential average, weight ${smoothing.toFixed(2)}`);
  if (thinned) notes.push("of older steps only the lowest and the highest of neighbours are kept");
  if (log) {
    const dropped = drawn.reduce((sum, line) => sum + line.values.filter((value) => value !== null && value !== undefined && value <= 0).length, 0);
    if (dropped) notes.push(`${plural(dropped, "point")} at or below 0 cannot be drawn on a logarithmic axis`);
  }
  return { name, cell, isBand, x, ends, lines: drawn, band, notes, ranks: [...series.keys()] };
}

/** @param {import("../drawing/colours.js").Palette} colours @param {number[]} ranks @param {Line["values"]} values @param {number} width */
function lineOf(colours, ranks, values, width) {
  const { colour, dash } = rankStyle(colours, ranks[0]);
  return { key: `rank ${ranks[0]}`, label: ranksInWords(ranks), values, colour, dash, width, alpha: 1, ranks, broken: "" };
}

/** @param {number[]} ranks @param {number} worldSize */
function ranksLabel(ranks, worldSize) {
  return ranks.length > 1 && ranks.length === worldSize ? "all ranks" : ranksInWords(ranks);
}

/** The last value of a line, and where. @param {Line} line */
function endOf(line) {
  let at = line.values.length - 1;
  while (at >= 0 && (line.values[at] === null || line.values[at] === undefined)) at--;
  return { at, value: at < 0 ? NaN : /** @type {number} */ (line.values[at]) };
}

/** The first value of a course that is no number, and where. @param {import("../drawing/curves.js").Course|undefined} course */
function brokenOf(course) {
  const at = course ? course.values.findIndex((value) => !Number.isFinite(value)) : -1;
  return at < 0 || !course ? "" : `${number(course.values[at])} from step ${course.steps[at]}`;
}

/**
 * @param {HTMLElement} el
 * @param {import("../data/store.js").Store} store
 * @param {import("./index.js").Env} env
 * @returns {import("./index.js").Panel}
 */
export function lossPanel(el, store, env) {
  const document = el.ownerDocument;
  const chart = document.createElement("div");
  chart.className = "ddpm-chart";
  const readout = document.createElement("div");
  readout.className = "ddpm-readout";
  if (!env.compact) el.append(chart, readout);
  else el.append(chart);
  /** @type {uPlot|null} */
  let plot = null;
  let shape = "";
  let picture = lossPicture(store, { colours: env.colours, everyRank: false, compact: env.compact });
  let everyRank = false;
  let width = 600;
  let height = 260;

  function draw() {
    picture = lossPicture(store, { colours: env.colours, everyRank, compact: env.compact });
    const { log } = store.choice;
    const wanted = [picture.isBand, log, env.colours.theme, env.colours.paper, env.dpr, picture.lines.map(({ key, width: stroke }) => `${key}/${stroke}`)].join();
    const drawable = /** @param {Line["values"]} values */ (values) => (log ? values.map((value) => (typeof value === "number" && value <= 0 ? null : value)) : values);
    const courses = [...(picture.band ? [picture.band.high, picture.band.low] : []), ...picture.lines.map((line) => line.values)];
    /** @type {uPlot.AlignedData} */
    const shown = [picture.x, ...courses.map(drawable)];
    if (!plot || wanted !== shape) {
      plot?.destroy();
      shape = wanted;
      plot = new uPlot(options(), shown, chart);
    } else plot.setData(shown);
    read();
  }

  /** @returns {uPlot.Options} */
  function options() {
    const { colours, compact } = env;
    const axis = { stroke: colours.soft, font: font(11), grid: { stroke: colours.grid, width: 1 }, ticks: { show: false } };
    /** @type {uPlot.Series[]} */
    const series = [{}];
    if (picture.band) {
      const edge = { stroke: "transparent", width: 0, points: { show: false }, spanGaps: false };
      series.push(edge, edge);
    }
    const isShort = () => picture.x.length <= 40;
    for (const line of picture.lines) {
      series.push({
        stroke: line.colour,
        width: line.width,
        dash: line.dash,
        alpha: line.alpha,
        spanGaps: false,
        points: { show: (_, at) => isShort() && at <= 8 + series.length - picture.lines.length && line.width > 1, size: 4, fill: line.colour },
      });
    }
    return {
      width,
      height,
      padding: [10, endsWidth, 0, 0],
      legend: { show: false },
      cursor: { show: !compact, drag: { x: false, y: false }, points: { show: false }, y: false },
      scales: { x: { time: false, range: xRange }, y: { distr: store.choice.log ? 3 : 1, range: store.choice.log ? logRange : yRange } },
      axes: [
        {
          ...axis,
          size: 22,
          gap: 5,
          label: compact ? undefined : "step",
          labelFont: font(11),
          labelSize: 15,
          labelGap: 0,
          splits: (_, __, low, high) => plainTicks(low, high, Math.max(2, width / 90)).filter(({ value }) => Number.isInteger(value)).map(({ value }) => value),
          values: (_, values) => values.map((value) => value.toLocaleString("en").replace(/,/g, "\u202f")),
        },
        {
          ...axis,
          size: (_, values) => 14 + 6.4 * Math.max(3, ...(values ?? []).map((value) => value?.length ?? 0)),
          gap: 6,
          splits: (_, __, low, high) => yTicks(low, high).map(({ value }) => value),
          values: (plotted, values) => {
            const labels = new Map(yTicks(plotted.scales.y.min ?? 0, plotted.scales.y.max ?? 1).map(({ value, label }) => [value, label]));
            return values.map((value) => labels.get(value) ?? "");
          },
        },
      ],
      series,
      bands: picture.band ? [{ series: [1, 2], fill: colours.theme === "dark" ? "#ffffff26" : "#0000001f" }] : [],
      hooks: { draw: [drawEnds], setCursor: [read] },
    };
  }

  /** @param {number} low @param {number} high */
  function yTicks(low, high) {
    return store.choice.log ? logTicks(low, high) : plainTicks(low, high, Math.max(2, height / 50));
  }

  /** What stands at the end of a line. @param {Line} line @param {number} value */
  function endWords(line, value) {
    const short = env.compact ? line.label.replace(/^ranks? /, "") : line.label;
    return `${short}  ${line.broken ? line.broken.split(" ")[0] : number(value)}`;
  }

  /** The room that the longest of these takes, in pixels. It grows with the values. */
  function endsWidth() {
    const lengths = picture.lines.filter((line) => line.label).map((line) => endWords(line, endOf(line).value).length);
    return Math.max(env.compact ? 84 : 112, 20 + 6.6 * Math.max(0, ...lengths));
  }

  /** The names of the lines at their ends, apart from each other. @param {uPlot} plotted */
  function drawEnds(plotted) {
    const { ctx, bbox } = plotted;
    const dpr = devicePixelRatio;
    const ends = picture.lines
      .filter((line) => line.label)
      .map((line) => {
        const { at, value } = endOf(line);
        const isDrawn = Number.isFinite(value) && !(store.choice.log && value <= 0);
        return { line, value, x: isDrawn ? plotted.valToPos(picture.x[at], "x", true) : bbox.left + bbox.width, y: isDrawn ? plotted.valToPos(value, "y", true) : bbox.top + bbox.height };
      })
      .sort((a, b) => a.y - b.y);
    const places = spread(ends.map(({ y }) => y), LABEL_PX * dpr, bbox.top, bbox.top + bbox.height);
    const left = bbox.left + bbox.width + 14 * dpr;
    ctx.save();
    ctx.font = `${11.5 * dpr}px ${FONT}`;
    ctx.textBaseline = "middle";
    ctx.textAlign = "left";
    ctx.lineWidth = dpr;
    ends.forEach(({ line, value, x, y }, at) => {
      ctx.strokeStyle = ctx.fillStyle = line.colour;
      ctx.globalAlpha = 0.55;
      ctx.setLineDash([]);
      ctx.beginPath();
      // From the end of the line, or from the edge where that is further left: this line must not look like values.
      ctx.moveTo(Math.max(x + 2 * dpr, left - 14 * dpr), y);
      ctx.lineTo(left - 9 * dpr, y);
      ctx.lineTo(left - 3 * dpr, places[at]);
      ctx.stroke();
      ctx.globalAlpha = 1;
      if (line.broken) cross(ctx, x, y, 4 * dpr);
      ctx.fillText(endWords(line, value), left, places[at]);
    });
    ctx.restore();
  }

  /** Values at the pointer, or the newest. */
  function read() {
    if (env.compact) return;
    const { x, ends } = picture;
    const pointed = plot?.cursor.idx;
    const at = pointed ?? x.length - 1;
    if (at < 0 || !picture.lines.length) {
      readout.textContent = "";
      return;
    }
    const parts = picture.lines
      .filter((line) => line.label)
      .map(({ label, values, colour, broken }) => ({ label, value: valueNear(values, at), colour, broken }));
    const edge = { colour: "", broken: "" };
    if (picture.band) parts.push({ ...edge, label: "lowest", value: picture.band.low[at] }, { ...edge, label: "highest", value: picture.band.high[at] });
    readout.replaceChildren(
      span("ddpm-step", `${pointed === null || pointed === undefined ? "last " : ""}${ends[at] > x[at] ? `steps ${x[at]}–${ends[at]}` : `step ${x[at]}`}`),
      ...parts.map(({ label, value, colour, broken }) => {
        const item = span("", `${label} `);
        const strong = span("ddpm-number", value === null || value === undefined ? (broken && value === null ? "no number" : "–") : number(value));
        if (colour) item.style.setProperty("--mark", colour);
        item.className = colour ? "ddpm-item ddpm-marked" : "ddpm-item";
        item.append(strong);
        return item;
      }),
    );
  }

  /** @param {string} className @param {string} words */
  function span(className, words) {
    const found = document.createElement("span");
    found.className = className;
    found.textContent = words;
    return found;
  }

  /** @param {boolean} value */
  function showEveryRank(value) {
    everyRank = value;
    env.redraw();
  }

  return {
    controls: env.compact ? [] : [metricControls(document, store, showEveryRank)],
    draw,
    resize(newWidth, newHeight) {
      width = Math.max(160, Math.floor(newWidth));
      height = Math.max(80, Math.floor(newHeight - (env.compact ? 0 : 24)));
      plot?.setSize({ width, height });
    },
    height: () => 330,
    describe() {
      const { name, x, ranks } = picture;
      if (!name || !x.length) return "No metric has been logged yet. Write log(loss=loss) in the cell.";
      const ends = picture.lines.filter((line) => line.label).map((line) => `${line.label} ${line.broken || number(lastOf(line.values))}`);
      const first = picture.lines.find((line) => line.label);
      const from = first ? first.values.find((value) => value !== null && value !== undefined) : undefined;
      return `${name} of ${plural(ranks.length, "rank")}, steps ${x[0]} to ${x[x.length - 1]}, from ${number(from ?? NaN)}; at the end ${ends.join(", ")}.`;
    },
    table() {
      const head = ["rank", "steps", "first", "last"];
      const { series } = store.metric(picture.name);
      const rows = [...series].map(([rank, { steps, values }]) => [String(rank), String(steps.length), number(values[0]), number(values[values.length - 1])]);
      return { head, rows };
    },
    notes: () => picture.notes,
    drawn: () => ({ metric: picture.name }),
    state() {
      const named = Object.fromEntries(picture.lines.map(({ key, values, ranks }) => [key, { ranks, values: [...values] }]));
      return { metric: picture.name, x: [...picture.x], lines: named, band: picture.band, isBand: picture.isBand, log: store.choice.log, notes: picture.notes };
    },
    onKey(event) {
      if (!plot || !picture.x.length) return false;
      const at = plot.cursor.idx ?? picture.x.length - 1;
      const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: picture.x.length - 1 }[event.key];
      if (event.key === "Escape") plot.setCursor({ left: -10, top: -10 });
      else if (to === undefined) return false;
      else plot.setCursor({ left: plot.valToPos(picture.x[Math.min(Math.max(to, 0), picture.x.length - 1)], "x"), top: height / 2 });
      return true;
    },
    destroy: () => plot?.destroy(),
  };
}

/** A point alone is not at the edge of its chart. @type {uPlot.Range.Function} */
function xRange(_, low, high) {
  if (low === null || low === undefined) return [0, 1];
  return low === high ? [low - 1, high + 1] : [low, high];
}

/** @type {uPlot.Range.Function} */
function yRange(_, low, high) {
  if (low === null || low === undefined || !Number.isFinite(high - low)) return [0, 1];
  const room = high > low ? 0.06 * (high - low) : Math.max(0.5, 0.05 * Math.abs(high));
  // A loss that comes near to 0 is drawn above 0.
  return [low >= 0 && low < 0.35 * high ? 0 : low - room, high + room];
}

/** @type {uPlot.Range.Function} */
function logRange(_, low, high) {
  if (!(low > 0) || !Number.isFinite(high)) return [0.1, 1];
  const room = high > low ? (high / low) ** 0.06 : 2;
  return [low / room, high * room];
}

/** @param {CanvasRenderingContext2D} pen @param {number} x @param {number} y @param {number} size */
function cross(pen, x, y, size) {
  pen.beginPath();
  pen.moveTo(x - size, y - size);
  pen.lineTo(x + size, y + size);
  pen.moveTo(x - size, y + size);
  pen.lineTo(x + size, y - size);
  pen.stroke();
}

/** @param {(number|null|undefined)[]} values @param {number} at */
function valueNear(values, at) {
  return values[at] === undefined && at > 0 ? values[at - 1] : values[at];
}

/** @param {(number|null|undefined)[]} values */
function lastOf(values) {
  for (let at = values.length - 1; at >= 0; at--) if (values[at] !== null && values[at] !== undefined) return Number(values[at]);
  return NaN;
}

