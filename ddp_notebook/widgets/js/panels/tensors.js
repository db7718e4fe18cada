/**
 * The tensors of one collective: a column per rank, its input above its output.
 *
 * | on screen | means |
 * |---|---|
 * | numbers in boxes | small tensors, or the first elements of large ones; the line below says which |
 * | coloured squares | whole tensors; blue below zero, red above, the page's tone is zero, one scale for all ranks |
 * | X, I, -I | NaN, infinities |
 * | + and - | beyond three standard deviations, where the colours end |
 * | frame around an element | the collective has changed it |
 * | dark corner | it is not the same on all ranks |
 */

import { Surface } from "../drawing/canvas.js";
import { make, show } from "../parts/dom.js";
import { bytes, percent, plural, ranksInWords } from "../parts/format.js";
import { colourMap, scaleOf } from "../drawing/heat.js";
import { TensorSource } from "../data/tensor_source.js";
import { LABEL, LINE, NARROW, drawScale, drawTiles } from "../drawing/tensors_draw.js";
import { isSameName, nameOf } from "../data/names.js";
import { block, elementAt, indexOf, tilesAcross } from "../drawing/tiles.js";
import { tooltip } from "./timeline_controls.js";
import { acrossRanks, differences, element, exactly, isSame, range } from "../data/values.js";

const GAP = 12, SCALE = 26, MARGIN = 26; // px between tiles, for the scale, for "in" and "out"
const LETTER = 5.7; // px of a letter in the words below a tensor

/** @param {Uint8Array} marks */
const part = (marks) => marks.reduce((sum, one) => sum + one, 0) / Math.max(marks.length, 1);
/** @param {any} tensor @param {number} width */
const linesOf = (tensor, width) => Math.min(3, Math.ceil((range(tensor).length * LETTER) / Math.max(width, 1)));

/**
 * @param {HTMLElement} el
 * @param {import("../data/store.js").Store} store
 * @param {Record<string, any>} env
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
  /** @type {import("../drawing/tensors_draw.js").Tile[]} */
  let tiles = [];
  /** @type {{rank: number, side: number, at: number}|null} */
  let pointed = null;
  let current = null; // the collective that is shown
  let layoutName = "", contentHeight = 260, isByKey = false;
  let scale = { limit: 1, isClipped: false };
  let palette = { colours: null, map: null };
  let changedInWords = "";
  let told = [null, null]; // by side, what is known across ranks
  let drawn = {};

  const listeners = new AbortController();
  const on = (type, listener) => canvas.addEventListener(type, listener, { signal: listeners.signal });
  // Answers come while nothing else is drawn, too.
  const unsubscribe = store.subscribe(() => current && source.asked(current) !== "" && env.redraw?.());

  function askWhole() {
    if (current) source.ask(current);
    env.redraw?.();
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
    const all = [...found.values()].flat().filter(Boolean);
    scale = scaleOf(all.map((tensor) => tensor.data));
    told = [0, 1].map((side) => acrossRanks([...found.values()].map((sides) => sides[side]).filter(Boolean)));
    place(found);
    if (pointed && !tensorAt(pointed)) pointed = null;
  }

  /** @param {Map<number, any[]>} found */
  function place(found) {
    const across = tilesAcross(found.size, width);
    const tileWidth = Math.floor((width + GAP) / across) - GAP;
    const rows = Math.ceil(found.size / across);
    const isNarrow = tileWidth < NARROW;
    // Both sides of all ranks in a height that fits a screen, whatever the number of rows.
    const room = Math.max(24, isNarrow ? Math.max(52, 480 / rows - LABEL) : Math.min(tileWidth - MARGIN, rows > 1 ? Math.max(40, 560 / rows / 2 - LABEL) : 190));
    const margin = isNarrow ? 0 : MARGIN;
    const sideWidth = isNarrow ? (tileWidth - 4) / 2 : tileWidth - MARGIN;
    tiles = [];
    let y = 0, rowHeight = 0;
    [...found.keys()].sort((a, b) => a - b).forEach((rank, i) => {
      if (i && i % across === 0) {
        y += rowHeight + GAP;
        rowHeight = 0;
      }
      const x = (i % across) * (tileWidth + GAP);
      let top = y + LABEL, bottom = top;
      const [input, output] = found.get(rank);
      const sides = [input, output].map((tensor, side) => {
        if (!tensor) return null;
        const own = block(tensor.data.length === tensor.numel ? tensor.shape : [tensor.data.length], tensor.data.length, sideWidth, room);
        // In narrow tiles side by side, in others the output below the input and its words.
        own.x = x + margin + (isNarrow && side ? sideWidth + 4 : 0);
        own.y = isNarrow ? y + LABEL : top;
        top = own.y + Math.max(own.height, isNarrow ? 0 : 16) + (isNarrow ? 2 : LINE * linesOf(tensor, tileWidth - MARGIN) + 10);
        bottom = Math.max(bottom, top);
        return { ...tensor, block: own, changed: side ? differences(output, input) : null, differs: told[side]?.marks ?? null };
      });
      top = bottom;
      rowHeight = Math.max(rowHeight, top - y);
      tiles.push({ rank, x, y, width: tileWidth, height: top - y, sides });
    });
    changedInWords = changed();
    // Where nearly all of it differs, marks on each element would hide what they mark: the words say it.
    for (const [name, side] of [["changed", 1], ["differs", 0], ["differs", 1]]) {
      const marked = tiles.map((tile) => tile.sides[side]).filter((tensor) => tensor?.[name] && tensor.data.length > 4);
      const share = marked.reduce((sum, tensor) => sum + part(tensor[name]), 0) / Math.max(marked.length, 1);
      if (share > 0.5) for (const tensor of marked) tensor[name] = null;
    }
    contentHeight = y + rowHeight + (tiles.length ? SCALE : 0);
  }

  /** What the collective has changed. */
  function changed() {
    const outputs = tiles.map((tile) => tile.sides[1]).filter((tensor) => tensor?.changed);
    if (!outputs.length) return "";
    const shares = outputs.map((tensor) => part(tensor.changed));
    if (shares.every((one) => one === 0)) return "nothing changed";
    if (shares.every((one) => one === 1)) return "all elements changed";
    const kept = outputs.filter((_, at) => shares[at] === 0).map((tensor) => tensor.rank);
    const some = outputs.length - kept.length;
    return `changed: ${percent(shares.reduce((sum, one) => sum + one, 0) / outputs.length)} of the elements${kept.length && some ? `, none on ${kept.length <= 4 ? ranksInWords(kept) : plural(kept.length, "rank")}` : ""}`;
  }

  const tensorAt = ({ rank, side }) => tiles.find((tile) => tile.rank === rank)?.sides[side] ?? null;

  // ---- drawing

  function draw() {
    const begun = performance.now();
    bring();
    if (palette.colours !== env.colours) palette = { colours: env.colours, map: colourMap(env.colours) };
    surface.clear();
    const how = { colours: env.colours, dpr: env.dpr, map: palette.map, ...scale, pointed };
    const counts = drawTiles(pen, tiles, how);
    if (tiles.length) drawScale(pen, MARGIN, contentHeight - SCALE + 6, { ...how, isSideBySide: tiles[0].width < NARROW });
    else surface.write(nothing(), 0, 20, { colour: env.colours.soft });
    say();
    const at = pointed && tensorAt(pointed);
    if (!at) tip.show(null);
    else {
      const { block: own } = at;
      const x = own.x + ((pointed.at % own.columns) + 0.5) * own.cell, y = own.y + Math.floor(pointed.at / own.columns) * own.cellHeight;
      tip.show(aboutElement(at, pointed.at), x, canvas.offsetTop + y + own.cellHeight / 2, width);
    }
    drawn = { ...counts, drawMs: performance.now() - begun };
  }

  function nothing() {
    if (!current) return "No collective has been recorded yet.";
    return current.values.size ? "None of the chosen ranks took part in it." : "Its values were not recorded, or are not kept any more; %ddp_record values records them.";
  }

  function say() {
    const name = current ? `${store.text(current.op)} #${current.number}` : "";
    const span = current ? [...current.spans.values()].map((number) => store.tables.span.find(number)).find((index) => index >= 0) : undefined;
    const row = span === undefined ? null : store.tables.span.row(span);
    const words = [groupName(), row && row.nbytes > 0 ? bytes(row.nbytes) : "", row ? `step ${row.step}` : "", row ? store.text(row.site) : "", ...acrossInWords(), changedInWords].filter(Boolean).join(" · ");
    if (title.textContent !== name) title.textContent = name;
    if (about.textContent !== words) about.textContent = words;
    const isPartial = tiles.some((tile) => tile.sides.some((tensor) => tensor && tensor.data.length < tensor.numel));
    show(button, isPartial && source.canAsk && source.asked(current) === "");
  }

  function groupName() {
    const text = current ? store.text(current.group) : "";
    try {
      return JSON.parse(text).title ?? text;
    } catch {
      return text;
    }
  }

  /** What is the same where. */
  function acrossInWords() {
    return [0, 1].map((side) => {
      const one = told[side];
      if (!one || !one.marks.length) return "";
      const part = tiles.some((tile) => tile.sides[side] && tile.sides[side].data.length < tile.sides[side].numel) ? "of the elements shown " : "";
      const what = side ? "output" : "input";
      if (!one.count) return `${what}: ${part ? "the elements shown are" : ""} the same on all ranks`.replace("  ", " ");
      const who = one.ranks.length && one.ranks.length <= tiles.length / 3 ? `, ${ranksInWords(one.ranks)} unlike the others` : "";
      return `${what}: ${part}${one.count === one.marks.length ? "all" : `${one.count} of ${one.marks.length}`} differ between ranks${who}`;
    });
  }

  /** @param {any} tensor @param {number} at */
  function aboutElement(tensor, at) {
    const isAll = tensor.data.length === tensor.numel;
    const side = tensor.side ? "output" : "input";
    const lines = [`rank ${tensor.rank}, ${side}[${indexOf(at, isAll ? tensor.shape : [tensor.data.length]).join(", ")}] = ${exactly(tensor.data[at], tensor.dtype)}`];
    const other = tensorAt({ rank: tensor.rank, side: 1 - tensor.side });
    if (other && other.numel === tensor.numel && at < other.data.length) {
      lines.push(isSame(other.data[at], tensor.data[at]) ? "not changed by the collective" : `${tensor.side ? "input" : "output"} ${exactly(other.data[at], other.dtype)}`);
    }
    const others = tiles.map((tile) => tile.sides[tensor.side]).filter((one) => one && one.rank !== tensor.rank && one.numel === tensor.numel && at < one.data.length);
    if (others.length) {
      const unlike = others.filter((one) => !isSame(one.data[at], tensor.data[at]));
      lines.push(
        unlike.length === 0 ? `the same on all ${others.length + 1} ranks` : `other on ${unlike.slice(0, 4).map((one) => `rank ${one.rank}: ${element(one.data[at], one.dtype, 9)}`).join(", ")}${unlike.length > 4 ? ` and ${unlike.length - 4} more` : ""}`,
      );
    }
    lines.push(range(tensor));
    return lines;
  }

  function notes() {
    const found = [];
    if (!current) return found;
    const all = tiles.flatMap((tile) => tile.sides).filter(Boolean);
    const partly = all.filter((tensor) => tensor.data.length < tensor.numel);
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

  on("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top;
    pointed = null;
    isByKey = false;
    for (const tile of tiles) {
      tile.sides.forEach((tensor, side) => {
        const at = tensor ? elementAt(tensor.block, tensor.data.length, x, y) : -1;
        if (at >= 0) pointed = { rank: tile.rank, side, at };
      });
    }
    env.redraw?.();
  });
  on("pointerleave", () => {
    if (!isByKey) pointed = null;
    env.redraw?.();
  });
  // A chosen collective stays, whatever comes.
  on("click", () => current && store.choose({ collective: nameOf(current) }));

  /** @param {KeyboardEvent} event @returns {boolean} whether it was for the tensors */
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
      return redrawn();
    }
    const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (!steps[key] || !tiles.length) return false;
    isByKey = true;
    if (!pointed) pointed = firstElement();
    else move(steps[key][0], steps[key][1]);
    return redrawn();
  }

  function redrawn() {
    env.redraw?.();
    return true;
  }

  function firstElement() {
    const tile = tiles.find((one) => one.sides.some((tensor) => tensor?.data.length));
    return tile ? { rank: tile.rank, side: tile.sides[0]?.data.length ? 0 : 1, at: 0 } : null;
  }

  /** To the next element; over the edge to the next rank, or from input to output. */
  function move(right, down) {
    const { block: own, data } = tensorAt(pointed);
    const column = (pointed.at % own.columns) + right, row = Math.floor(pointed.at / own.columns) + down;
    const at = row * own.columns + column;
    if (column >= 0 && column < own.columns && row >= 0 && at >= 0 && at < data.length) pointed = { ...pointed, at };
    else if (right) hop(tiles.findIndex((tile) => tile.rank === pointed.rank) + right, pointed.side, row, right > 0 ? 0 : Infinity);
    else hop(tiles.findIndex((tile) => tile.rank === pointed.rank), pointed.side + down, down > 0 ? 0 : Infinity, column);
  }

  function hop(tileAt, side, row, column) {
    const tensor = tiles[tileAt]?.sides[side];
    if (!tensor?.data.length) return;
    const { rows, columns } = tensor.block;
    const at = Math.min(row, rows - 1) * columns + Math.min(column, columns - 1);
    pointed = { rank: tiles[tileAt].rank, side, at: Math.min(at, tensor.data.length - 1) };
  }

  function next(by) {
    const all = store.collectives().filter((one) => one.values.size);
    if (!all.length) return true;
    const at = current ? all.findIndex((one) => isSameName(one, current)) : all.length;
    const one = all[Math.min(Math.max(at + by, 0), all.length - 1)];
    store.choose({ collective: nameOf(one) });
    return true;
  }

  // ---- in words

  function describe() {
    if (!current) return "No collective has been recorded yet.";
    const name = `${store.text(current.op)} number ${current.number}`;
    if (!tiles.length) return `${name}: ${nothing()}`;
    const words = [...acrossInWords(), changedInWords].filter(Boolean).join("; ");
    const at = pointed && tensorAt(pointed);
    const { sides } = tiles[0];
    const shapes = sides.map((tensor, side) => tensor && `${side ? "output" : "input"} ${tensor.words} ${tensor.dtype}`).filter(Boolean).join(", ");
    return `${name} on ${plural(tiles.length, "rank")}: ${shapes}${words ? `; ${words}` : ""}.${at ? ` ${aboutElement(at, pointed.at).slice(0, 3).join("; ")}.` : ""}`;
  }

  function table() {
    const rows = tiles.flatMap((tile) =>
      tile.sides.filter(Boolean).map((tensor) => [`${tile.rank}`, tensor.side ? "output" : "input", range(tensor), Array.from(tensor.data.slice(0, 32), (value) => element(value, tensor.dtype)).join(" ")]),
    );
    return { head: ["rank", "side", "range", "first elements"], rows };
  }

  return {
    draw,
    describe,
    table,
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
    /** What is drawn, for tests. */
    state() {
      return {
        collective: current && { group: current.group, number: current.number, op: store.text(current.op) },
        isChosen: !!store.choice.collective,
        limit: scale.limit,
        isClipped: scale.isClipped,
        across: acrossInWords(),
        changed: changedInWords,
        pointed: pointed && { ...pointed, value: tensorAt(pointed)?.data[pointed.at], words: tensorAt(pointed) && aboutElement(tensorAt(pointed), pointed.at) },
        asked: current ? source.asked(current) : "",
        tiles: tiles.map((tile) => ({
          rank: tile.rank, x: tile.x, y: tile.y,
          sides: tile.sides.map((tensor) => tensor && {
            dtype: tensor.dtype, shape: tensor.shape, numel: tensor.numel, values: Array.from(tensor.data.slice(0, 64)), count: tensor.data.length, range: range(tensor), block: tensor.block,
            written: tensor.block.asDigits ? Array.from(tensor.data, (value) => element(value, tensor.dtype)) : null, changed: tensor.changed && tensor.changed.reduce((sum, one) => sum + one, 0),
          }),
        })),
        notes: notes(),
        ...drawn,
      };
    },
    destroy() {
      listeners.abort();
      unsubscribe();
      el.replaceChildren();
    },
  };
}
