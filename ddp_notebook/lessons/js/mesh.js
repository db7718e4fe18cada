/** A training run on a mesh: the ranks in a grid, the traffic along rows and columns in one step, a guess. */

import { button, bytes, choice, enable, make, newId, radios, svg, verdict } from "./parts.js";
import { ticks } from "./scene.js";

/** @typedef {import("./states.js").MeshState} State */
/** @typedef {import("./states.js").MeshCall} Call */

const WIDTH = 520;
const ROW = 96;
const NODE = 17;
const STEP = { width: 760, left: 64, lane: 26 };
const ALL = "all";
const WAYS = /** @type {const} */ (["row", "column"]);

/**
 * The data that one rank has moved, by direction and purpose: `{way, purpose, count, nbytes}`, in the order of the
 * first calls.
 * @param {Call[]} calls @param {number} rank
 */
export function moved(calls, rank) {
  /** @type {Map<string, {way: "row"|"column", purpose: string, count: number, nbytes: number}>} */
  const found = new Map();
  for (const { rank: whose, way, purpose, nbytes } of calls) {
    if (whose !== rank) continue;
    const key = `${way}|${purpose}`;
    const one = found.get(key) ?? { way, purpose, count: 0, nbytes: 0 };
    found.set(key, { ...one, count: one.count + 1, nbytes: one.nbytes + nbytes });
  }
  return [...found.values()];
}

/**
 * The rows and columns of the grid, with the bytes that one of their ranks has moved along them.
 * @param {Call[]} calls @param {number} rows @param {number} columns
 * @returns {{way: "row"|"column", at: number, nbytes: number}[]}
 */
export function lines(calls, rows, columns) {
  const sum = /** @param {number} rank @param {string} way */ (rank, way) => calls.filter((one) => one.rank === rank && one.way === way).reduce((all, one) => all + one.nbytes, 0);
  return [
    ...Array.from({ length: columns > 1 ? rows : 0 }, (_, at) => ({ way: WAYS[0], at, nbytes: sum(at * columns, "row") })),
    ...Array.from({ length: rows > 1 ? columns : 0 }, (_, at) => ({ way: WAYS[1], at, nbytes: sum(at, "column") })),
  ];
}

/** @param {HTMLElement} el @param {import("./link.js").Link<State>} link */
export function mesh(el, link) {
  const document = el.ownerDocument;
  const state = () => link.state();
  let guess = state().guess ?? "";
  let rank = 0;
  let purpose = ALL;
  let drawnFor = "";

  const controls = make(document, "div", { class: "ddpl-controls" });
  const question = make(document, "fieldset", { class: "ddpl-question" });
  const run = button(document, "Train on the ranks", doRun, { class: "ddpl-main" });
  const said = make(document, "div", { role: "status" });
  const views = make(document, "div", { class: "ddpl-controls ddpl-views" });
  const picture = make(document, "div", { class: "ddpl-scroll", tabIndex: 0, role: "region", "aria-label": "the grid of the ranks" });
  const after = make(document, "div", { class: "ddpl-scroll", tabIndex: 0, role: "region", "aria-label": "one step" });
  el.append(controls, question, make(document, "div", { class: "ddpl-actions" }, run), said, views, picture, after);

  async function doRun() {
    await link.ask({ do: "run", guess });
  }

  /** @param {State} now */
  function drawControls(now) {
    const all = () => [...controls.querySelectorAll("select, input")];
    const focused = all().indexOf(/** @type {Element} */ (document.activeElement));
    const configure = /** @param {object} options */ (options) => link.ask({ do: "configure", options: { rows: now.rows, way: now.way, is_by_rank: now.by_rank, ...options } });
    const box = make(document, "input", { type: "checkbox", id: newId("own"), checked: now.by_rank });
    box.addEventListener("change", () => configure({ is_by_rank: box.checked }));
    controls.replaceChildren(
      choice(document, "training", now.ways, now.way, (way) => configure({ way })),
      choice(document, "mesh", now.heights.map((rows) => [rows, `${rows} x ${now.world_size / rows}`]), now.rows, (rows) => configure({ rows: Number(rows) })),
      ...(now.way === "HSDP" ? [] : [make(document, "span", { class: "ddpl-field" }, box, make(document, "label", { for: box.id }, "every rank its own batch (a wrong use)"))]),
    );
    if (focused >= 0) /** @type {HTMLElement|undefined} */ (all()[focused])?.focus();
    radios(document, question, now.question, now.choices, guess, (words) => (guess = words));
  }

  /** @param {State} now */
  function drawViews(now) {
    const purposes = [...new Set(now.calls.map((one) => one.purpose))];
    if (!purposes.includes(purpose)) purpose = ALL;
    const all = () => [...views.querySelectorAll("select")];
    const focused = all().indexOf(/** @type {HTMLSelectElement} */ (document.activeElement));
    views.replaceChildren(
      choice(document, "look at", Array.from({ length: now.world_size }, (_, one) => [one, `rank ${one}`]), rank, (value) => {
        rank = Number(value);
        draw();
      }),
      choice(document, "what is sent", [[ALL, "all of it"], ...purposes.map((one) => /** @type {[string, string]} */ ([one, one]))], purpose, (value) => {
        purpose = value;
        draw();
      }),
    );
    if (focused >= 0) all()[focused].focus();
    views.hidden = !now.run;
  }

  /** @param {State} now */
  function grid(now) {
    const { rows, columns } = now;
    const shown = now.calls.filter((one) => purpose === ALL || one.purpose === purpose);
    const all = lines(shown, rows, columns);
    const most = Math.max(1, ...lines(now.calls, rows, columns).map((one) => one.nbytes));
    const x = /** @param {number} c */ (c) => (columns === 1 ? WIDTH / 2 : 90 + ((WIDTH - 180) * c) / (columns - 1));
    const y = /** @param {number} r */ (r) => 34 + r * ROW;
    const height = 34 + (rows - 1) * ROW + 44;
    const words = all.filter((one) => one.nbytes).map((one) => `${one.way} ${one.at}: ${bytes(one.nbytes)} a rank`);
    const found = svg(document, "svg", { viewBox: `0 0 ${WIDTH} ${height}`, class: "ddpl-mesh", role: "img", "aria-label": `${rows} rows of ${columns} ranks. ${now.run ? words.join("; ") || "Nothing is sent" : "Not trained yet"}.` });
    const own = { row: Math.floor(rank / columns), column: rank % columns };
    const labels = [];
    for (const { way, at, nbytes } of all) {
      const ends = way === "row" ? { x1: x(0), x2: x(columns - 1), y1: y(at), y2: y(at) } : { x1: x(at), x2: x(at), y1: y(0), y2: y(rows - 1) };
      const line = svg(document, "line", { ...ends, class: `ddpl-along-${way}${nbytes ? "" : " ddpl-silent"}${own[way] === at ? "" : " ddpl-others"}` });
      line.style.strokeWidth = String(nbytes ? 2 + (14 * nbytes) / most : 1);
      found.append(line);
      if (!nbytes) continue;
      const place = way === "row" ? { x: (x(0) + x(1)) / 2, y: y(at) - 12 } : { x: x(at) + 12, y: (y(0) + y(1)) / 2 + 4 };
      labels.push(svg(document, "text", { ...place, class: way === "row" ? "ddpl-bytes" : "ddpl-bytes ddpl-start" }, bytes(nbytes)));
    }
    for (let one = 0; one < now.world_size; one++) {
      const [r, c] = [Math.floor(one / columns), one % columns];
      const node = svg(document, "circle", { cx: x(c), cy: y(r), r: NODE, class: "ddpl-node" });
      node.style.fill = `color-mix(in srgb, var(--rank${one % 8}) ${one === rank ? 45 : 18}%, var(--paper))`;
      node.style.stroke = `var(--rank${one % 8})`;
      found.append(node, svg(document, "text", { x: x(c), y: y(r) + 5, class: "ddpl-rank" }, String(one)));
      if (now.run) labels.push(svg(document, "text", { x: x(c), y: y(r) + NODE + 15, class: "ddpl-bytes" }, `batch ${now.batches[one]}, holds ${Math.round(100 * now.held[one])} %`));
    }
    found.append(...labels);
    return found;
  }

  /** The step of the chosen rank: times and directions of its messages. @param {State} now */
  function step(now) {
    const mine = now.calls.filter((one) => one.rank === rank);
    const end = Math.max(0.1, ...mine.map((one) => one.end)) * 1.02;
    const { width, left, lane } = STEP;
    const x = /** @param {number} ms */ (ms) => left + ((width - left - 12) * ms) / end;
    const height = 2 * lane + 24;
    const found = svg(document, "svg", { viewBox: `0 0 ${width} ${height}`, class: "ddpl-timeline", role: "img", "aria-label": `${mine.length} collectives of rank ${rank} in one step: ${mine.map((one) => `${one.purpose} along the ${one.way}`).join(", ")}` });
    for (const ms of ticks(end)) {
      found.append(svg(document, "line", { x1: x(ms), x2: x(ms), y1: 0, y2: 2 * lane, class: "ddpl-tick" }), svg(document, "text", { x: x(ms), y: 2 * lane + 15, class: "ddpl-ms" }, `${ms}${ms ? "" : " ms"}`));
    }
    WAYS.forEach((way, at) => {
      found.append(svg(document, "text", { x: 2, y: at * lane + 17, class: "ddpl-row-name" }, way));
      for (const one of mine.filter((call) => call.way === way)) {
        const bar = svg(document, "rect", { x: x(one.start), y: at * lane + 4, width: Math.max(3, x(one.end) - x(one.start)), height: lane - 8, class: `ddpl-went-${way}${purpose === ALL || purpose === one.purpose ? "" : " ddpl-others"}` });
        bar.append(svg(document, "title", {}, `${one.purpose}${one.module ? ` of ${one.module}` : ""}: ${bytes(one.nbytes)}, ${(one.end - one.start).toFixed(2)} ms`));
        found.append(bar);
      }
    });
    return found;
  }

  /** @param {State} now */
  function table(now) {
    const head = ["way", "what for", "calls", "bytes"].map((words) => make(document, "th", { scope: "col" }, words));
    const rows = moved(now.calls, rank).map(({ way, purpose: what, count, nbytes }) => make(document, "tr", {}, ...[way, what, String(count), bytes(nbytes)].map((words) => make(document, "td", {}, words))));
    return make(document, "table", { class: "ddpl-moved" }, make(document, "caption", {}, `What rank ${rank} moves in one step`), make(document, "thead", {}, make(document, "tr", {}, ...head)), make(document, "tbody", {}, ...rows));
  }

  function draw() {
    const now = state();
    const key = [now.way, now.rows, now.by_rank].join("|");
    if (key !== drawnFor) {
      if (drawnFor) guess = now.guess ?? "";
      drawnFor = key;
      drawControls(now);
    } else if (now.error) drawControls(now); // the choice was invalid
    drawViews(now);
    picture.replaceChildren(grid(now));
    after.replaceChildren(...(now.run && now.calls.length ? [step(now), table(now)] : []));
    after.hidden = !now.run;
    said.replaceChildren(...verdict(document, now.said, now.right));
    enable(run, !link.isBusy());
  }

  link.onState(draw);
  link.onWork((_, isBusy) => enable(run, !isBusy));
  draw();
  return { inspect: () => ({ guess, rank, purpose }) };
}
