/** A @ B in pieces: matrices in the colours of the ranks that hold them, details of a chosen element, a guess. */

import { button, choice, enable, figure, inWords, legend, make, radios, svg, verdict } from "./parts.js";

/** @typedef {import("./states.js").ProductState} State */
/** @typedef {import("./states.js").Matrix} Matrix */
/** @typedef {{ranks: number[], words: string, isPartial: boolean, isOnAll?: boolean}} Element  isOnAll: drawn once for all ranks */

const CELL = 30;
const SMALL = 20; // cells of copies
const ALL = "all";
/** @type {Record<string, [number, number]>} */
const KEYS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

/** The value of an element on a rank; null: the rank does not hold it. @param {Matrix} matrix @param {number} rank @param {number} r @param {number} c */
export function valueOn(matrix, rank, r, c) {
  const part = matrix.parts.find((one) => one.rank === rank);
  return part?.values[r - part.offset[0]]?.[c - part.offset[1]] ?? null;
}

/** The ranks that hold an element. @param {Matrix} matrix @param {number} r @param {number} c */
export function holders(matrix, r, c) {
  return matrix.parts.map(({ rank }) => rank).filter((rank) => valueOn(matrix, rank, r, c) !== null);
}

/**
 * Numbers of the products that add up to an element: those that each rank can compute from its own pieces, and those
 * that no rank can.
 * @param {State} state @param {number} r @param {number} c
 */
export function products(state, r, c) {
  const [a, b] = state.matrices;
  const inner = a.shape[1];
  const isBoth = /** @param {number} rank @param {number} k */ (rank, k) => valueOn(a, rank, r, k) !== null && valueOn(b, rank, k, c) !== null;
  const ks = Array.from({ length: inner }, (_, k) => k);
  const ranks = Array.from({ length: state.world_size }, (_, rank) => rank);
  return { of: inner, by: ranks.map((rank) => ks.filter((k) => isBoth(rank, k)).length), lacking: ks.filter((k) => !ranks.some((rank) => isBoth(rank, k))).length };
}

/** Explanation for one element of the result. @param {State} state @param {number} r @param {number} c */
export function explained(state, r, c) {
  const { of, by, lacking } = products(state, r, c);
  const head = `Element (${r}, ${c}) is row ${r} of A times column ${c} of B, ${of} products.`;
  const complete = by.flatMap((count, rank) => (count === of ? [rank] : []));
  if (complete.length) return `${head} ${capital(inWords(complete))} can make all of them.`;
  if (lacking) return `${head} No rank has both factors of ${lacking} of them: something has to be sent first.`;
  return `${head} ${by.map((count, rank) => `rank ${rank} can make ${count}`).join(", ")}: summands.`.replace(". r", ". R");
}

/** @param {string} words */
function capital(words) {
  return words[0].toUpperCase() + words.slice(1);
}

/** @param {HTMLElement} el @param {import("./link.js").Link<State>} link */
export function product(el, link) {
  const document = el.ownerDocument;
  const state = () => link.state();
  let guess = state().guess ?? "";
  let look = ALL;
  let chosen = [0, 0];
  let drawnFor = "";

  const controls = make(document, "div", { class: "ddpl-controls" });
  const pictures = make(document, "div", { class: "ddpl-matrices ddpl-scroll", tabIndex: 0, role: "group", "aria-label": "A, B and their product; arrow keys choose an element of the product" });
  const rule = make(document, "div", { class: "ddpl-rule", role: "status" });
  const question = make(document, "fieldset", { class: "ddpl-question" });
  const run = button(document, "Run on the ranks", doRun, { class: "ddpl-main" });
  const said = make(document, "div", { role: "status" });
  el.append(controls, pictures, rule, question, make(document, "div", { class: "ddpl-actions" }, run), said);
  pictures.addEventListener("keydown", (event) => {
    const step = KEYS[event.key];
    if (!step || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const [rows, columns] = shapeOfResult();
    choose(Math.max(0, Math.min(rows - 1, chosen[0] + step[0])), Math.max(0, Math.min(columns - 1, chosen[1] + step[1])));
  });

  function shapeOfResult() {
    const [a, b] = state().matrices;
    return [a.shape[0], b.shape[1]];
  }

  /** @param {number} r @param {number} c */
  function choose(r, c) {
    chosen = [r, c];
    draw();
  }

  async function doRun() {
    await link.ask({ do: "run", guess });
  }

  /** @param {State} now */
  function drawControls(now) {
    const focused = [...controls.querySelectorAll("select")].indexOf(/** @type {HTMLSelectElement} */ (document.activeElement));
    const configure = /** @param {object} options */ (options) => link.ask({ do: "configure", options: { of_a: now.of_a, of_b: now.of_b, ...options } });
    /** @type {[string, string][]} */
    const views = [[ALL, "all ranks"], ...Array.from({ length: now.world_size }, (_, rank) => /** @type {[string, string]} */ ([String(rank), `rank ${rank}`]))];
    controls.replaceChildren(
      choice(document, "A", now.placements, now.of_a, (of_a) => configure({ of_a })),
      choice(document, "B", now.placements, now.of_b, (of_b) => configure({ of_b })),
      choice(document, "look at", views, look, (value) => {
        look = value;
        draw();
      }),
      legend(document, now.world_size),
    );
    if (focused >= 0) controls.querySelectorAll("select")[focused].focus();
    radios(document, question, now.question, now.choices, guess, (words) => (guess = words));
  }

  /** @param {string} name @param {number[]} shape @param {(r: number, c: number) => Element} element @param {(r: number, c: number) => boolean} isMarked @param {boolean} [isResult] */
  function matrix(name, shape, element, isMarked, isResult = false) {
    return make(document, "figure", { class: "ddpl-matrix" }, make(document, "figcaption", {}, name), grid(name, shape, element, isMarked, isResult));
  }

  /**
   * A matrix for each rank, for copies and for summands.
   * @param {Matrix} one @param {(r: number, c: number) => boolean} isMarked @param {boolean} [isResult]
   */
  function copies(one, isMarked, isResult = false) {
    const name = `${one.name}: ${one.placement}, ${one.partial ? "a summand" : "a copy"} on each rank`;
    const all = one.parts.map(({ rank }) => {
      const element = /** @param {number} r @param {number} c */ (r, c) => ({ ranks: [rank], words: figure(Number(valueOn(one, rank, r, c))), isPartial: one.partial });
      return make(document, "div", {}, make(document, "div", { class: "ddpl-copy" }, `rank ${rank}`), grid(`${name}, rank ${rank}`, one.shape, element, isMarked, isResult, SMALL));
    });
    return make(document, "figure", { class: "ddpl-matrix" }, make(document, "figcaption", {}, name), make(document, "div", { class: "ddpl-copies" }, ...all));
  }

  /** @param {string} name @param {number[]} shape @param {(r: number, c: number) => Element} element @param {(r: number, c: number) => boolean} isMarked @param {boolean} isResult */
  function grid(name, shape, element, isMarked, isResult, size = CELL) {
    const [rows, columns] = shape;
    const found = svg(document, "svg", { width: columns * size + 2, height: rows * size + 2, viewBox: `-1 -1 ${columns * size + 2} ${rows * size + 2}`, role: "img", "aria-label": name });
    /** @type {SVGElement[]} */
    const marks = [];
    for (let r = 0; r < rows; r++) {
      for (let c = 0; c < columns; c++) {
        const { ranks, words, isPartial, isOnAll } = element(r, c);
        const one = svg(document, "g", { class: isPartial ? "ddpl-element ddpl-summand" : "ddpl-element" });
        const at = { x: c * size, y: r * size, width: size, height: size };
        one.append(svg(document, "rect", { ...at, class: isOnAll ? "ddpl-on-all" : ranks.length ? "ddpl-held" : "ddpl-lacking" }));
        ranks.forEach((rank, k) => {
          const stripe = svg(document, "rect", { x: c * size + (k * size) / ranks.length, y: r * size, width: size / ranks.length, height: size, class: "ddpl-stripe-of" });
          stripe.style.fill = `var(--rank${rank % 8})`;
          one.append(stripe);
        });
        one.append(svg(document, "text", { x: (c + 0.5) * size, y: (r + 0.5) * size + 4 }, words));
        if (isResult) {
          one.classList.add("ddpl-choosable");
          one.addEventListener("click", () => choose(r, c));
        }
        if (isMarked(r, c)) marks.push(svg(document, "rect", { ...at, class: "ddpl-chosen" }));
        found.append(one);
      }
    }
    found.append(...marks); // draw above the neighbours
    return found;
  }

  /** Whether every rank holds a matrix of full size. @param {Matrix} one */
  function isWhole(one) {
    return one.parts.length > 1 && one.parts.every(({ size }) => size[0] === one.shape[0] && size[1] === one.shape[1]);
  }

  /** @param {Matrix} one @param {(r: number, c: number) => boolean} isMarked @param {boolean} [isResult] */
  function held(one, isMarked, isResult = false) {
    if (look === ALL && isWhole(one)) return copies(one, isMarked, isResult);
    return matrix(`${one.name}: ${one.placement}`, one.shape, elementsOf(one), isMarked, isResult);
  }

  /** @param {Matrix} one */
  function elementsOf(one) {
    return /** @param {number} r @param {number} c */ (r, c) => {
      const ranks = holders(one, r, c).filter((rank) => look === ALL || look === String(rank));
      const value = ranks.length ? valueOn(one, ranks[0], r, c) : null;
      return { ranks, words: value === null ? "" : figure(value), isPartial: one.partial };
    };
  }

  /** @param {State} now */
  function drawMatrices(now) {
    const [a, b, c] = now.matrices;
    const [row, column] = chosen;
    const isChosen = /** @param {number} r @param {number} c */ (r, c) => r === row && c === column;
    const unknown = () => ({ ranks: [], words: "?", isPartial: false });
    const drawn = [
      held(a, (r) => r === row),
      held(b, (_, c) => c === column),
      c ? held(c, isChosen, true) : matrix("A @ B: not multiplied yet", shapeOfResult(), unknown, isChosen, true),
    ];
    const { whole } = now;
    if (whole) {
      const how = now.to_put_together.join(", ") || "nothing to do";
      const of = look === ALL ? [] : [Number(look)];
      drawn.push(matrix(`combined on every rank: ${how}`, shapeOfResult(), (r, c) => ({ ranks: of, words: figure(whole[r][c]), isPartial: false, isOnAll: look === ALL }), isChosen, true));
    }
    pictures.replaceChildren(...drawn);
  }

  function draw() {
    const now = state();
    const key = [now.of_a, now.of_b].join("|");
    if (key !== drawnFor) {
      if (drawnFor) guess = now.guess ?? "";
      drawnFor = key;
      drawControls(now);
    } else if (now.error) drawControls(now); // the choice was invalid
    drawMatrices(now);
    rule.textContent = explained(now, chosen[0], chosen[1]);
    said.replaceChildren(...verdict(document, now.said, now.right));
    enable(run, !link.isBusy());
  }

  link.onState(draw);
  link.onWork((_, isBusy) => enable(run, !isBusy));
  draw();
  return { inspect: () => ({ guess, look, chosen }) };
}
