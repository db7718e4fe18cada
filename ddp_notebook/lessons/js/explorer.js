/**
 * The collective explorer: the inputs, the predictions, and then the results of the ranks.
 */

import { button, cell, choice, colour, enable, field as labelled, figure, inWords, legend, make, newId, typed } from "./parts.js";
import { broughtIn, score, sources } from "./prediction.js";
import { wrongUse } from "./wrong_use.js";

/** @typedef {import("./states.js").ExplorerState} State */

/**
 * @param {HTMLElement} el @param {import("./link.js").Link<State>} link @param {{say(words: string): void}} status
 */
export function explorer(el, link, status) {
  const document = el.ownerDocument;
  /** @type {Record<string, string[]>} */
  let guesses = {};
  let isRevealed = false;
  /** @type {[number, number]|null} */
  let chosen = null;
  /** @type {Record<string, number[]>|null} */
  let edited = null;
  let drawnFor = "";

  const controls = make(document, "div", { class: "ddpl-controls", role: "group", "aria-label": "which collective" });
  const code = make(document, "code", {});
  const formula = make(document, "div", { class: "ddpl-formula" });
  const grid = make(document, "div", { class: "ddpl-scroll", tabIndex: 0, role: "region", "aria-label": "the ranks' numbers" });
  const bring = make(document, "div", { class: "ddpl-bring", role: "group", "aria-label": "bring an input into the chosen cell" });
  const run = button(document, "Run on the ranks", doRun, { class: "ddpl-main" });
  const reveal = button(document, "Reveal", doReveal, {});
  const again = button(document, "Predict again", doAgain, {});
  const verdict = make(document, "span", { class: "ddpl-verdict", role: "status" });
  const wrong = wrongUse(document, link, status);
  el.append(
    controls,
    make(document, "pre", { class: "ddpl-code", "aria-label": "the line of code" }, code),
    formula,
    grid,
    bring,
    make(document, "div", { class: "ddpl-actions" }, run, reveal, again, verdict),
    wrong.el,
  );

  const state = () => link.state();

  /** @param {Record<string, any>} changes */
  function configure(changes) {
    const now = state();
    /** @type {Record<string, any>} */
    const options = {
      op: now.op,
      reduce_op: now.reduce_op,
      root: now.root,
      peer: now.peer,
      group: now.group,
      dtype: now.dtype,
      sizes: now.sizes.length > 1 ? now.sizes : now.sizes[0],
      ...changes,
    };
    if (changes.op && changes.op !== now.op) delete options.sizes;
    if (changes.op === "barrier") options.dtype = "float32";
    if (changes.dtype && now.reduces && !legal(options.dtype, now).includes(options.reduce_op)) options.reduce_op = "SUM";
    if (changes.group || changes.op) {
      if (!options.group.includes(options.root)) delete options.root;
      delete options.peer;
      if (now.sizes.length > 1) delete options.sizes;
    }
    if (changes.root !== undefined && options.peer === options.root) delete options.peer;
    link.ask({ do: "configure", options });
  }

  /** The reduce ops that a dtype has. @param {string} dtype @param {State} now */
  function legal(dtype, now) {
    if (dtype === now.dtype) return now.reduce_ops;
    return dtype.startsWith("float") ? ["SUM", "PRODUCT", "MIN", "MAX", "AVG"] : ["SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"];
  }

  async function doRun() {
    /** @type {Record<string, (number|null)[]>} */
    const prediction = {};
    for (const [rank, given] of Object.entries(guesses)) {
      if (given.some((one) => one !== "")) prediction[rank] = given.map((one) => (one === "" ? null : Number(one)));
    }
    const hasGuess = Object.keys(prediction).length > 0;
    isRevealed = false;
    const wish = { do: "run", prediction, ...(edited ? { inputs: edited } : {}) };
    const after = await link.ask(wish);
    if (!after || after.error || !after.result) return;
    edited = null;
    isRevealed = !hasGuess;
    draw();
    status.say(hasGuess ? "The ranks are done. Reveal what they have." : "");
    if (hasGuess) reveal.focus();
  }

  function doReveal() {
    isRevealed = true;
    draw();
    status.say(""); // screen readers read the verdict itself
  }

  function doAgain() {
    isRevealed = false;
    guesses = {};
    chosen = null;
    draw();
    /** @type {HTMLElement|null} */ (grid.querySelector("input.ddpl-guess"))?.focus();
  }

  /** @param {State} now */
  function drawControls(now) {
    const ranks = Array.from({ length: now.world_size }, (_, rank) => rank);
    const focused = [...controls.querySelectorAll("select, input")].indexOf(/** @type {Element} */ (document.activeElement));
    const sizes = make(document, "input", {
      id: newId("sizes"),
      type: "text",
      value: now.sizes.join(", "),
      size: now.uneven ? 9 : 3,
      inputMode: "numeric",
    });
    typed(sizes, (words) => {
      const given = words.split(/[\s,]+/).filter(Boolean).map(Number);
      configure({ sizes: given.length === 1 ? given[0] : given });
    });
    const members = make(document, "fieldset", { class: "ddpl-field" }, make(document, "legend", {}, "group"));
    for (const rank of ranks) {
      const box = make(document, "input", { type: "checkbox", id: newId("member"), checked: now.group.includes(rank) });
      box.addEventListener("change", () => {
        const group = ranks.filter((one) => (one === rank ? box.checked : now.group.includes(one)));
        if (group.length < 2) {
          box.checked = true;
          status.say("A group needs at least two ranks.");
        } else configure({ group });
      });
      members.append(make(document, "label", { for: box.id }, box, String(rank)));
    }
    const sizeWords = now.uneven ? "elements a chunk (one number, or one for each receiver)" : ["scatter", "reduce_scatter"].includes(now.op) ? "elements a chunk" : "elements";
    controls.replaceChildren(
      choice(document, "collective", now.ops, now.op, (op) => configure({ op })),
      ...(now.reduces ? [choice(document, "reduce op", now.reduce_ops, now.reduce_op, (op) => configure({ reduce_op: op }))] : []),
      ...(now.rooted ? [choice(document, now.messages ? "from" : "root", now.group, now.root, (root) => configure({ root: Number(root) }))] : []),
      ...(now.messages
        ? [choice(document, "to", now.group.filter((one) => one !== now.root), now.peer, (peer) => configure({ peer: Number(peer) }))]
        : []),
      ...(now.op === "barrier"
        ? []
        : [
            choice(document, "dtype", now.dtypes, now.dtype, (dtype) => configure({ dtype })),
            labelled(document, sizeWords, sizes),
          ]),
      ...(now.messages ? [] : [members]),
      legend(document, now.world_size),
    );
    if (focused >= 0) /** @type {HTMLElement} */ ([...controls.querySelectorAll("select, input")][focused])?.focus();
  }

  /** @param {State} now @param {number} rank */
  function inputCells(now, rank) {
    const values = edited?.[rank] ?? now.inputs[rank];
    const isBuffer = now.messages && rank === now.peer;
    return chunks(now.in_chunks[rank] ?? [], (at) => {
      const unit = now.op === "barrier" ? " ms" : "";
      const field = make(document, "input", {
        type: "text",
        class: "ddpl-cell",
        value: figure(values[at]),
        inputMode: "decimal",
        "aria-label": `rank ${rank} before, ${now.op === "barrier" ? "comes after milliseconds" : `element ${at}`}${isBuffer ? ", the buffer that is written over" : ""}`,
        title: `rank ${rank}, element ${at}${unit}: edit it`,
      });
      colour(field, [rank]);
      typed(field, () => {
        const changed = edited ?? structuredClone(now.inputs);
        changed[rank][at] = Number(field.value);
        edited = changed;
        isRevealed = false;
        field.setAttribute("aria-invalid", String(field.value.trim() === "" || !Number.isFinite(Number(field.value))));
        draw();
      });
      return field;
    });
  }

  /** @param {State} now @param {number} rank */
  function outputCells(now, rank) {
    const result = isRevealed && now.result ? now.result[rank] : null;
    const isSpecified = now.specified.includes(rank);
    const who = now.who[rank] ?? [];
    const rows = now.out_chunks[rank] ?? [];
    if (!rows.length) return [make(document, "span", { class: "ddpl-none" }, "nothing")];
    return chunks(rows, (at) => {
      const guess = guesses[rank]?.[at] ?? "";
      if (result) {
        const words = now.op === "barrier" ? `${figure(Math.round(result[at]))} ms` : figure(result[at]);
        if (!isSpecified) {
          const found = cell(document, words, [], `rank ${rank} after, element ${at}: ${words}, which torch does not specify`);
          found.classList.add("ddpl-unspecified");
          return found;
        }
        const isRight = guess === "" ? null : Boolean(now.right?.[rank]?.[at]);
        const said = `rank ${rank} after, element ${at}: ${words}, data of ${inWords(who[at] ?? [])}` + (isRight === null ? "" : isRight ? ", predicted right" : `, predicted wrong: ${guess}`);
        const found = cell(document, words, who[at] ?? [], said);
        if (isRight !== null) {
          found.classList.add(isRight ? "ddpl-right" : "ddpl-false");
          found.prepend(make(document, "b", { "aria-hidden": "true" }, isRight ? "✓" : "✗"));
          if (!isRight) found.append(make(document, "del", { "aria-hidden": "true" }, guess));
        }
        return found;
      }
      if (!isSpecified) {
        const found = make(document, "span", { class: "ddpl-cell ddpl-unspecified", title: "torch does not say what is here" }, "?");
        return found;
      }
      const field = make(document, "input", {
        type: "text",
        class: "ddpl-cell ddpl-guess",
        value: guess,
        placeholder: "?",
        inputMode: "decimal",
        "aria-label": `rank ${rank} after, element ${at}: your prediction`,
      });
      field.dataset.at = `${rank},${at}`;
      field.addEventListener("focus", () => {
        chosen = [rank, at];
        drawBring(state());
      });
      field.addEventListener("input", () => guessed(rank, at, field.value.trim()));
      return field;
    });
  }

  /** @param {number} rank @param {number} at @param {string} value */
  function guessed(rank, at, value) {
    const n = state().out_chunks[rank].reduce((sum, [, size]) => sum + size, 0);
    guesses[rank] ??= Array(n).fill("");
    guesses[rank][at] = Number.isFinite(Number(value)) ? value : "";
  }

  /**
   * Arrange the cells of a rank in named rows.
   * @param {[string, number][]} rows
   * @param {(at: number) => HTMLElement} make1
   */
  function chunks(rows, make1) {
    let at = 0;
    return rows.map(([name, size]) => {
      const line = make(document, "div", { class: name ? "ddpl-chunk" : "ddpl-stack" });
      if (name) line.append(make(document, "span", { class: "ddpl-name" }, name));
      const cells = make(document, "span", { class: name ? "ddpl-row" : "ddpl-column" });
      for (let i = 0; i < size; i++, at++) cells.append(make1(at));
      if (!size) cells.append(make(document, "span", { class: "ddpl-none" }, "empty"));
      line.append(cells);
      return line;
    });
  }

  /** @param {State} now */
  function drawGrid(now) {
    const focused = [...grid.querySelectorAll("input")].indexOf(/** @type {HTMLInputElement} */ (document.activeElement));
    const ranks = Array.from({ length: now.world_size }, (_, rank) => rank);
    const inside = /** @param {number} rank */ (rank) => now.actors.includes(rank);
    const head = make(document, "tr", {}, make(document, "td", {}));
    for (const rank of ranks) {
      const role = !inside(rank) ? (now.messages ? "not in it" : "not in the group") : now.messages ? (rank === now.root ? "sends" : "receives") : now.rooted && rank === now.root ? "root" : "";
      head.append(make(document, "th", { scope: "col", class: inside(rank) ? "" : "ddpl-out" }, `rank ${rank}`, ...(role ? [make(document, "small", {}, role)] : [])));
    }
    const before = make(document, "tr", {}, make(document, "th", { scope: "row" }, now.op === "barrier" ? "comes after, ms" : "before"));
    const after = make(document, "tr", {}, make(document, "th", { scope: "row" }, isRevealed ? "after, on the ranks" : now.op === "barrier" ? "leaves after, ms: your prediction" : "after: your prediction"));
    for (const rank of ranks) {
      const of = /** @param {HTMLElement[]} cells */ (cells) => make(document, "td", { class: inside(rank) ? "" : "ddpl-out" }, ...cells);
      const rest = now.in_chunks[rank]?.length ? inputCells(now, rank) : [make(document, "span", { class: "ddpl-none" }, inside(rank) ? "nothing" : "")];
      before.append(of(inside(rank) ? rest : []));
      after.append(of(inside(rank) ? outputCells(now, rank) : []));
    }
    const table = make(document, "table", { class: "ddpl-grid" }, make(document, "thead", {}, head), make(document, "tbody", {}, before, after));
    const arrowRow = make(document, "tr", { "aria-hidden": "true", class: "ddpl-arrow" }, make(document, "td", {}), make(document, "td", { colSpan: now.world_size }, "▼"));
    before.after(arrowRow);
    grid.replaceChildren(table);
    if (focused >= 0) grid.querySelectorAll("input")[focused]?.focus();
  }

  /** @param {State} now */
  function drawBring(now) {
    bring.hidden = isRevealed;
    if (!chosen || isRevealed || !now.specified.includes(chosen[0])) {
      bring.replaceChildren(make(document, "span", {}, "Type what comes out, or choose a cell and bring inputs into it."));
      return;
    }
    const [rank, at] = chosen;
    const inputs = edited ?? now.inputs;
    const words = now.reduces ? `${now.reduce_op} into` : "put into";
    bring.replaceChildren(make(document, "span", {}, `${words} rank ${rank}, element ${at}:`));
    for (const [source, place] of sources(now, rank, at)) {
      const value = inputs[source][place];
      const chip = button(document, figure(value), () => {
        const next = broughtIn(now, guesses[rank]?.[at] ?? "", value);
        guessed(rank, at, String(next));
        const field = /** @type {HTMLInputElement|null} */ (grid.querySelector(`[data-at="${rank},${at}"]`));
        if (field) field.value = figure(next);
      }, { class: "ddpl-cell ddpl-chip", "aria-label": `${figure(value)} of rank ${source}` });
      colour(chip, [source]);
      bring.append(chip);
    }
    bring.append(button(document, "clear", () => {
      guessed(rank, at, "");
      const field = /** @type {HTMLInputElement|null} */ (grid.querySelector(`[data-at="${rank},${at}"]`));
      if (field) field.value = "";
    }));
  }

  function draw() {
    const now = state();
    const key = [now.op, now.root, now.peer, now.dtype, now.sizes, now.group, now.reduce_op].join("|");
    if (key !== drawnFor) {
      if (drawnFor) [guesses, isRevealed, chosen, edited] = [{}, false, null, null];
      drawnFor = key;
      // A saved notebook has results from before the page was opened.
      if (now.result && !link.isBusy()) {
        isRevealed = true;
        for (const [rank, given] of Object.entries(now.prediction ?? {})) guesses[rank] = given.map((one) => (one === "nan" ? "" : figure(one)));
      }
      drawControls(now);
    } else if (now.error) drawControls(now); // the choice was invalid: reset the controls
    code.textContent = now.line + (now.op === "isend/irecv" ? "\nwork.wait()" : "");
    formula.textContent = now.formula;
    drawGrid(now);
    drawBring(now);
    wrong.draw(now);
    const isRun = Boolean(now.result) && !edited;
    enable(run, !link.isBusy());
    enable(reveal, isRun && !isRevealed);
    reveal.classList.toggle("ddpl-main", isRun && !isRevealed);
    enable(again, isRevealed || Object.keys(guesses).length > 0);
    const [right, all] = isRevealed ? score(now, guesses) : [0, 0];
    const checked = now.agrees ? "NumPy computes the same numbers." : "The ranks do NOT have the numbers that NumPy computes.";
    verdict.textContent = isRevealed && isRun ? (all ? `${right} of ${all} cells right. ` : "") + checked : "";
    verdict.classList.toggle("ddpl-bad", isRevealed && isRun && (!now.agrees || right < all));
  }

  link.onState(draw);
  link.onWork((_, isBusy) => {
    enable(run, !isBusy);
    wrong.work(isBusy);
  });
  draw();
  return { inspect: () => ({ guesses, isRevealed, edited }) };
}
