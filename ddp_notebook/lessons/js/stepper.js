/** An algorithm, one step at a time: the ranks on a circle with the bytes on their links, and their chunks. */

import { arrow, button, bytes, cell, choice, enable, field, figure, inWords, legend, make, newId, svg, typed } from "./parts.js";

/** @typedef {import("./states.js").StepperState} State */
/** @typedef {import("./states.js").Shown} Shown */
/** @typedef {import("./states.js").Link} Edge  from, to, bytes */

const SIZE = 300;
const RADIUS = 104;
const NODE = 21;

/** Position of a rank on the circle. @param {number} rank @param {number} n */
export function place(rank, n) {
  const angle = (2 * Math.PI * rank) / n - Math.PI / 2;
  return [SIZE / 2 + RADIUS * Math.cos(angle), SIZE / 2 + RADIUS * Math.sin(angle)];
}

/** The link with the most bytes. @param {Edge[]} links @returns {Edge|null} */
export function busiest(links) {
  return links.reduce((best, one) => (!best || one[2] > best[2] ? one : best), /** @type {Edge|null} */ (null));
}

/** Bytes into and out of each rank. @param {Edge[]} links @param {number} n */
export function through(links, n) {
  const found = Array(n).fill(0);
  for (const [from, to, nbytes] of links) {
    found[from] += nbytes;
    found[to] += nbytes;
  }
  return found;
}

/** Whether the recorded links match the theory. @param {Edge[]} one @param {Edge[]} other */
export function sameLinks(one, other) {
  const key = /** @param {Edge[]} links */ (links) => JSON.stringify([...links].sort((a, b) => a[0] - b[0] || a[1] - b[1]));
  return key(one) === key(other);
}

/** @param {HTMLElement} el @param {import("./link.js").Link<State>} link */
export function stepper(el, link) {
  const document = el.ownerDocument;
  let at = link.state().taken;
  let isPlaying = false;
  let drawnFor = "";

  const controls = make(document, "div", { class: "ddpl-controls", role: "group", "aria-label": "which algorithm" });
  const back = button(document, "◀", () => goTo(at - 1), { "aria-label": "back one step (,)", title: "back one step (,)" });
  const next = button(document, "Step ▶", doStep, { class: "ddpl-main", title: "take one step on the ranks (.)" });
  const play = button(document, "Play", doPlay, { "aria-pressed": "false" });
  const restart = button(document, "Restart", doRestart);
  const compare = button(document, "Compare", doCompare);
  const scrub = make(document, "input", { type: "range", min: "0", step: "1", "aria-label": "step" });
  const where = make(document, "output", {});
  scrub.addEventListener("input", () => goTo(Number(scrub.value)));
  const rule = make(document, "div", { class: "ddpl-rule", role: "status" });
  const ring = make(document, "div", { class: "ddpl-ring" });
  const grid = make(document, "div", { class: "ddpl-scroll", tabIndex: 0, role: "region", "aria-label": "chunks of each rank" });
  const sums = make(document, "div", { class: "ddpl-sums", role: "status" });
  el.append(
    controls,
    make(document, "div", { class: "ddpl-actions" }, back, next, play, scrub, where, restart, compare),
    rule,
    make(document, "div", { class: "ddpl-two" }, ring, make(document, "div", {}, grid, sums)),
  );
  el.addEventListener("keydown", (event) => {
    if (/^(INPUT|SELECT|TEXTAREA)$/.test(/** @type {HTMLElement} */ (event.target).tagName) || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === ".") doStep();
    else if (event.key === ",") goTo(at - 1);
    else return;
    event.preventDefault();
  });

  const state = () => link.state();

  /** @param {number} step */
  function goTo(step) {
    at = Math.max(0, Math.min(state().taken, step));
    draw();
  }

  /** Go to the next step. Run it if it has not run yet. */
  async function doStep() {
    const now = state();
    if (at < now.taken) return goTo(at + 1);
    if (now.taken < now.steps && !link.isBusy()) {
      const after = await link.ask({ do: "step" });
      if (after && !after.error) goTo(after.taken);
    }
  }

  async function doPlay() {
    isPlaying = !isPlaying;
    play.setAttribute("aria-pressed", String(isPlaying));
    play.textContent = isPlaying ? "Pause" : "Play";
    if (isPlaying && at === state().steps) goTo(0);
    while (isPlaying && el.isConnected && at < state().steps) {
      const before = at;
      await doStep();
      if (at === before) break;
      await new Promise((resolve) => setTimeout(resolve, 900));
    }
    isPlaying = false;
    play.setAttribute("aria-pressed", "false");
    play.textContent = "Play";
  }

  async function doRestart() {
    isPlaying = false;
    const after = await link.ask({ do: "restart" });
    if (after) goTo(0);
  }

  async function doCompare() {
    isPlaying = false;
    const after = await link.ask({ do: "compare" });
    if (!after || after.error) return;
    goTo(after.taken);
  }

  /** @param {Record<string, any>} changes */
  function configure(changes) {
    const now = state();
    isPlaying = false;
    link.ask({ do: "configure", options: { name: now.name, sizes: now.sizes, dtype: now.dtype, ...changes } });
  }

  /** @param {State} now */
  function compared(now) {
    return now.agrees ? `All ranks have what ${now.real_line} gives.` : `The ranks do NOT have what ${now.real_line} gives.`;
  }

  /** @param {State} now */
  function drawControls(now) {
    const sizes = make(document, "input", { type: "text", id: newId("sizes"), value: now.sizes.join(", "), size: 10 });
    typed(sizes, (words) => {
      const given = words.split(/[\s,]+/).filter(Boolean).map(Number);
      configure({ sizes: given.length === 1 ? Array(now.world_size).fill(given[0]) : given });
    });
    controls.replaceChildren(
      choice(document, "algorithm", now.names, now.name, (name) => configure({ name })),
      field(document, "elements of each chunk", sizes),
      legend(document, now.world_size),
    );
    compare.textContent = `Compare with ${now.real_line}`;
  }

  /** @param {State} now @param {Shown} shown */
  function drawRing(now, shown) {
    const n = now.world_size;
    const picture = svg(document, "svg", { viewBox: `0 0 ${SIZE} ${SIZE}`, role: "img", "aria-label": linksInWords(now, shown) });
    const most = busiest(shown.links);
    const moving = new Map(shown.moves.map(([from, to]) => [`${from},${to}`, true]));
    const top = most ? most[2] : 1;
    const seen = new Map(shown.links.map(([from, to, nbytes]) => [`${from},${to}`, nbytes]));
    for (const [from, to] of now.theory) {
      const key = `${from},${to}`;
      const nbytes = seen.get(key) ?? 0;
      const [a, b] = [place(from, n), place(to, n)];
      const [dx, dy] = [b[0] - a[0], b[1] - a[1]];
      const length = Math.hypot(dx, dy);
      const [ux, uy] = [dx / length, dy / length];
      // Links in both directions between two ranks are drawn side by side.
      const aside = seen.has(`${to},${from}`) || now.theory.some(([f, t]) => f === to && t === from) ? 6 : 0;
      const start = [a[0] + ux * (NODE + 2) - uy * aside, a[1] + uy * (NODE + 2) + ux * aside];
      const end = [b[0] - ux * (NODE + 2) - uy * aside, b[1] - uy * (NODE + 2) + ux * aside];
      const isMost = nbytes === top && shown.links.some(([, , other]) => other < top);
      const line = arrow(document, start, end, { class: `ddpl-link${moving.has(key) ? " ddpl-moving" : ""}${isMost ? " ddpl-busiest" : ""}`, "stroke-width": nbytes ? 1.2 + (3.2 * nbytes) / top : 1 });
      picture.append(line);
      if (nbytes) {
        const outward = 14;
        const middle = [start[0] * 0.6 + end[0] * 0.4, start[1] * 0.6 + end[1] * 0.4];
        const label = svg(document, "text", { x: middle[0] - uy * (aside ? outward : -outward), y: middle[1] + ux * (aside ? outward : -outward) + 4, class: "ddpl-bytes" }, bytes(nbytes));
        picture.append(label);
      }
    }
    for (let rank = 0; rank < n; rank++) {
      const [x, y] = place(rank, n);
      const node = svg(document, "circle", { cx: x, cy: y, r: NODE, class: "ddpl-node" });
      node.style.fill = `color-mix(in srgb, var(--rank${rank % 8}) 30%, var(--paper))`;
      node.style.stroke = `var(--rank${rank % 8})`;
      picture.append(node, svg(document, "text", { x, y: y + 5, class: "ddpl-rank" }, String(rank)));
    }
    ring.replaceChildren(picture);
  }

  /** @param {State} now @param {Shown} shown */
  function linksInWords(now, shown) {
    if (!shown.links.length) return `${now.world_size} ranks, nothing has moved yet`;
    return `bytes over each link so far: ${shown.links.map(([from, to, nbytes]) => `${from} to ${to} ${bytes(nbytes)}`).join(", ")}`;
  }

  /** @param {State} now @param {Shown} shown */
  function drawGrid(now, shown) {
    const n = now.world_size;
    /** @type {[number, number][]} */
    const bounds = []; // first and last element of each chunk
    let begin = 0;
    for (const size of now.sizes) bounds.push([begin, (begin += size)]);
    const fresh = /** @param {number} rank @param {number} chunk */ (rank, chunk) => shown.moves.some(([, to, first, last]) => to === rank && bounds[chunk][0] < last && first < bounds[chunk][1]);
    const leaving = /** @param {number} rank @param {number} chunk */ (rank, chunk) => shown.moves.some(([from, , first, last]) => from === rank && bounds[chunk][0] < last && first < bounds[chunk][1]);
    const head = make(document, "tr", {}, make(document, "td", {}));
    for (let rank = 0; rank < n; rank++) head.append(make(document, "th", { scope: "col" }, `rank ${rank}`));
    const body = make(document, "tbody", {});
    now.sizes.forEach((size, chunk) => {
      const line = make(document, "tr", {}, make(document, "th", { scope: "row" }, `chunk ${chunk}`));
      for (let rank = 0; rank < n; rank++) {
        const values = shown.chunks[rank][chunk];
        const who = shown.who[rank]?.[chunk] ?? [];
        const isEqual = values.every((value) => value === values[0]);
        const words = isEqual && values.length ? figure(values[0]) : values.slice(0, 3).map(figure).join(" ") + (values.length > 3 ? " …" : "");
        const isFresh = at > 0 && fresh(rank, chunk);
        const isEmpty = !size || (now.name === "ring all_gather" && !who.length);
        const said = `rank ${rank}, chunk ${chunk}: ${isEmpty ? "nothing yet" : values.map(figure).join(", ")}, data of ${inWords(who)}${isFresh ? ", came in this step" : ""}${at && leaving(rank, chunk) ? ", sent in this step" : ""}`;
        const found = cell(document, isEmpty ? (size ? "·" : "empty") : words, isEmpty ? [] : who, said);
        if (isFresh) found.classList.add("ddpl-fresh");
        if (at && leaving(rank, chunk)) found.classList.add("ddpl-sent");
        line.append(make(document, "td", {}, found));
      }
      body.append(line);
    });
    grid.replaceChildren(make(document, "table", { class: "ddpl-grid ddpl-chunks" }, make(document, "thead", {}, head), body));
  }

  /** @param {State} now @param {Shown} shown */
  function drawSums(now, shown) {
    const most = busiest(shown.links);
    const of = through(shown.links, now.world_size);
    const all = through(now.theory, now.world_size);
    const top = Math.max(...all, 1);
    const bars = make(document, "div", { class: "ddpl-bars", role: "img", "aria-label": `bytes through each rank: ${of.map((nbytes, rank) => `rank ${rank} ${bytes(nbytes)} of ${bytes(all[rank])}`).join(", ")}` });
    of.forEach((nbytes, rank) => {
      const bar = make(document, "i", {});
      bar.style.width = `${(100 * nbytes) / top}%`;
      bar.style.background = `var(--rank${rank % 8})`;
      const frame = make(document, "span", { class: "ddpl-bar" }, bar);
      frame.style.setProperty("--all", `${(100 * all[rank]) / top}%`);
      bars.append(make(document, "span", {}, `rank ${rank}`), frame, make(document, "span", {}, bytes(nbytes)));
    });
    const isDone = now.taken === now.steps && at === now.steps;
    const total = shown.links.reduce((sum, [, , nbytes]) => sum + nbytes, 0);
    const lines = [`${bytes(total)} moved so far, counted from the recorded sends` + (most ? `; busiest link ${most[0]} → ${most[1]} with ${bytes(most[2])}` : "") + "."];
    if (isDone) lines.push(sameLinks(shown.links, now.theory) ? "✓ On every link exactly the bytes that theory says." : "✗ NOT the bytes that theory says.");
    if (isDone && now.agrees !== null) lines.push(`${now.agrees ? "✓" : "✗"} ${compared(now)}`);
    sums.replaceChildren(make(document, "div", { class: "ddpl-caption" }, "bytes into and out of each rank"), bars, ...lines.map((line) => make(document, "p", {}, line)));
  }

  function draw() {
    const now = state();
    const key = [now.name, now.sizes, now.dtype].join("|");
    if (key !== drawnFor) {
      if (drawnFor) at = now.taken;
      drawnFor = key;
      drawControls(now);
    } else if (now.error) drawControls(now); // the choice was invalid: reset the controls
    at = Math.min(at, now.taken);
    const shown = now.states[at];
    scrub.max = String(now.steps);
    scrub.value = String(at);
    where.textContent = `${at} / ${now.steps}`;
    rule.textContent = at ? `Step ${at}: ${now.rules[at - 1]}.` : `Start. Next: ${now.rules[0]}.`;
    enable(back, at > 0);
    enable(next, !link.isBusy() && at < now.steps);
    enable(compare, !link.isBusy());
    enable(restart, !link.isBusy() && now.taken > 0);
    drawRing(now, shown);
    drawGrid(now, shown);
    drawSums(now, shown);
  }

  link.onState(draw);
  link.onWork(() => {
    const now = state();
    enable(next, !link.isBusy() && at < now.steps);
    enable(compare, !link.isBusy());
    enable(restart, !link.isBusy() && now.taken > 0);
  });
  draw();
  return { inspect: () => ({ at, isPlaying }) };
}
