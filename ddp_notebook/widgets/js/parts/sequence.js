/**
 * Calls between ranks as a sequence diagram: a column for each rank, time downwards, an arrow for each call.
 *
 * | on screen | means |
 * |---|---|
 * | arrow | a call, from its caller to its callee; in the colour of the enclosing call |
 * | upright bar | execution; adjacent bars run at the same time |
 * | dashed arrow | its answer |
 * | dotted arrow, in a backward | gradients, in the opposite direction of the call |
 * | box below | a value that a rank owns; circles: ranks with a reference to it, arrows: the source of the reference |
 *
 * A line is one event and not a duration: calls take between microseconds and milliseconds.
 *
 */

import { bytes } from "../data/format.js";
import { make } from "./dom.js";
import { arrow, svg } from "./svg.js";

/** @typedef {import("../calls.js").RemoteCall} Call */
/** @typedef {import("../calls.js").RemoteReference} Reference */
/** @typedef {import("../calls.js").RemotePair} Pair */
/** @typedef {{calls: Call[], references: Reference[], pairs: Pair[], world_size: number}} Drawn */
/** @typedef {{at: number, what: "sent"|"begun"|"ended"|"done"|"returned"|"backward"|"gone", call: number, words: string}} Moment  at: milliseconds; call: place in `calls`, or in `pairs` */

const WIDTH = 760;
const LEFT = 58;
const HEAD = 34;
const LINE = 24;
const BAR = 11;
const BOX = 44; // height of a reference's row

/**
 * The events in the order of time.
 * @param {Drawn} drawn @returns {Moment[]}
 *
 */
export function moments({ calls, pairs, references }) {
  /** @type {Moment[]} */
  const found = [];
  const order = { sent: 0, begun: 1, ended: 2, done: 3, returned: 4, backward: 5, gone: 6 };
  calls.forEach((call, at) => {
    const inside = call.parent === null || call.parent === undefined ? "" : `, inside of ${short(calls[call.parent].function)}`;
    const name = short(call.function);
    found.push({ at: call.sent, what: "sent", call: at, words: call.kind === "to_here" ? `rank ${call.src} asks rank ${call.dst} for a copy of what a reference means${inside}` : `rank ${call.src} calls ${name} on rank ${call.dst}${call.nbytes === null ? "" : ` (${bytes(call.nbytes)})`}${inside}` });
    if (call.begun !== null) found.push({ at: call.begun, what: "begun", call: at, words: `rank ${call.dst} begins ${name}` });
    if (call.ended !== null) found.push({ at: call.ended, what: "ended", call: at, words: `rank ${call.dst} ${call.error ? `fails in ${name}: ${call.error}` : `has left ${name}`}` });
    if (isLater(call)) found.push({ at: Number(call.done), what: "done", call: at, words: `rank ${call.dst} puts the answer into the future of ${name}` });
    if (call.returned !== null) found.push({ at: call.returned, what: "returned", call: at, words: `rank ${call.src} has the answer of ${call.kind === "to_here" ? "to_here" : name}` });
  });
  pairs.forEach((pair, at) => {
    if (pair.at !== null) found.push({ at: pair.at, what: "backward", call: at, words: `backward: the gradient goes from rank ${pair.dst} to rank ${pair.src}` });
  });
  references.forEach((one, at) => {
    const what = one.what || "a value";
    for (const user of one.users) if (user.deleted !== null && user.rank !== one.owner) found.push({ at: user.deleted, what: "gone", call: at, words: `rank ${user.rank} releases its reference to ${what}` });
    if (one.deleted !== null) found.push({ at: one.deleted, what: "gone", call: at, words: `the last reference is gone: rank ${one.owner} deletes ${what}` });
  });
  return found.sort((a, b) => a.at - b.at || order[a.what] - order[b.what]);
}

/** Whether the answer was set in a future after the function had returned. @param {Call} call */
function isLater(call) {
  return call.done !== null && call.ended !== null && call.done > call.ended;
}

/** `Agent.select_action` is `select_action`. @param {string} name */
export function short(name) {
  return name.slice(name.lastIndexOf(".") + 1);
}

/**
 * Colour of the bar of each call, as the number of a rank's colour; null if it has made no calls.
 * @param {Call[]} calls @returns {(number|null)[]}
 *
 */
export function colours(calls) {
  const parents = [...new Set(calls.map((call) => call.parent).filter((parent) => parent !== null && parent !== undefined))].sort((a, b) => Number(a) - Number(b));
  return calls.map((_, at) => (parents.includes(at) ? parents.indexOf(at) % 8 : null));
}

/**
 * Lane of each call on its rank: overlapping bars are drawn next to each other.
 * @param {Call[]} calls @param {Map<string, number>} rows
 *
 */
export function lanes(calls, rows) {
  /** @type {Map<number, number[]>} */
  const ends = new Map(); // by rank, the last row of each lane
  const found = calls.map(() => 0);
  const begins = calls.map((call, at) => ({ call, at, row: rows.get(`${at} begun`) ?? -1 })).filter(({ row }) => row >= 0);
  for (const { call, at, row } of begins.sort((a, b) => a.row - b.row)) {
    const mine = ends.get(call.dst) ?? [];
    ends.set(call.dst, mine);
    let lane = mine.findIndex((end) => end < row);
    if (lane < 0) lane = mine.length;
    mine[lane] = rows.get(`${at} ended`) ?? Infinity;
    found[at] = lane;
  }
  return found;
}

/**
 * The picture of the first `shown` moments.
 * @param {Document} document @param {Drawn} drawn @param {number} shown @param {string} words  the picture in a sentence
 *
 */
export function sequence(document, drawn, shown, words) {
  const { calls, references, pairs, world_size: n } = drawn;
  const all = moments(drawn);
  const rows = new Map(all.map((moment, row) => [`${moment.call} ${moment.what}`, row]));
  const now = shown ? all[shown - 1].at : -Infinity;
  const x = /** @param {number} rank */ (rank) => LEFT + ((WIDTH - LEFT) * (rank + 0.5)) / n;
  const y = /** @param {number} row */ (row) => HEAD + 14 + row * LINE;
  const foot = y(all.length) + 4;
  const height = foot + (references.length ? 26 + references.length * BOX : 0);
  const picture = svg(document, "svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": words, class: "ddps-sequence" });
  const own = colours(calls);
  const side = lanes(calls, rows);
  const tint = /** @param {number|null|undefined} of */ (of) => (of === null || of === undefined || own[of] === null ? "var(--soft)" : `var(--rank${own[of]})`);

  for (let rank = 0; rank < n; rank++) {
    const head = svg(document, "rect", { x: x(rank) - 36, y: 4, width: 72, height: 22, rx: 4, class: "ddps-lifehead" });
    picture.append(svg(document, "line", { x1: x(rank), x2: x(rank), y1: 26, y2: height - 4, class: "ddps-lifeline" }), head, svg(document, "text", { x: x(rank), y: 20, class: "ddps-lifename" }, `rank ${rank}`));
  }
  const when = all.map(({ at }) => `${at < 9.95 ? at.toFixed(1) : at.toFixed(0)} ms`);
  when.forEach((words, row) => {
    if (row < shown && words !== when[row - 1]) picture.append(svg(document, "text", { x: 2, y: y(row) + 4, class: "ddps-when" }, words));
  });
  if (shown) picture.append(svg(document, "rect", { x: LEFT - 8, y: y(shown - 1) - LINE / 2, width: WIDTH - LEFT + 4, height: LINE, rx: 4, class: "ddps-now" }));

  // Drawing order: executions, then arrows, then labels.
  /** @type {SVGElement[]} */
  const labels = [];
  calls.forEach((call, at) => {
    const [begun, ended] = [rows.get(`${at} begun`), rows.get(`${at} ended`)];
    if (begun === undefined || begun >= shown) return;
    const end = Math.min(ended ?? shown - 1, shown - 1);
    const bar = svg(document, "rect", { x: x(call.dst) - BAR / 2 + side[at] * (BAR + 3), y: y(begun) - 5, width: BAR, height: y(end) - y(begun) + 10, rx: 2, class: `ddps-runs${call.error ? " ddps-failed" : ""}` });
    bar.style.fill = `color-mix(in srgb, ${tint(own[at] === null ? call.parent : at)} ${own[at] === null ? 35 : 70}%, var(--paper))`;
    bar.style.stroke = tint(own[at] === null ? call.parent : at);
    picture.append(bar);
  });
  calls.forEach((call, at) => {
    const colour = tint(call.parent);
    const edge = /** @param {number} rank @param {number} lane */ (rank, lane) => x(rank) + (call.src === call.dst ? 0 : (lane * (BAR + 3)));
    const from = edge(call.src, call.parent === null || call.parent === undefined ? 0 : side[call.parent]);
    const to = edge(call.dst, side[at]);
    const left = ["done", "ended"].find((what) => (rows.get(`${at} ${what}`) ?? Infinity) < (rows.get(`${at} returned`) ?? 0)) ?? "begun";
    const ways = [["sent", "begun", from, to, "ddps-sent-call"], [left, "returned", to, from, "ddps-answer"]];
    // torch runs the call without Python
    if (call.begun === null) ways.splice(0, 2, ["sent", "sent", from, to, "ddps-sent-call"], ["returned", "returned", to, from, "ddps-answer"]);
    for (const [begin, end, x1, x2, kind] of ways) {
      const [a, b] = [rows.get(`${at} ${begin}`), rows.get(`${at} ${end}`)];
      if (a === undefined || a >= shown || (kind === "ddps-answer" && (b === undefined || b >= shown))) continue;
      const isThere = b !== undefined && b < shown; // otherwise it is still under way
      const last = isThere ? y(b) : y(shown - 1);
      const end_x = isThere ? Number(x2) : (Number(x1) + Number(x2)) / 2;
      const gap = Number(x1) < Number(x2) ? BAR / 2 + 1 : -BAR / 2 - 1;
      const line = call.src === call.dst ? itself(document, x(call.src), y(a), last, kind) : arrow(document, [Number(x1) + gap, y(a)], [end_x - gap, last], { class: String(kind) });
      line.style.stroke = line.style.fill = colour;
      picture.append(line);
    }
    const sent = rows.get(`${at} sent`) ?? 0;
    if (sent >= shown) return;
    const toRight = call.dst >= call.src;
    const name = call.kind === "to_here" ? "to_here" : short(call.function);
    labels.push(svg(document, "text", { x: from + (toRight ? 12 : -12), y: y(sent) - 5, class: `ddps-what${toRight ? "" : " ddps-end"}` }, call.kind === "remote" ? `remote ${name}` : name));
  });
  pairs.forEach((pair, at) => {
    const row = rows.get(`${at} backward`);
    if (row === undefined || row >= shown) return;
    const gap = pair.dst < pair.src ? 7 : -7;
    picture.append(arrow(document, [x(pair.dst) + gap, y(row)], [x(pair.src) - gap, y(row)], { class: "ddps-gradient" }));
    labels.push(svg(document, "text", { x: x(pair.dst) + 2 * gap, y: y(row) - 5, class: `ddps-what${gap > 0 ? "" : " ddps-end"}` }, "gradient"));
  });
  picture.append(...labels, ...graph(document, references, now, foot, x));
  return picture;
}

/** A call of a rank to itself. @param {Document} document @param {number} x @param {number} from @param {number} to @param {unknown} kind */
function itself(document, x, from, to, kind) {
  const end = Math.max(to, from + 6);
  const side = kind === "ddps-answer" ? -1 : 1;
  const out = x + side * 30;
  return svg(
    document,
    "g",
    { class: String(kind) },
    svg(document, "polyline", { points: `${x + side * 6},${from} ${out},${from} ${out},${end} ${x + side * 12},${end}`, fill: "none" }),
    svg(document, "polygon", { points: `${x + side * 6},${end} ${x + side * 13},${end - 4} ${x + side * 13},${end + 4}` }),
  );
}

/**
 * The references: owners, and the ranks that references came from.
 * @param {Document} document @param {Reference[]} references @param {number} now @param {number} top @param {(rank: number) => number} x
 *
 */
function graph(document, references, now, top, x) {
  if (!references.length) return [];
  /** @type {SVGElement[]} */
  const found = [svg(document, "text", { x: 2, y: top + 12, class: "ddps-when" }, "references")];
  references.forEach((one, at) => {
    const y = top + 26 + at * BOX + BOX / 2;
    const is = /** @param {number|null} deleted */ (deleted) => (deleted !== null && deleted <= now ? " ddps-gone" : "");
    if (one.made === null || one.made > now) return;
    for (const user of one.users) {
      if (user.since === null || user.since > now || user.rank === one.owner) continue;
      const from = user.parent === null ? one.owner : user.parent;
      const gap = x(user.rank) > x(from) ? 1 : -1;
      const kind = { class: `ddps-fork${is(user.deleted)}` };
      if (Math.abs(user.rank - from) === 1) found.push(arrow(document, [x(from) + gap * (from === one.owner ? 38 : 12), y], [x(user.rank) - gap * 12, y], kind));
      else if (from !== user.rank) found.push(around(document, x(from) + gap * (from === one.owner ? 30 : 8), x(user.rank) - gap * 7, y, kind));
      found.push(svg(document, "circle", { cx: x(user.rank), cy: y, r: 9, class: `ddps-user${is(user.deleted)}` }));
    }
    found.push(
      svg(document, "rect", { x: x(one.owner) - 37, y: y - 13, width: 74, height: 26, rx: 4, class: `ddps-owner${is(one.deleted)}` }),
      svg(document, "text", { x: x(one.owner), y: y + 4, class: `ddps-owned${is(one.deleted)}` }, one.what || "a value"),
    );
  });
  return found;
}

/**
 * An arrow that passes below the elements between its ends.
 * @param {Document} document
 * @param {number} from
 * @param {number} to
 * @param {number} y
 * @param {Record<string, string>} kind
 */
function around(document, from, to, y, kind) {
  const side = to > from ? 1 : -1;
  const [top, low] = [y + 9, y + 21];
  const head = `${to},${top} ${to - side * 9},${top + 3} ${to - side * 4},${top + 9}`;
  return svg(document, "g", kind, svg(document, "path", { d: `M${from},${y + 13} C${from + side * 20},${low} ${to - side * 30},${low} ${to - side * 4},${top + 4}`, fill: "none" }), svg(document, "polygon", { points: head }));
}

/**
 * All calls in a table, for screen readers.
 * @param {Document} document @param {Drawn} drawn
 *
 */
export function callsTable(document, { calls }) {
  const head = make(document, "tr", {}, ...["caller", "runs on", "function", "inside of", "sent", "begun", "ended", "answered"].map((words) => make(document, "th", { scope: "col" }, words)));
  const time = /** @param {number|null} ms */ (ms) => (ms === null ? "" : `${ms.toFixed(2)} ms`);
  const body = calls.map((call) =>
    make(
      document,
      "tr",
      {},
      ...[String(call.src), String(call.dst), call.kind === "to_here" ? "to_here" : call.function, call.parent === null || call.parent === undefined ? "the cell" : short(calls[call.parent].function), time(call.sent), time(call.begun), time(call.ended), time(call.returned)].map((words) => make(document, "td", {}, words)),
    ),
  );
  return make(document, "table", { class: "ddps-calls" }, make(document, "thead", {}, head), make(document, "tbody", {}, ...body));
}
