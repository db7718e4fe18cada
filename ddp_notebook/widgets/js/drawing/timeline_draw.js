/**
 * Draws the timeline on its canvas, from the rectangles and positions of a scene.
 *
 * @typedef {object} Scene
 * @property {CanvasRenderingContext2D} pen
 * @property {import("./colours.js").Palette} colours
 * @property {number} dpr
 * @property {number} width
 * @property {number} height
 * @property {{t0: number, t1: number}} view
 * @property {number} left start of the time axis, to the right of the rank names
 * @property {number} top start of the rows, below the axis
 * @property {number} scroll pixels of the rows that are scrolled out at the top
 * @property {number[]} ranks
 * @property {ReturnType<typeof import("./bars.js").layoutRows>} layout
 * @property {import("./bars.js").Rectangles} rectangles
 * @property {import("../data/stepmarks.js").StepMark[]} steps
 * @property {import("../data/stepmarks.js").StepMark[]} missing
 * @property {string} missingWords
 * @property {{bars: import("./links.js").Bar[], isChosen: boolean}[]} ribbons
 * @property {import("./links.js").Arrow[]} arrows of remote calls
 * @property {(lane: import("../data/lanes.js").Lane, at: number) => string[]} wordsOf labels for a bar, the longest first
 * @property {number} hoverRow
 * @property {number} pointerX
 */

import { HEADING, MEANINGS, UNDER_WAY, WAITING } from "./bars.js";
import { arrow } from "./canvas.js";
import { channels, hatch, textOn } from "./colours.js";
import { ribbon } from "./links.js";
import { abgr, paint } from "./pixels.js";
import { axis, seconds } from "./timewindow.js";

const FONT = "system-ui, sans-serif";
const MOST_DRAWN = 2500; // if there are more rectangles, they are painted as pixels
// Waiting is drawn first, so that it hides no overlapping bar.
const ORDER = [WAITING, ...MEANINGS.keys()].filter((meaning, at) => meaning !== WAITING || !at);
const widths = new Map(); // widths of texts at 10 px

/** The colour of a meaning. @param {import("./colours.js").Palette} colours @param {number} meaning */
export function colourOf(colours, meaning) {
  const name = MEANINGS[meaning];
  return colours.fill[name] ?? colours.fill.communication;
}

/** @param {Scene} scene */
export function drawScene(scene) {
  const { pen, dpr, width, height, left, top } = scene;
  pen.setTransform(dpr, 0, 0, dpr, 0, 0);
  pen.clearRect(0, 0, width, height);
  drawAxis(scene);
  pen.save();
  pen.beginPath();
  pen.rect(left, top, width - left, height - top);
  pen.clip();
  drawRows(scene);
  drawMissing(scene);
  drawRectangles(scene);
  drawRibbons(scene);
  drawWords(scene);
  drawArrows(scene);
  nameMissing(scene);
  pen.restore();
  drawNames(scene);
  drawPointer(scene);
}

/** The x coordinate of a time. @param {Scene} scene @param {number} time */
export function xOf({ view, left, width }, time) {
  return left + ((time - view.t0) / (view.t1 - view.t0)) * (width - left);
}

/** @param {Scene} scene */
function drawAxis(scene) {
  const { pen, colours, view, left, width, height, dpr, steps } = scene;
  const { baseLabel, marks } = axis(view, width - left);
  pen.font = `10px ${FONT}`;
  pen.textBaseline = "middle";
  pen.fillStyle = colours.soft;
  if (baseLabel) {
    pen.textAlign = "left";
    pen.fillText(baseLabel, 2, 8);
  }
  const bottom = Math.min(height, scene.top + scene.layout.total - scene.scroll);
  pen.textAlign = "center";
  for (const { time, label } of marks) {
    const x = xOf(scene, time);
    pen.fillStyle = colours.grid;
    pen.fillRect(Math.round(x * dpr) / dpr, 15, 1 / dpr, bottom - 15);
    const half = widthOf(pen, label) / 2;
    if (x - half < (baseLabel ? widthOf(pen, baseLabel) + 8 : left - 30) || x + half > width) continue;
    pen.fillStyle = colours.soft;
    pen.fillText(label, x, 8);
  }
  // Steps have a separate strip. Names are drawn if they fit.
  pen.fillStyle = colours.line;
  let before = -Infinity;
  for (const step of steps) {
    const x0 = Math.max(xOf(scene, step.start), left), x1 = Math.min(xOf(scene, step.end), width);
    if (x0 - before < 2) continue;
    before = x0;
    pen.fillRect(x0, 17, 1, 7);
    const label = [`step ${step.step}`, `${step.step}`].find((text) => widthOf(pen, text) < x1 - x0 - 6);
    if (!label) continue;
    pen.fillStyle = colours.soft;
    pen.fillText(label, (x0 + x1) / 2, 21);
    pen.fillStyle = colours.line;
  }
}

/** @param {Scene} scene */
function drawRows({ pen, colours, left, top, width, height, ranks, layout, scroll, hoverRow }) {
  const part = layout.lanes[2];
  for (let row = 0; row < ranks.length; row++) {
    const y = top + layout.tops[row] - scroll;
    if (y + layout.row < top || y > height) continue;
    pen.fillStyle = colours.hover;
    pen.fillRect(left, y, width - left, part.y);
    if (row === hoverRow) pen.fillRect(left, y, width - left, part.y + part.h);
    // Darker than waiting, which has the background of the page.
    pen.fillStyle = colours.grid;
    pen.fillRect(left, y + part.y, width - left, part.h);
  }
}

/** Steps without spans: only their times are known. @param {Scene} scene */
function drawMissing(scene) {
  const { pen, top, height, layout, scroll, missing } = scene;
  if (!missing.length) return;
  const bottom = Math.min(height, top + layout.total - scroll);
  pen.fillStyle = patternOf(scene, "missing");
  for (const step of missing) {
    const x0 = xOf(scene, step.start), w = xOf(scene, step.end) - x0;
    pen.fillRect(x0, top, Math.max(w - 1, 1), bottom - top);
  }
}

/** @param {Scene} scene */
function nameMissing(scene) {
  const { pen, colours, top, layout, missing, missingWords } = scene;
  pen.textBaseline = "middle";
  pen.font = `10px ${FONT}`;
  pen.textAlign = "center";
  for (const step of missing) {
    const x0 = Math.max(xOf(scene, step.start), scene.left), x1 = Math.min(xOf(scene, step.end), scene.width);
    const label = missingWords.split("|").find((text) => widthOf(pen, text) < x1 - x0 - 12);
    if (!label) continue;
    const half = widthOf(pen, label) / 2 + 4, y = top + (layout.tops[0] ?? 0) + Math.min(layout.row / 2, 40);
    pen.fillStyle = colours.paper;
    pen.fillRect((x0 + x1) / 2 - half, y - 8, 2 * half, 16);
    pen.fillStyle = colours.ink;
    pen.fillText(label, (x0 + x1) / 2, y);
  }
}

/** @param {Scene} scene */
function drawRectangles(scene) {
  const { pen, colours, rectangles, dpr } = scene;
  // whole pixels: sharp edges, and faster
  const grid = /** @param {number} value */ (value) => Math.round(value * dpr) / dpr;
  const pixel = 1 / dpr;
  const areMany = rectangles.total > MOST_DRAWN;
  if (areMany) paintMany(scene);
  for (const meaning of areMany ? [UNDER_WAY] : ORDER) {
    const count = rectangles.counts[meaning];
    if (!count) continue;
    const quads = rectangles.quads[meaning];
    pen.fillStyle = meaning === UNDER_WAY ? patternOf(scene, "under way") : colourOf(colours, meaning);
    for (let i = 0; i < 4 * count; i += 4) {
      const x = grid(quads[i]), y = grid(quads[i + 1]);
      pen.fillRect(x, y, Math.max(grid(quads[i] + quads[i + 2]) - x, pixel), Math.max(grid(quads[i + 1] + quads[i + 3]) - y, pixel));
    }
  }
  outline(scene, WAITING, colours.fill.waitingLine, 4, 6); // in thin rows the ground below it is visible
  outline(scene, UNDER_WAY, colours.fill.communication, 3, 3);
  crossFailed(scene);
  // An open bar ends in an arrow instead of an edge.
  pen.fillStyle = colours.ink;
  for (const { x, y, h } of rectangles.open) {
    const size = Math.min(h, 8);
    pen.beginPath();
    pen.moveTo(x, y + h / 2 - size / 2);
    pen.lineTo(x + size * 0.7, y + h / 2);
    pen.lineTo(x, y + h / 2 + size / 2);
    pen.fill();
  }
}

/** Paint all rectangles of one colour by means of an image. @param {Scene} scene */
function paintMany({ pen, colours, rectangles, dpr, left, top }) {
  const { width, height } = pen.canvas;
  if (!image || image.width !== width || image.height !== height) {
    image = new ImageData(width, height);
    sheet = new OffscreenCanvas(width, height);
  }
  const pixels = new Uint32Array(image.data.buffer);
  pixels.fill(0);
  for (const meaning of ORDER) {
    if (meaning === UNDER_WAY) continue; // hatched
    const colour = channels(colourOf(colours, meaning)) ?? [128, 128, 128];
    paint(pixels, width, Math.round(top * dpr), Math.round(left * dpr), rectangles.quads[meaning], rectangles.counts[meaning], abgr(colour), dpr);
  }
  sheet.getContext("2d")?.putImageData(image, 0, 0);
  pen.drawImage(sheet, 0, 0, width / dpr, height / dpr);
}

/** @type {ImageData|undefined} */
let image;
/** @type {OffscreenCanvas} */
let sheet;

/** @param {Scene} scene @param {number} meaning @param {string} colour @param {number} leastWidth @param {number} leastHeight */
function outline({ pen, rectangles, dpr }, meaning, colour, leastWidth, leastHeight) {
  const quads = rectangles.quads[meaning];
  const half = 0.5 / dpr;
  pen.strokeStyle = colour;
  pen.lineWidth = 1 / dpr;
  pen.beginPath();
  for (let i = 0; i < 4 * rectangles.counts[meaning]; i += 4) {
    if (quads[i + 2] < leastWidth || quads[i + 3] < leastHeight) continue;
    const x = Math.round(quads[i] * dpr) / dpr, y = Math.round(quads[i + 1] * dpr) / dpr;
    const x1 = Math.round((quads[i] + quads[i + 2]) * dpr) / dpr, y1 = Math.round((quads[i + 1] + quads[i + 3]) * dpr) / dpr;
    pen.rect(x + half, y + half, x1 - x - 2 * half, y1 - y - 2 * half);
  }
  pen.stroke();
}

/** @param {Scene} scene */
function crossFailed({ pen, colours, rectangles }) {
  const failed = MEANINGS.indexOf("failed");
  const quads = rectangles.quads[failed];
  pen.strokeStyle = colours.fill.failedLine;
  pen.lineWidth = 1.5;
  pen.beginPath();
  for (let i = 0; i < 4 * rectangles.counts[failed]; i += 4) {
    const size = Math.min(quads[i + 3], 10) / 2 - 1;
    const x = quads[i] + quads[i + 2] / 2, y = quads[i + 1] + quads[i + 3] / 2;
    if (size < 1 || quads[i + 2] < 4) continue;
    pen.moveTo(x - size, y - size);
    pen.lineTo(x + size, y + size);
    pen.moveTo(x + size, y - size);
    pen.lineTo(x - size, y + size);
  }
  pen.stroke();
}

/** @param {Scene} scene */
function drawRibbons(scene) {
  const { pen, colours, ribbons } = scene;
  for (const { bars, isChosen } of ribbons) {
    pen.fillStyle = pen.strokeStyle = isChosen ? colours.focus : colours.fill.communication;
    pen.lineWidth = isChosen ? 1.5 : 1;
    for (const { corners: part, isLoose } of ribbon(bars)) {
      pen.globalAlpha = isChosen ? 0.16 : 0.07;
      pen.beginPath();
      pen.moveTo(part[0], part[1]);
      for (let i = 2; i < 8; i += 2) pen.lineTo(part[i], part[i + 1]);
      if (!isLoose) pen.fill();
      pen.setLineDash(isLoose ? [3, 4] : []);
      pen.globalAlpha = isChosen ? 0.9 : 0.3;
      pen.beginPath();
      pen.moveTo(part[0], part[1]);
      pen.lineTo(part[6], part[7]);
      pen.moveTo(part[2], part[3]);
      pen.lineTo(part[4], part[5]);
      pen.stroke();
    }
    pen.globalAlpha = 1;
    pen.setLineDash([]);
    if (!isChosen) continue;
    pen.lineWidth = 2;
    for (const bar of bars) pen.strokeRect(bar.x0 - 0.5, bar.top - 0.5, Math.max(bar.x1 - bar.x0, 1) + 1, bar.bottom - bar.top + 1);
  }
}

/** @param {Scene} scene */
function drawArrows({ pen, colours, arrows }) {
  for (const { x0, y0, x1, y1, isLoose, isChosen } of arrows) {
    pen.strokeStyle = pen.fillStyle = isChosen ? colours.focus : colours.ink;
    pen.lineWidth = isChosen ? 2 : 1;
    pen.setLineDash(isLoose ? [3, 3] : []);
    arrow(pen, x0, y0, x1, y1);
  }
  pen.setLineDash([]);
}

/** @param {Scene} scene */
function drawWords(scene) {
  const { pen, colours, rectangles, left, width } = scene;
  pen.font = `10px ${FONT}`;
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  for (const { lane, at, x, y, w, h, meaning } of rectangles.wide) {
    const x0 = Math.max(x, left), x1 = Math.min(x + w, width);
    if (x1 - x0 < 14) continue;
    const label = scene.wordsOf(lane, at).find((text) => widthOf(pen, text) <= x1 - x0 - 5);
    if (!label) continue;
    const ground = colourOf(colours, meaning);
    pen.fillStyle = meaning === WAITING || meaning === UNDER_WAY ? colours.ink : readable(ground);
    if (meaning === UNDER_WAY) {
      const half = widthOf(pen, label) / 2 + 3;
      pen.fillStyle = colours.paper;
      pen.fillRect((x0 + x1) / 2 - half, y + h / 2 - 6, 2 * half, 12);
      pen.fillStyle = colours.ink;
    }
    pen.fillText(label, (x0 + x1) / 2, y + h / 2 + 0.5);
  }
}

/** @param {Scene} scene */
function drawNames({ pen, colours, left, top, height, width, ranks, layout, scroll, hoverRow }) {
  pen.save();
  pen.beginPath();
  pen.rect(0, top, width, height - top);
  pen.clip();
  const every = Math.ceil(11 / layout.row);
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  for (let row = 0; row < ranks.length; row++) {
    if (row % every && row !== hoverRow) continue;
    if (hoverRow >= 0 && row !== hoverRow && Math.abs(row - hoverRow) < every) continue;
    const y = top + layout.tops[row] + (layout.row - layout.gap) / 2 - scroll;
    pen.font = `${row === hoverRow ? "bold " : ""}${layout.row >= 16 ? 11 : 10}px ${FONT}`;
    pen.fillStyle = row === hoverRow ? colours.ink : colours.soft;
    pen.fillText(layout.row >= 16 ? `rank ${ranks[row]}` : `${ranks[row]}`, left - 6, y);
  }
  nameHosts({ pen, colours, top, width, layout, scroll });
  pen.restore();
  const all = layout.total, seen = height - top;
  if (all > seen + 1) {
    pen.fillStyle = colours.line;
    pen.fillRect(width - 4, top + (scroll / all) * seen, 3, Math.max((seen / all) * seen, 12));
  }
}

/** A line above the ranks of each host, and its name. @param {Pick<Scene, "pen"|"colours"|"top"|"width"|"layout"|"scroll">} scene */
function nameHosts({ pen, colours, top, width, layout, scroll }) {
  pen.textAlign = "left";
  pen.font = `bold 10px ${FONT}`;
  for (const { host, y } of layout.headings) {
    pen.fillStyle = colours.line;
    pen.fillRect(0, top + y - scroll, width, 1);
    pen.fillStyle = colours.soft;
    pen.fillText(host, 6, top + y + HEADING / 2 - scroll);
  }
}

/** A thin line at the pointer, and its time on the axis. @param {Scene} scene */
function drawPointer(scene) {
  const { pen, colours, view, left, top, width, height, pointerX, dpr } = scene;
  if (pointerX < left || pointerX > width) return;
  pen.fillStyle = colours.soft;
  pen.fillRect(Math.round(pointerX * dpr) / dpr, top, 1 / dpr, height - top);
  const time = view.t0 + ((pointerX - left) / (width - left)) * (view.t1 - view.t0);
  const label = seconds(time, (view.t1 - view.t0) / (width - left));
  pen.font = `10px ${FONT}`;
  const half = pen.measureText(label).width / 2 + 4;
  const x = Math.min(Math.max(pointerX, left + half), width - half);
  pen.fillStyle = colours.ink;
  pen.fillRect(x - half, 1, 2 * half, 14);
  pen.fillStyle = colours.paper;
  pen.textAlign = "center";
  pen.fillText(label, x, 8);
}

/** @param {CanvasRenderingContext2D} pen @param {string} text */
function widthOf(pen, text) {
  let width = widths.get(text);
  if (width === undefined) {
    if (widths.size > 5000) widths.clear();
    widths.set(text, (width = pen.measureText(text).width));
  }
  return width;
}

const inks = new Map();

/** @param {string} ground */
function readable(ground) {
  if (!inks.has(ground)) inks.set(ground, channels(ground) ? textOn(ground) : "#1c1c1c");
  return inks.get(ground);
}

const patterns = new WeakMap();

/** Hatches, made once per palette. @param {Scene} scene @param {"missing"|"under way"} name */
function patternOf({ pen, colours, dpr }, name) {
  const key = `${name} ${dpr}`;
  let made = patterns.get(colours);
  if (!made) patterns.set(colours, (made = new Map()));
  if (!made.has(key)) {
    const pattern = name === "missing" ? hatch(pen, colours.paper, colours.theme === "dark" ? "#333333" : "#e4e4e4", dpr) : hatch(pen, colours.paper, colours.fill.communication, dpr);
    pattern.setTransform?.(new DOMMatrix().scale(1 / dpr)); // patterns are in pixels of the canvas, not in CSS pixels
    made.set(key, pattern);
  }
  return made.get(key);
}
