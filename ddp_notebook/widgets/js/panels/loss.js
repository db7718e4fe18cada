/**
 * The panel of the metrics: a line per rank, or for more than 16 ranks the range, the median and the three ranks
 * furthest from it. It shows the newest run, or the chosen runs. Values are drawn as logged; a note appears if points
 * are missing or smoothed.
 */

import uPlot from "uplot";
import { logTicks, placeInside, plainTicks, spread } from "../drawing/axis.js";
import { FONT, font } from "../drawing/canvas.js";
import { metricControls, runPicker } from "../parts/controls.js";
import { number, plural } from "../data/format.js";
import { endOf, lastValue, lossPicture } from "./loss_picture.js";
import { MissingPoints } from "./loss_missing.js";
import { show } from "../parts/dom.js";

const LABEL_PX = 14;
const NONE = "No metric has been logged. Write log(loss=loss) in the cell.";

/** @typedef {import("./loss_picture.js").Line} Line */

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
  const none = document.createElement("p"); // replaces a chart without lines
  none.className = "ddpm-none";
  none.hidden = true;
  el.append(chart, none);
  if (!env.compact) el.append(readout);
  /** @type {uPlot|null} */
  let plot = null;
  let shape = "";
  let picture = lossPicture(store, { colours: env.colours, everyRank: false, compact: env.compact });
  const missing = new MissingPoints(store, env);
  let asked = ""; // result of the request for missing points
  let everyRank = false;
  /** @type {{label: string, words: string, x: number}[]} */
  let labels = []; // labels at the ends of lines, as drawn
  let width = 600;
  let height = 260;

  function draw() {
    picture = lossPicture(store, { colours: env.colours, everyRank, compact: env.compact });
    const { log } = store.choice;
    const wanted = [picture.isBand, picture.unit, log, env.colours.theme, env.colours.paper, env.dpr, picture.lines.map(({ key, width: stroke }) => `${key}/${stroke}`)].join();
    const drawable = /** @param {Line["values"]} values */ (values) => (log ? values.map((value) => (typeof value === "number" && value <= 0 ? null : value)) : values);
    const courses = [...(picture.band ? [picture.band.high, picture.band.low] : []), ...picture.lines.map((line) => line.values)];
    /** @type {uPlot.AlignedData} */
    const shown = [picture.x, ...courses.map(drawable)];
    if (!plot || wanted !== shape) {
      plot?.destroy();
      shape = wanted;
      plot = new uPlot(options(), shown, chart);
    } else plot.setData(shown);
    const isNone = !picture.lines.length;
    show(chart, !isNone);
    show(none, isNone);
    none.textContent = isNone ? NONE : "";
    asked = missing.look(picture.runs.map(({ run }) => run), picture.most);
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
          label: compact ? undefined : picture.unit,
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

  /** The label at the end of a line. @param {Line} line @param {number} value */
  function endWords(line, value) {
    const short = env.compact ? line.label.replace(/^ranks? /, "") : line.label;
    return `${short}  ${line.broken ? line.broken.split(" ")[0] : number(value)}`;
  }

  /** The width of the longest label in pixels. It depends on the values. */
  function endsWidth() {
    const lengths = picture.lines.filter((line) => line.label).map((line) => endWords(line, endOf(line).value).length);
    return Math.max(env.compact ? 84 : 112, 20 + 6.6 * Math.max(0, ...lengths));
  }

  /** Draw the labels of the lines at their ends, without overlap. @param {uPlot} plotted */
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
    const box = { left: bbox.left, right: bbox.left + bbox.width, top: bbox.top, bottom: bbox.top + bbox.height };
    const left = box.right + 14 * dpr;
    ctx.save();
    ctx.font = `${11.5 * dpr}px ${FONT}`;
    ctx.textBaseline = "middle";
    ctx.textAlign = "left";
    // The label of a shorter run is placed where the run ends.
    const isShort = /** @param {{x: number}} end */ ({ x }) => picture.runs.length > 1 && x < box.right - 14 * dpr;
    const short = ends.filter(isShort);
    const inside = placeInside(
      short.map(({ line, value, x, y }) => ({ x: x + 7 * dpr, y, width: ctx.measureText(endWords(line, value)).width })),
      (x0, x1) => rangesBetween(plotted, x0, x1),
      LABEL_PX * dpr,
      box,
    );
    short.forEach(({ line, value, x, y }, at) => {
      ctx.strokeStyle = ctx.fillStyle = line.colour;
      ctx.fillText(endWords(line, value), inside[at].x, inside[at].y);
      ctx.lineWidth = dpr;
      if (line.broken) cross(ctx, x, y, 4 * dpr);
      if (Math.abs(inside[at].y - y) < (LABEL_PX / 2) * dpr) return;
      ctx.globalAlpha = 0.55;
      ctx.beginPath();
      ctx.moveTo(x + 2 * dpr, y);
      ctx.lineTo(inside[at].x - 2 * dpr, inside[at].y);
      ctx.stroke();
      ctx.globalAlpha = 1;
    });
    ctx.lineWidth = dpr;
    const long = ends.filter((end) => !isShort(end));
    const places = spread(long.map(({ y }) => y), LABEL_PX * dpr, box.top, box.bottom);
    labels = ends.map((end) => ({ label: end.line.label, words: endWords(end.line, end.value), x: (isShort(end) ? inside[short.indexOf(end)].x : left) / dpr }));
    long.forEach(({ line, value, x, y }, at) => {
      ctx.strokeStyle = ctx.fillStyle = line.colour;
      ctx.globalAlpha = 0.55;
      ctx.setLineDash([]);
      ctx.beginPath();
      // Start at the end of the line, or at the edge if that is further left: this line must not look like values.
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

  /**
   * The lowest and the highest position of each line between two positions, in pixels.
   * @param {uPlot} plotted
   * @param {number} x0
   * @param {number} x1
   */
  function rangesBetween(plotted, x0, x1) {
    const { x } = picture;
    const [from, to] = [plotted.posToVal(x0, "x", true), plotted.posToVal(x1, "x", true)];
    const room = 2 * devicePixelRatio;
    return picture.lines.flatMap(({ values }) => {
      const places = [];
      for (let at = 0; at < x.length; at++) {
        const value = values[at];
        // Include the neighbours, because the line continues to them.
        if ((x[at + 1] ?? x[at]) < from || (x[at - 1] ?? x[at]) > to || value === null || value === undefined) continue;
        if (!store.choice.log || value > 0) places.push(plotted.valToPos(value, "y", true));
      }
      return places.length ? [/** @type {[number, number]} */ ([Math.min(...places) - room, Math.max(...places) + room])] : [];
    });
  }

  /** The limits of an axis of the chart. @param {"x"|"y"} axis */
  function range(axis) {
    return [plot?.scales[axis].min ?? 0, plot?.scales[axis].max ?? 0];
  }

  /** Values at the pointer, or the newest values. */
  function read() {
    if (env.compact) return;
    const { x, ends, unit } = picture;
    const pointed = plot?.cursor.idx;
    const at = pointed ?? x.length - 1;
    if (at < 0 || !picture.lines.length) {
      readout.textContent = "";
      return;
    }
    const parts = picture.lines
      .filter((line) => line.label)
      .map((line) => ({ label: line.label, ...lastValue(line, picture, pointed), colour: line.colour, broken: line.broken, unit: line.unit ?? unit }));
    const edge = { colour: "", broken: "", step: null, unit };
    if (picture.band) parts.push({ ...edge, label: "lowest", value: picture.band.low[at] }, { ...edge, label: "highest", value: picture.band.high[at] });
    readout.replaceChildren(
      span("ddpm-step", `${pointed === null || pointed === undefined ? "last " : ""}${ends[at] > x[at] ? `${unit}s ${x[at]}–${ends[at]}` : `${unit} ${x[at]}`}`),
      ...parts.map(({ label, value, step, colour, broken, unit: own }) => {
        const item = span("", `${label} `);
        const strong = span("ddpm-number", value === null || value === undefined ? (broken && value === null ? "no number" : "–") : number(value));
        if (colour) item.style.setProperty("--mark", colour);
        item.className = colour ? "ddpm-item ddpm-marked" : "ddpm-item";
        item.append(strong, step === null ? "" : ` (${own} ${step})`);
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
    controls: env.compact ? [] : [runPicker(document, store), metricControls(document, store, showEveryRank)],
    draw,
    resize(newWidth, newHeight) {
      width = Math.max(160, Math.floor(newWidth));
      height = Math.max(80, Math.floor(newHeight - (env.compact ? 0 : 24)));
      plot?.setSize({ width, height });
    },
    height: () => 330,
    describe() {
      const { name, unit, x, ranks, runs } = picture;
      if (!name || !x.length) return NONE;
      const ends = picture.lines.filter((line) => line.label).map((line) => `${line.label} ${line.broken || number(lastOf(line.values))}`);
      const first = picture.lines.find((line) => line.label);
      const from = first ? first.values.find((value) => value !== null && value !== undefined) : undefined;
      return `${name} of ${plural(ranks.length, "rank")} in ${runs.map((one) => one.name).join(" and ")}, ${unit}s ${x[0]} to ${x[x.length - 1]}, from ${number(from ?? NaN)}; at the end ${ends.join(", ")}.`;
    },
    table() {
      const head = ["run", "rank", "points", "first", "last"];
      const rows = picture.runs.flatMap(({ name, points }) => [...points].map(([rank, { steps, values }]) => [name, String(rank), String(steps.length), number(values[0]), number(values[values.length - 1])]));
      return { head, rows };
    },
    isEmpty: () => !store.metricNames().length,
    notes: () => [...picture.notes, ...(asked ? [asked] : [])],
    drawn: () => ({ metric: picture.name }),
    state() {
      // The data that the chart has drawn, and not the data it should draw.
      const [x = [], ...courses] = plot?.data ?? [];
      const behind = picture.band ? 2 : 0;
      const named = Object.fromEntries(picture.lines.map(({ key, ranks, label, colour }, at) => [key, { ranks, label, colour, values: [...(courses[at + behind] ?? [])] }]));
      const band = picture.band ? { high: [...(courses[0] ?? [])], low: [...(courses[1] ?? [])] } : null;
      const { name, unit, ends, each, drawn, logged, isBand, notes, runs } = picture;
      const chart = plot ? { box: plot.bbox, x: range("x"), y: range("y") } : null;
      return { metric: name, unit, labels, readout: readout.textContent, chart, x: [...x], ends, each, drawn, logged, lines: named, band, isBand, log: store.choice.log, notes, asked, runs: runs.map((one) => one.name) };
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
    destroy() {
      missing.destroy();
      plot?.destroy();
    },
  };
}

/** A single point is not drawn at the edge of its chart. @type {uPlot.Range.Function} */
function xRange(_, low, high) {
  if (low === null || low === undefined) return [0, 1];
  return low === high ? [low - 1, high + 1] : [low, high];
}

/** @type {uPlot.Range.Function} */
function yRange(_, low, high) {
  if (low === null || low === undefined || !Number.isFinite(high - low)) return [0, 1];
  const room = high > low ? 0.06 * (high - low) : Math.max(0.5, 0.05 * Math.abs(high));
  // The axis of a loss that approaches 0 starts at 0.
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

/** @param {(number|null|undefined)[]} values */
function lastOf(values) {
  for (let at = values.length - 1; at >= 0; at--) if (values[at] !== null && values[at] !== undefined) return Number(values[at]);
  return NaN;
}

