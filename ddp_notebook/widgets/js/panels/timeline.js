/**
 * The timeline: a row per rank with its compute and its communication, from many seconds to microseconds.
 *
 * | on screen | means |
 * |---|---|
 * | thin grey line on top of a row | a cell runs |
 * | upper bars | forward, backward, optimizer, input; actions of a pipeline, such as F3; named blocks |
 * | lower bars | communication; white: waiting for the last rank; sends are in the upper half, receives in the lower |
 * | hatched bar with a point | under way: the share of waiting is not known yet |
 * | black bar with a cross | failed |
 * | stacked columns | operations that are too short for single bars; heights are their shares of the time |
 * | grey hatch over all rows | a step whose spans were not sent to the browser |
 * | name above rows | the host of these ranks, if there are several hosts |
 * | ribbon from row to row | the same collective: left edge arrivals, right edge ends |
 * | arrows from row to row | a remote call: to the start of its callee, and back from its end; darker: chosen |
 *
 */

import { plural } from "../data/format.js";
import { COMMUNICATION, COMPUTE, Lanes } from "../data/lanes.js";
import { isSameName, nameOf } from "../data/names.js";
import { GOING_ON } from "../data/run.js";
import { StepMarks, leftOut } from "../data/stepmarks.js";
import { askForSteps } from "../data/steps.js";
import { HEADING, MERGE_PX, Rectangles, TRANSFER, collect, hit, layoutRows, leastWidth } from "../drawing/bars.js";
import { MOST_RIBBONS, arrowsIn, callsOf, collectivesIn, endsOf } from "../drawing/links.js";
import { drawScene, xOf } from "../drawing/timeline_draw.js";
import { pan, zoom } from "../drawing/timewindow.js";
import { collectiveControl, stepControl } from "../parts/controls.js";
import { tooltip } from "../parts/tooltip.js";
import { Chosen } from "./timeline_choice.js";
import { Asking, Follow, controls, legend } from "./timeline_controls.js";
import { pointer as listen } from "./timeline_pointer.js";
import { timelineWords } from "./timeline_words.js";

/** @typedef {import("../drawing/timewindow.js").TimeWindow} TimeWindow */
/** @typedef {import("../drawing/timeline_draw.js").Scene} Scene */
/** @typedef {import("../data/names.js").Name} Name */
/** @typedef {{rank: number, row: number, which: number, lane: import("../data/lanes.js").Lane, at: number, count: number}} Found  an operation under the pointer */

const TOP = 28; // axis and steps
const MOST_STEPS = 400; // if more steps are visible, none is requested or hatched

/**
 * @param {HTMLElement} el
 * @param {import("../data/store.js").Store} store
 * @param {import("./index.js").Env} env
 * @returns {import("./index.js").Panel}
 */
export function timelinePanel(el, store, env) {
  const lanes = new Lanes();
  const steps = new StepMarks();
  const rectangles = new Rectangles();
  const chosen = new Chosen(store, lanes);
  const following = new Follow();
  const asking = new Asking(store, env);
  const { ownerDocument: document } = el;
  const bar = env.compact ? null : controls(el, following, { zoomBy, redraw: () => env.redraw(), setWindow, whole: () => limits() });
  const canvas = el.appendChild(document.createElement("canvas"));
  canvas.style.cssText = "display:block;touch-action:none;cursor:crosshair";
  const key = legend(el);
  const tip = tooltip(el);
  const pen = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  const pointer = { x: -1, y: -1, row: -1, isInside: false };
  let width = 0, height = 0, scroll = 0, run = store.run;
  let left = 52;
  let least = [MERGE_PX, MERGE_PX, MERGE_PX]; // width of the narrowest bars, by lane
  /** @type {Scene|null} */
  let scene = null;
  let drawn = { collectMs: 0, drawMs: 0, draws: 0 };
  /** @type {Found|null} */
  let found = null;
  let shownStep = store.choice.window && store.choice.step ? `${store.choice.step.cell}.${store.choice.step.step}` : "";

  const { rowOf, wordsOf, about, describe, table } = timelineWords(store, lanes);

  // ---- the window

  function limits() {
    const t1 = store.choice.paused ? store.now : Math.max(lanes.last, following.newest(store, lanes));
    const t0 = Number.isFinite(lanes.first) ? Math.min(lanes.first, steps.marks[0]?.start ?? Infinity) : 0;
    const air = Math.max((t1 - t0) / 50, 0.1);
    return { t0: t0 - air, t1: t1 + air };
  }

  function view() {
    const chosen = store.choice.window;
    if (chosen) return { t0: chosen[0], t1: chosen[1] };
    return following.window(store, lanes, steps.marks, Math.max(width - left, 50), env.reducedMotion);
  }

  /** @param {TimeWindow|null} wanted null to follow the newest */
  function setWindow(wanted) {
    store.choose({ window: wanted ? [wanted.t0, wanted.t1] : null });
  }

  /** @param {number} factor @param {number} [x] fixed position */
  function zoomBy(factor, x = (left + width) / 2) {
    const now = view();
    setWindow(zoom(now, timeAt(x, now), factor, limits()));
  }

  /** @param {number} pixels */
  function panBy(pixels) {
    const now = view();
    setWindow(pan(now, (pixels / (width - left)) * (now.t1 - now.t0), limits()));
  }

  /** @param {number} x @param {TimeWindow} view */
  function timeAt(x, { t0, t1 }) {
    return t0 + ((Math.min(Math.max(x, left), width) - left) / Math.max(width - left, 1)) * (t1 - t0);
  }

  // ---- drawing

  function draw() {
    askForSteps(store, env);
    const begun = performance.now();
    if (run !== store.run) {
      run = store.run;
      lanes.clear();
      steps.clear();
      asking.clear();
    }
    lanes.sync(store.tables.span);
    steps.sync(store.tables.step);
    showChosenStep();
    const ranks = store.shownRanks();
    left = ranks.length && height / ranks.length < 16 ? 34 : 52;
    const now = store.now;
    const seen = view();
    const layout = layoutRows(ranks.length, height - TOP, lanes.depths, store.hosts.length ? ranks.map((rank) => store.hosts[rank]) : []);
    scroll = Math.min(Math.max(scroll, 0), Math.max(0, layout.total - (height - TOP)));
    rectangles.clear();
    const counts = [0, 0, 0];
    for (const rank of ranks) lanes.ranks.get(rank)?.forEach((lane, which) => (counts[which] += lane.until(seen.t1) - lane.from(seen.t0)));
    least = counts.map((count, which) => leastWidth(width - left, count / ranks.length, least[which]));
    const box = { x: left, y: 0, width: width - left, h: 0, slots: 1, slotH: 0, column: layout.row < 16 ? 2 * MERGE_PX : MERGE_PX };
    ranks.forEach((rank, row) => {
      const y = TOP + layout.tops[row] - scroll;
      if (y + layout.row < TOP || y > height) return;
      const ofRank = lanes.ranks.get(rank);
      for (let which = 0; ofRank && which < 3; which++) {
        const part = layout.lanes[which];
        Object.assign(box, { y: y + part.y, h: part.h, slots: part.slots, slotH: part.slotH });
        collect(rectangles, ofRank[which], seen, box, now, 1 / env.dpr, least[which]);
      }
    });
    const inSight = steps.within(seen);
    const missing = inSight.length > MOST_STEPS ? [] : leftOut(inSight, ranks.slice(0, 4).map((rank) => lanes.of(rank)), GOING_ON.has(store.state) && !store.choice.paused ? now : Infinity);
    const missingWords = asking.about(missing, seen, ranks, () => env.redraw());
    scene = {
      pen, colours: env.colours, dpr: env.dpr, width, height, view: seen, left, top: TOP, scroll, ranks, layout, rectangles,
      steps: inSight, missing, missingWords, ribbons: [], arrows: [], wordsOf, hoverRow: pointer.isInside ? pointer.row : -1, pointerX: pointer.isInside ? pointer.x : -1,
    };
    found = pointer.isInside ? find(scene, pointer.x, pointer.y) : null;
    const collectMs = performance.now() - begun;
    scene.ribbons = ribbons(scene, now);
    scene.arrows = arrowsIn(scene, lanes, store.tables.span, [chosen.ends(), found && remoteUnder(found)], now);
    drawScene(scene);
    bar?.update(!store.choice.window);
    key.update(env.colours, lanes.kinds);
    showTip(scene);
    drawn = { collectMs, drawMs: performance.now() - begun, draws: drawn.draws + 1 };
  }

  /** Show the text at the pointer, or below all rows for the chosen remote call. @param {Scene} scene */
  function showTip(scene) {
    const call = found ? null : chosen.remote();
    const x = call && xOf(scene, call.lane.start[call.at]);
    if (call && x !== null && x >= left - 1 && x <= width) tip.show(aboutChosen(), x, canvas.offsetTop + Math.min(TOP + scene.layout.total - scroll, height) - 8, width);
    else tip.show(found && about(found, remoteUnder(found)), pointer.x, canvas.offsetTop + pointer.y, width);
  }

  /** Text about the chosen remote call; null if none is chosen. */
  function aboutChosen() {
    const call = chosen.remote();
    return call && about({ ...call, count: 1 }, chosen.ends());
  }

  /** Zoom to a step that was chosen on the axis or in another panel. */
  function showChosenStep() {
    const { step } = store.choice;
    const name = step ? `${step.cell}.${step.step}` : "";
    if (name === shownStep) return;
    shownStep = name;
    const mark = step && steps.of(step.cell, step.step);
    if (!step) setWindow(null);
    else if (mark) setWindow({ t0: mark.start - (mark.end - mark.start) / 30, t1: mark.end + (mark.end - mark.start) / 30 });
  }

  /** Text about left-out or merged data; "" if there is none. */
  function note() {
    if (!scene) return "";
    const parts = [];
    if (rectangles.merged) parts.push(`${plural(rectangles.merged, "short operation")} drawn as shares of time: zoom in to see single operations`);
    const { missing } = scene;
    if (missing.length) parts.push(`${plural(missing.length, "step")} of ${scene.steps.length} in sight not sent to this page (hatched)${asking.words}`);
    if (store.notes.remote_shown_of > 1) parts.push(`of the remote calls 1 in ${store.notes.remote_shown_of} is sent while they run`);
    if (!missing.length && store.stepsShownOf > 1) parts.push(`of the steps 1 in ${store.stepsShownOf} is sent while they run`);
    return parts.join("; ");
  }

  /**
   * The collectives with a ribbon: the chosen one, the one under the pointer, and all if they are few.
   * @param {Scene} scene
   * @param {number} now
   *
   */
  function ribbons(scene, now) {
    const { ranks, layout } = scene;
    const { span } = store.tables;
    /** @type {Scene["ribbons"]} */
    const made = [];
    const add = /** @param {import("../drawing/links.js").Call[]} calls @param {boolean} isChosen */ (calls, isChosen) => {
      const part = layout.lanes[COMMUNICATION];
      const bars = calls.map(({ row, lane, at }) => {
        const top = TOP + layout.tops[row] - scroll + part.y + (part.slots > 1 ? lane.slot[at] * part.slotH : 0);
        const end = lane.end[at] === Infinity ? now : lane.end[at];
        return { row, x0: clampX(xOf(scene, lane.start[at])), x1: clampX(xOf(scene, end)), top, bottom: top + part.slotH };
      });
      const isSeen = bars.some(({ x0, x1 }) => x1 >= left && x0 <= width);
      if (isSeen) made.push({ bars, isChosen });
    };
    const names = layout.row >= 12 && ranks.length > 1 ? collectivesIn(lanes.of(ranks[0])[COMMUNICATION], span, scene.view, MOST_RIBBONS) : null;
    const { collective } = store.choice;
    for (const name of names ?? []) {
      if (isSameName(name, collective)) continue;
      add(callsOf(lanes, span, name, ranks, name.around), false);
    }
    if (collective) add(chosen.calls(), true);
    const under = found && nameUnder(found);
    if (found && under && !isSameName(under, collective)) add(callsOf(lanes, span, under, ranks, found.lane.start[found.at]), true);
    return made;
  }

  /** @param {Found} one */
  const remoteUnder = (one) => endsOf(lanes, store.tables.span, scene?.ranks ?? [], one);

  // Canvases lose precision far outside of the picture.
  const clampX = /** @param {number} x */ (x) => Math.min(Math.max(x, -2000), width + 2000);

  // ---- what is under the pointer

  /** @param {Scene} scene @param {number} x @param {number} y @returns {Found|null} */
  function find(scene, x, y) {
    const { layout, ranks, view: seen } = scene;
    const row = layout.tops.findLastIndex((top) => top <= y - TOP + scroll);
    pointer.row = row >= 0 && y >= TOP && y - TOP + scroll < layout.tops[row] + layout.row ? row : -1;
    scene.hoverRow = pointer.row;
    if (pointer.row < 0 || x < left) return null;
    const within = y - TOP + scroll - layout.tops[row];
    const perPixel = (seen.t1 - seen.t0) / (width - left);
    for (const which of [COMMUNICATION, COMPUTE, 0]) {
      const part = layout.lanes[which];
      if (within < part.y - (which ? 1 : 0) || (which && within > part.y + part.h + 1) || (!which && within > part.h + 1)) continue;
      const slot = part.slots > 1 ? Math.min(Math.floor(Math.max(within - part.y, 0) / part.slotH), part.slots - 1) : -1;
      const at = hit(lanes.of(ranks[row])[which], timeAt(x, seen), slot, perPixel, store.now, least[which]);
      if (at) return { rank: ranks[row], row, which, lane: lanes.of(ranks[row])[which], ...at };
    }
    return null;
  }

  /** @param {Found} one @returns {Name|null} */
  function nameUnder(one) {
    if (one.lane.kind[one.at] !== TRANSFER) return null;
    const row = rowOf(one);
    return row && nameOf(/** @type {Record<keyof Name, number>} */ (row));
  }

  // ---- pointer and keys

  listen(canvas, {
    zoomBy,
    panBy,
    click,
    hasFocus: () => el.contains(document.activeElement),
    scrollBy(pixels) {
      scroll += pixels;
    },
    moved(at) {
      Object.assign(pointer, at, { isInside: true });
      env.redraw();
    },
    left() {
      pointer.isInside = false;
      env.redraw();
    },
  });

  /** @param {import("./timeline_pointer.js").Point} at */
  function click(at) {
    if (!scene) return;
    if (at.y < TOP) {
      const time = timeAt(at.x, scene.view);
      const step = scene.steps.find((one) => one.start <= time && time < one.end);
      if (step) store.choose({ step: { cell: step.cell, step: step.step } });
      return;
    }
    const { x, y } = at;
    const one = find(scene, x, y);
    chosen.choose((one && nameUnder(one)) || null, one && chosen.remoteAt(one));
  }

  /** @param {KeyboardEvent} event @returns {boolean} whether the panel has used the key */
  function onKey(event) {
    const tag = /** @type {Element} */ (event.target)?.tagName ?? "";
    if (event.altKey || event.metaKey || event.ctrlKey || /^(INPUT|SELECT|TEXTAREA)$/.test(tag) || (tag === "BUTTON" && event.key === "Enter")) return false;
    const centre = pointer.isInside ? pointer.x : undefined;
    const page = (width - left) / (event.shiftKey ? 1 : 8);
    /** @type {Record<string, () => void>} */
    const actions = {
      ArrowLeft: () => panBy(-page), a: () => panBy(-page), ArrowRight: () => panBy(page), d: () => panBy(page),
      "+": () => zoomBy(1.6, centre), "=": () => zoomBy(1.6, centre), w: () => zoomBy(1.6, centre),
      "-": () => zoomBy(1 / 1.6, centre), s: () => zoomBy(1 / 1.6, centre),
      ArrowUp: () => scrollRows(-1), ArrowDown: () => scrollRows(1),
      f: () => setWindow(null), End: () => setWindow(null), Home: () => setWindow(limits()),
      ",": () => next(-1), ".": () => next(1), Enter: () => showChosen(),
    };
    const action = actions[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!action || (event.key === "Enter" && !chosen.isAny)) {
      if (event.key !== "Escape" || !chosen.isAny) return false;
      chosen.choose(null);
      return true;
    }
    action();
    env.redraw();
    return true;
  }

  /** @param {number} rows */
  function scrollRows(rows) {
    scroll += rows * (scene?.layout.row ?? 0);
  }

  /** Choose and show the previous or next collective or remote call. @param {number} by */
  function next(by) {
    const start = chosen.next(by);
    const seen = view();
    if (start !== null && (start < seen.t0 || start > seen.t1)) showChosen(seen.t1 - seen.t0);
  }

  /** Zoom to the choice. @param {number} [length] ms of the window; by default the choice fills a third of it */
  function showChosen(length) {
    const extent = chosen.extent(store.now);
    if (!extent) return;
    const { t0, t1 } = extent;
    const around = length ?? Math.max(3 * (t1 - t0), 0.01);
    setWindow({ t0: (t0 + t1 - around) / 2, t1: (t0 + t1 + around) / 2 });
  }

  return {
    controls: env.compact ? [] : [stepControl(document, store), collectiveControl(document, store)],
    draw,
    describe() {
      const chosenCall = aboutChosen();
      return describe(view(), [note(), chosenCall && `chosen: ${chosenCall.join("; ")}`].filter(Boolean).join(". "));
    },
    table: () => table(view()),
    onKey,
    notes: () => [note()].filter(Boolean),
    height: () => Math.min(Math.max(store.worldSize * (store.worldSize > 16 ? 9 : store.worldSize > 6 ? 34 : 76), 120), 620) + TOP + HEADING * new Set(store.hosts).size + (env.compact ? 24 : 64),
    resize(newWidth, newHeight) {
      width = newWidth;
      height = Math.max(60, newHeight - (bar?.height() ?? 0) - key.height());
      canvas.width = Math.round(width * env.dpr);
      canvas.height = Math.round(height * env.dpr);
      canvas.style.width = `${width}px`;
      canvas.style.height = `${height}px`;
    },
    state() {
      const { missing = [], ribbons: joined = [], ranks = [] } = scene ?? {};
      const all = rectangles;
      return {
        window: scene && [scene.view.t0, scene.view.t1], isFollowing: !store.choice.window, rectangles: all.total, single: all.single, merged: all.merged, columns: all.columns,
        links: joined.length, linked: joined.map((one) => one.bars.length), steps: steps.marks.length, missing: missing.map((one) => one.step), asking: asking.isWaiting, rows: ranks.length,
        rowHeight: scene?.layout.row, rowTops: scene?.layout.tops, headings: scene?.layout.headings, scroll, spans: lanes.count, arrows: scene?.arrows ?? [], underPointer: found ? about(found, remoteUnder(found)) : null, chosen: store.choice.collective, chosenCall: aboutChosen(), note: note(), left, top: TOP, ...drawn,
      };
    },
    destroy() {
      asking.unsubscribe();
      asking.clear();
      el.replaceChildren();
    },
  };
}
