/**
 * Draws the tensors on their canvas.
 *
 * @typedef {import("./tiles.js").Placed} Placed
 * @typedef {import("./tiles.js").Tile} Tile
 * @typedef {{colours: import("./colours.js").Palette, dpr: number, map: import("./heat.js").ColourMap, limit: number,
 *   pointed: {rank: number, side: number, at: number}|null}} How
 * @typedef {{cells: number, maps: number, marks: number, outlines: number}} Counts what was drawn
 */

import { font } from "./canvas.js";
import { heatMap, markOf, placeOf } from "./heat.js";
import { BESIDE_SCALE, inLines, LINE, MARGIN, NARROW, SCALE_WIDTH } from "./tiles.js";
import { element, range } from "../data/values.js";

const SIDES = ["in", "out"];
const LEAST_MARK = 9, LEAST_OUTLINE = 5; // px of a cell

/**
 * @param {CanvasRenderingContext2D} pen
 * @param {Tile[]} tiles
 * @param {How} how
 * @returns {Counts}
 */
export function drawTiles(pen, tiles, how) {
  const counts = { cells: 0, maps: 0, marks: 0, outlines: 0 };
  for (const tile of tiles) {
    pen.font = font(11, "600");
    pen.textBaseline = "middle";
    pen.textAlign = "left";
    pen.fillStyle = how.colours.ink;
    pen.fillText(`rank ${tile.rank}`, tile.x, tile.y + 8);
    tile.sides.forEach((tensor, side) => {
      if (!tensor) return;
      drawSide(pen, tile, tensor, side, how, counts);
      const { pointed } = how;
      // The same element in all tensors: its output, and the values of the other ranks.
      if (pointed && pointed.at < tensor.data.length) outline(pen, tensor.block, pointed.at, how.colours.focus, pointed.rank === tile.rank && pointed.side === side ? 3 : 1.5);
    });
  }
  return counts;
}

/** @param {CanvasRenderingContext2D} pen @param {Tile} tile @param {Placed} tensor @param {number} side @param {How} how @param {Counts} counts */
function drawSide(pen, tile, tensor, side, how, counts) {
  const { block } = tensor;
  pen.font = font(10);
  pen.textAlign = "left";
  pen.fillStyle = how.colours.soft;
  const isNarrow = tile.width < NARROW;
  if (!isNarrow) pen.fillText(SIDES[side], tile.x, block.y + Math.min(block.height, 16) / 2 + 1);
  if (!tensor.data.length) {
    pen.fillText(tensor.numel ? "values not recorded" : "empty", block.x, block.y + 8);
  } else if (block.asDigits) drawDigits(pen, tensor, how, counts);
  else drawMap(pen, tensor, how, counts);
  if (isNarrow) return;
  pen.font = font(10);
  pen.textAlign = "left";
  pen.fillStyle = how.colours.soft;
  const lines = inLines(range(tensor), tile.width - MARGIN, (words) => pen.measureText(words).width);
  lines.forEach((line, at) => pen.fillText(line, block.x, block.y + Math.max(block.height, 16) + 9 + at * LINE));
}

/** Numbers in boxes, each on the colour of its value. @param {CanvasRenderingContext2D} pen @param {Placed} tensor @param {How} how @param {Counts} counts */
function drawDigits(pen, tensor, { colours, map, limit }, counts) {
  const { data, block, dtype } = tensor;
  const size = block.cell >= 40 ? 11 : 10;
  pen.font = font(size);
  pen.textAlign = "center";
  for (let at = 0; at < data.length; at++) {
    const x = block.x + (at % block.columns) * block.cell, y = block.y + Math.floor(at / block.columns) * block.cellHeight;
    const place = placeOf(data[at], limit);
    pen.fillStyle = map.css[place];
    pen.fillRect(x, y, block.cell - 1, block.cellHeight - 1);
    pen.strokeStyle = colours.grid;
    pen.lineWidth = 1;
    pen.strokeRect(x + 0.5, y + 0.5, block.cell - 2, block.cellHeight - 2);
    pen.fillStyle = map.text[place];
    pen.fillText(element(data[at], dtype, Math.max(2, Math.floor((block.cell - 4) / (size * 0.58)))), x + (block.cell - 1) / 2, y + block.cellHeight / 2);
    counts.cells++;
    mark(pen, tensor, at, colours, counts);
  }
}

/**
 * Elements as colours, with marks on values that are not finite or beyond the scale.
 * @param {CanvasRenderingContext2D} pen
 * @param {Placed} tensor
 * @param {How} how
 * @param {Counts} counts
 */
function drawMap(pen, tensor, { colours, dpr, map, limit }, counts) {
  const { data, block } = tensor;
  const image = bitmapOf(tensor, limit, map, Math.round(block.width * dpr), Math.round(block.height * dpr));
  pen.imageSmoothingEnabled = false;
  pen.drawImage(image, block.x, block.y, block.width, block.height);
  pen.strokeStyle = colours.line;
  pen.lineWidth = 1 / dpr;
  pen.strokeRect(block.x - 0.5, block.y - 0.5, block.width + 1, block.height + 1);
  counts.maps++;
  counts.cells += data.length;
  if (block.cell < LEAST_OUTLINE) return;
  pen.font = font(Math.min(block.cell * 0.85, 11), "bold");
  pen.textAlign = "center";
  for (let at = 0; at < data.length; at++) {
    const sign = block.cell >= LEAST_MARK ? markOf(data[at], limit) : "";
    if (sign) {
      pen.fillStyle = map.text[placeOf(data[at], limit)];
      pen.fillText(sign, block.x + ((at % block.columns) + 0.5) * block.cell, block.y + (Math.floor(at / block.columns) + 0.5) * block.cell + 0.5);
      counts.marks++;
    }
    mark(pen, tensor, at, colours, counts);
  }
}

/**
 * Mark an element: a frame if the collective has changed it, a corner if it differs between ranks.
 * @param {CanvasRenderingContext2D} pen @param {Placed} tensor @param {number} at @param {import("./colours.js").Palette} colours @param {Counts} counts
 */
function mark(pen, { block, changed, differs }, at, colours, counts) {
  if (changed?.[at]) {
    outline(pen, block, at, colours.ink, block.asDigits ? 1.5 : 1);
    counts.outlines++;
  }
  if (!differs?.[at]) return;
  const x = block.x + ((at % block.columns) + 1) * block.cell - (block.asDigits ? 1 : 0), y = block.y + Math.floor(at / block.columns) * block.cellHeight;
  const size = Math.min(6, block.cell / 2);
  pen.fillStyle = colours.ink;
  pen.beginPath();
  pen.moveTo(x - size, y);
  pen.lineTo(x, y);
  pen.lineTo(x, y + size);
  pen.fill();
}

/** @param {CanvasRenderingContext2D} pen @param {import("./tiles.js").Block} block @param {number} at @param {string} colour @param {number} width */
function outline(pen, block, at, colour, width) {
  const inset = width / 2 + (block.asDigits ? 0.5 : 0);
  pen.strokeStyle = colour;
  pen.lineWidth = width;
  const w = Math.max(block.cell, 3), h = Math.max(block.cellHeight, 3);
  pen.strokeRect(block.x + (at % block.columns) * block.cell + inset, block.y + Math.floor(at / block.columns) * block.cellHeight + inset, w - 2 * inset - (block.asDigits ? 0.5 : 0), h - 2 * inset);
}

/** @type {WeakMap<object, {name: string, sheet: OffscreenCanvas}>} */
const bitmaps = new WeakMap();

/**
 * Cached by tensor, scale and size, so that it is not drawn again at each move of the pointer.
 * @param {Placed} tensor @param {number} limit @param {import("./heat.js").ColourMap} map @param {number} width @param {number} height pixels
 */
function bitmapOf(tensor, limit, map, width, height) {
  const name = `${limit} ${width} ${height} ${map.css[0]}${map.css[128]} ${tensor.block.columns}`;
  const known = bitmaps.get(tensor.data);
  if (known?.name === name) return known.sheet;
  const made = heatMap(tensor.data, tensor.block, limit, map.pixels, width, height);
  const sheet = new OffscreenCanvas(made.width, made.height);
  sheet.getContext("2d")?.putImageData(new ImageData(new Uint8ClampedArray(made.pixels.buffer), made.width, made.height), 0, 0);
  bitmaps.set(tensor.data, { name, sheet });
  return sheet;
}

/**
 * The scale of the colours.
 * @param {CanvasRenderingContext2D} pen @param {number} x @param {number} y @param {How & {legend: ReturnType<typeof import("./tiles.js").placeLegend>}} how
 */
export function drawScale(pen, x, y, { map, limit, colours, legend }) {
  const width = SCALE_WIDTH;
  for (let i = 0; i < width; i++) {
    pen.fillStyle = map.css[Math.round((i / (width - 1)) * 256)];
    pen.fillRect(x + i, y, 1.5, 8);
  }
  pen.strokeStyle = colours.line;
  pen.lineWidth = 1;
  pen.strokeRect(x - 0.5, y - 0.5, width + 1, 9);
  pen.font = font(10);
  pen.fillStyle = colours.soft;
  const words = element(limit, "", 5);
  [[`-${words}`, 0], ["0", 0.5], [words, 1]].forEach(([text, part]) => {
    pen.textAlign = "center";
    pen.fillText(String(text), x + Number(part) * width, y + 16);
  });
  pen.textAlign = "left";
  if (legend.isBelow) legend.lines.forEach((line, at) => pen.fillText(line, x, y + 32 + at * LINE));
  else pen.fillText(legend.lines[0], x + width + BESIDE_SCALE, y + 4);
}

/** Meanings of the marks. @param {boolean} isSideBySide @param {boolean} isClipped */
export const meanings = (isSideBySide, isClipped) =>
  [isSideBySide ? "left: input, right: output" : "", "X NaN", "I Inf", isClipped ? "+ - beyond 3σ" : "", "□ changed by it", "◥ not the same on all ranks"].filter(Boolean);
