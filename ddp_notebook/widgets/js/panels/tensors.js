/**
 * The tensors of one collective: a column per rank, its input above its output.
 *
 * | on screen | means |
 * |---|---|
 * | numbers in boxes | small tensors, or the first elements of large ones; the line below says which |
 * | coloured squares | whole tensors; blue below zero, red above, page background for zero; one scale for all ranks |
 * | X, I, -I | NaN, infinities |
 * | + and - | clipped: more than three standard deviations |
 * | frame around an element | the collective has changed it |
 * | dark corner | the value differs between ranks |
 *
 */

import { bytes, plural } from "../data/format.js";
import { isSameName, nameOf } from "../data/names.js";
import { TensorSource } from "../data/tensor_source.js";
import { acrossRanks, element, range } from "../data/values.js";
import { Surface } from "../drawing/canvas.js";
import { colourMap, scaleOf } from "../drawing/heat.js";
import { drawScale, drawTiles, meanings } from "../drawing/tensors_draw.js";
import { MARGIN, NARROW, elementAt, hideCrowdedMarks, placeLegend, placeTiles } from "../drawing/tiles.js";
import { collectiveControl } from "../parts/controls.js";
import { make, show } from "../parts/dom.js";
import { tooltip } from "../parts/tooltip.js";
import { aboutElement, acrossInWords, changedInWords, groupName, isPartial, shapesInWords, tensorTable, tensorsOf } from "./tensors_words.js";

/** @type {Record<string, [number, number]>} to the right and down */
const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

/** @typedef {{rank: number, side: number, at: number}} Pointed  the element under the pointer */

/**
 * @param {HTMLElement} el
 * @param {import("../data/store.js").Store} store
 * @param {import("./index.js").Env} env
 * @returns {import("./index.js").Panel}
 */
export function tensorsPanel(el, store, env) {
  const document = el.ownerDocument;
  const source = new TensorSource(store, env);
  const title = make(document, "strong");
  const about = make(document, "span", { class: "ddpm-item" });
  const button = make(document, "button", { type: "button", textContent: "Show whole tensors", onclick: askWhole });
  const head = make(document, "div", { class: "ddpm-readout" }, title, about, button);
  head.style.cssText = "align-items:center;min-height:30px;padding:0 0 4px";
  el.append(head);
  const surface = new Surface(el);
  const { canvas, pen } = surface;
  canvas.style.cursor = "crosshair";
  const tip = tooltip(el);
  let width = 0;
  /** @type {import("../drawing/tiles.js").Tile[]} */
  let tiles = [];
  /** @type {Pointed|null} */
  let pointed = null;
  /** @type {import("../data/tables.js").CollectiveEntry|null} */
  let current = null; // the shown collective
  let layoutName = "", contentHeight = 260, isByKey = false;
  let scale = { limit: 1, isClipped: false };
  let legend = placeLegend([], 0);
  let map = { of: env.colours, colours: colourMap(env.colours) };
  let changed = ""; // summary of the changes
  /** @type {(import("../data/values.js").Across|null)[]} */
  let across = [null, null]; // by side
  let drawn = {};

  // Answers also arrive while nothing else is drawn.
  const unsubscribe = store.subscribe(() => {
    if (current && source.asked(current) !== "") env.redraw();
  });

  function askWhole() {
    if (current) source.ask(current);
    env.redraw();
  }

  // ---- what is shown

  function bring() {
    current = source.current();
    const ranks = store.shownRanks();
    const state = current ? source.asked(current) : "";
    const name = current ? [current.group, current.number, current.values.size, Math.max(...current.values.values()), state, ranks.join(), width].join(" ") : `${width}`;
    if (name === layoutName) return;
    layoutName = name;
    const found = current ? source.tensors(current, new Set(ranks)) : new Map();
    const all = [...found.values()].flat().filter((tensor) => tensor !== null);
    scale = scaleOf(all.map((tensor) => tensor.data));
    across = [0, 1].map((side) => acrossRanks(all.filter((tensor) => tensor.side === side)));
    const placed = placeTiles(found, across, width);
    tiles = placed.tiles;
    legend = placeLegend(meanings(tiles.length > 0 && tiles[0].width < NARROW, scale.isClipped), width);
    contentHeight = placed.height + (tiles.length ? legend.height : 0);
    changed = changedInWords(tiles);
    hideCrowdedMarks(tiles);
    if (pointed && !tensorAt(pointed)) pointed = null;
  }

  /** @param {{rank: number, side: number}} place */
  const tensorAt = ({ rank, side }) => tiles.find((tile) => tile.rank === rank)?.sides[side] ?? null;

  // ---- drawing

  function draw() {
    const begun = performance.now();
    bring();
    if (map.of !== env.colours) map = { of: env.colours, colours: colourMap(env.colours) };
    surface.clear();
    const how = { colours: env.colours, dpr: env.dpr, map: map.colours, ...scale, pointed };
    const counts = drawTiles(pen, tiles, how);
    if (tiles.length) drawScale(pen, MARGIN, contentHeight - legend.height + 6, { ...how, legend });
    else surface.write(nothing(), 0, 20, { colour: env.colours.soft });
    say();
    showTip();
    drawn = { ...counts, drawMs: performance.now() - begun };
  }

  function showTip() {
    const tensor = pointed && tensorAt(pointed);
    if (!pointed || !tensor) {
      tip.show(null);
      return;
    }
    const { block } = tensor;
    const x = block.x + ((pointed.at % block.columns) + 0.5) * block.cell, y = block.y + Math.floor(pointed.at / block.columns) * block.cellHeight;
    tip.show(aboutElement(tiles, tensor, pointed.at), x, canvas.offsetTop + y + block.cellHeight / 2, width);
  }

  /** The row of a collective's span on one rank. @param {import("../data/tables.js").CollectiveEntry} one */
  function spanOf(one) {
    const span = [...one.spans.values()].map((number) => store.tables.span.find(number)).find((index) => index >= 0);
    return span === undefined ? null : store.tables.span.row(span);
  }

  function nothing() {
    if (!current) return "No collective has been recorded yet.";
    if (current.values.size) return "None of the chosen ranks took part in it.";
    if (spanOf(current)?.left_out) return "Its values were left out, because steps were fast; %ddp_record all keeps all values.";
    return "Its values were not recorded, or are not kept any more; %ddp_record values records them.";
  }

  function say() {
    const name = current ? `${store.text(current.op)} #${current.number}` : "";
    const row = current && spanOf(current);
    const ofSpan = row ? [row.nbytes > 0 ? bytes(row.nbytes) : "", `step ${row.step}`, store.text(row.site)] : [];
    const words = [current ? groupName(store.text(current.group)) : "", ...ofSpan, ...acrossInWords(across, tiles), changed].filter(Boolean).join(" · ");
    if (title.textContent !== name) title.textContent = name;
    if (about.textContent !== words) about.textContent = words;
    show(button, tensorsOf(tiles).some(isPartial) && source.canAsk && !!current && source.asked(current) === "");
  }

  function notes() {
    /** @type {string[]} */
    const found = [];
    const leftOut = store.notes.values_left_out;
    if (leftOut) found.push(`the values of ${plural(leftOut, "call")} were left out, as the training is fast; %ddp_record all keeps them`);
    if (!current) return found;
    const all = tensorsOf(tiles);
    const partly = all.filter(isPartial);
    const state = source.asked(current);
    if (partly.length) found.push(`tensors: the first ${partly[0].data.length} of ${plural(partly[0].numel, "element")} are here`);
    if (all.some((tensor) => tensor.lookedAt < tensor.numel)) found.push("ranges are of a sample of the elements");
    if (state === "asking") found.push("asking the kernel for the whole tensors; it may answer when the cell is over");
    else if (state && state !== "here") found.push(state);
    const crowded = all.find((tensor) => !tensor.block.asDigits && tensor.block.cell * env.dpr < 1);
    if (crowded) found.push("a pixel shows the largest of its elements");
    if (scale.isClipped) found.push(`colours end at ±${element(scale.limit, "", 6)}, three standard deviations`);
    return found;
  }

  // ---- pointer and keys

  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top;
    pointed = null;
    isByKey = false;
    for (const tensor of tensorsOf(tiles)) {
      const at = elementAt(tensor.block, tensor.data.length, x, y);
      if (at >= 0) pointed = { rank: tensor.rank, side: tensor.side, at };
    }
    env.redraw();
  });
  canvas.addEventListener("pointerleave", () => {
    if (!isByKey) pointed = null;
    env.redraw();
  });
  // A chosen collective stays selected when newer ones arrive.
  canvas.addEventListener("click", () => {
    if (current) store.choose({ collective: nameOf(current) });
  });

  /** @param {KeyboardEvent} event @returns {boolean} whether the panel has used the key */
  function onKey(event) {
    if (/^(INPUT|SELECT|TEXTAREA|BUTTON)$/.test(/** @type {Element} */ (event.target)?.tagName ?? "")) return false;
    const { key } = event;
    if (key === "," || key === "PageUp") return next(-1);
    if (key === "." || key === "PageDown") return next(1);
    if (key === "End" || key === "f") {
      store.choose({ collective: null });
      return true;
    }
    if (key === "Escape" && pointed) {
      pointed = null;
      env.redraw();
      return true;
    }
    if (!ARROWS[key] || !tiles.length) return false;
    isByKey = true;
    pointed = pointed ? neighbour(pointed, ...ARROWS[key]) : firstElement();
    env.redraw();
    return true;
  }

  /** @returns {Pointed|null} */
  function firstElement() {
    const tile = tiles.find((one) => one.sides.some((tensor) => tensor?.data.length));
    return tile ? { rank: tile.rank, side: tile.sides[0]?.data.length ? 0 : 1, at: 0 } : null;
  }

  /**
   * The next element. Beyond the edge, continue at the next rank, or between input and output.
   * @param {Pointed} from
   * @param {number} right
   * @param {number} down
   * @returns {Pointed}
   */
  function neighbour(from, right, down) {
    const tensor = tensorAt(from);
    if (!tensor) return from;
    const { columns } = tensor.block;
    const column = (from.at % columns) + right, row = Math.floor(from.at / columns) + down;
    const at = row * columns + column;
    if (column >= 0 && column < columns && row >= 0 && at >= 0 && at < tensor.data.length) return { ...from, at };
    const tile = tiles.findIndex((one) => one.rank === from.rank);
    const found = right ? inTile(tile + right, from.side, row, right > 0 ? 0 : Infinity) : inTile(tile, from.side + down, down > 0 ? 0 : Infinity, column);
    return found ?? from;
  }

  /**
   * The element of a tile that is nearest to a row and a column.
   * @param {number} tileAt
   * @param {number} side
   * @param {number} row
   * @param {number} column
   * @returns {Pointed|null}
   */
  function inTile(tileAt, side, row, column) {
    const tensor = tiles[tileAt]?.sides[side];
    if (!tensor?.data.length) return null;
    const { rows, columns } = tensor.block;
    const at = Math.min(row, rows - 1) * columns + Math.min(column, columns - 1);
    return { rank: tensor.rank, side, at: Math.min(at, tensor.data.length - 1) };
  }

  /** Choose the previous or next collective. @param {number} by */
  function next(by) {
    const all = store.collectives().filter((one) => one.values.size);
    if (!all.length) return true;
    const at = current ? all.findIndex((one) => isSameName(one, current)) : all.length;
    const one = all[Math.min(Math.max(at + by, 0), all.length - 1)];
    store.choose({ collective: nameOf(one) });
    return true;
  }

  function describe() {
    if (!current) return "No collective has been recorded yet.";
    const name = `${store.text(current.op)} number ${current.number}`;
    if (!tiles.length) return `${name}: ${nothing()}`;
    const words = [...acrossInWords(across, tiles), changed].filter(Boolean).join("; ");
    const tensor = pointed && tensorAt(pointed);
    const under = pointed && tensor ? ` ${aboutElement(tiles, tensor, pointed.at).slice(0, 3).join("; ")}.` : "";
    return `${name} on ${plural(tiles.length, "rank")}: ${shapesInWords(tiles)}${words ? `; ${words}` : ""}.${under}`;
  }

  /** @param {import("../drawing/tiles.js").Placed} tensor */
  function stateOf(tensor) {
    const { dtype, shape, numel, data, block, changed: marks } = tensor;
    return {
      dtype, shape, numel, values: Array.from(data.slice(0, 64)), count: data.length, range: range(tensor), block,
      written: block.asDigits ? Array.from(data, (value) => element(value, dtype)) : null, changed: marks && marks.reduce((sum, one) => sum + one, 0),
    };
  }

  return {
    controls: [collectiveControl(document, store, true)],
    draw,
    describe,
    table: () => tensorTable(tiles),
    notes,
    onKey,
    height(wanted) {
      width = Math.max(wanted, 120);
      bring();
      return Math.max(contentHeight, 60) + Math.max(head.offsetHeight, 30) + 4;
    },
    resize(newWidth, newHeight) {
      width = newWidth;
      surface.resize(newWidth, Math.max(newHeight - Math.max(head.offsetHeight, 30), 40), env.dpr);
    },
    state() {
      const tensor = pointed && tensorAt(pointed);
      return {
        collective: current && { group: current.group, number: current.number, op: store.text(current.op) },
        isChosen: !!store.choice.collective,
        limit: scale.limit,
        isClipped: scale.isClipped,
        across: acrossInWords(across, tiles),
        changed,
        pointed: pointed && { ...pointed, value: tensor?.data[pointed.at], words: tensor && aboutElement(tiles, tensor, pointed.at) },
        asked: current ? source.asked(current) : "",
        tiles: tiles.map(({ rank, x, y, sides }) => ({ rank, x, y, sides: sides.map((one) => one && stateOf(one)) })),
        notes: notes(),
        ...drawn,
      };
    },
    destroy() {
      unsubscribe();
      el.replaceChildren();
    },
  };
}
