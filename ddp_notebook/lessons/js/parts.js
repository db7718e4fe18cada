/** Elements that all lessons share. */

import { bytes } from "../../widgets/js/data/format.js";
import { make, newId } from "../../widgets/js/parts/dom.js";
import { arrow, svg } from "../../widgets/js/parts/svg.js";

/**
 * A labelled select.
 * @param {Document} document @param {string} name
 * @param {(string|number|[string|number, string])[]} options values, or values with their labels
 * @param {string|number} chosen @param {(value: string) => void} onChange
 */
export function choice(document, name, options, chosen, onChange) {
  const select = make(document, "select", { id: newId("choice") });
  for (const option of options) {
    const [value, words] = Array.isArray(option) ? option : [option, String(option)];
    select.append(make(document, "option", { value: String(value), selected: String(value) === String(chosen) }, words));
  }
  select.addEventListener("change", () => onChange(select.value));
  return field(document, name, select);
}

/**
 * A question with one button for each answer.
 * @param {Document} document @param {HTMLFieldSetElement} el @param {string} question @param {string[]} choices
 * @param {string} chosen @param {(choice: string) => void} onChange
 */
export function radios(document, el, question, choices, chosen, onChange) {
  const group = newId("guess");
  const options = choices.map((words) => {
    const one = make(document, "input", { type: "radio", name: group, value: words, checked: words === chosen });
    one.addEventListener("change", () => onChange(words));
    return make(document, "label", {}, one, words);
  });
  el.replaceChildren(make(document, "legend", {}, question), ...options);
}

/**
 * The result, preceded by the verdict on a guess.
 * @param {Document} document @param {string[]} said @param {boolean|null} isRight null: nothing was guessed
 */
export function verdict(document, said, isRight) {
  return said.map((words, line) => make(document, "p", { class: line === 0 && isRight !== null ? (isRight ? "ddpl-verdict" : "ddpl-verdict ddpl-bad") : "" }, words));
}

/** A label in front of an element that has an id. @param {Document} document @param {string} name @param {HTMLElement} element */
export function field(document, name, element) {
  return make(document, "span", { class: "ddpl-field" }, make(document, "label", { for: element.id }, name), element);
}

/**
 * Call `take` once with the typed text, on Enter or when the field loses the focus. (Notebooks suppress the change
 * event of Enter.)
 * @param {HTMLInputElement} input @param {(value: string) => void} take
 */
export function typed(input, take) {
  let taken = input.value;
  const now = () => {
    if (input.value === taken) return;
    taken = input.value;
    take(taken);
  };
  input.addEventListener("change", now);
  input.addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault();
    now();
  });
}

/** @param {Document} document @param {string} words @param {() => void} onClick @param {Record<string, any>} [more] */
export function button(document, words, onClick, more = {}) {
  const found = make(document, "button", { type: "button", ...more }, words);
  found.addEventListener("click", () => found.getAttribute("aria-disabled") !== "true" && onClick());
  return found;
}

/**
 * Enable or disable a button. A disabled button keeps the focus.
 * @param {HTMLElement} one
 * @param {boolean} isEnabled
 */
export function enable(one, isEnabled) {
  one.setAttribute("aria-disabled", String(!isEnabled));
}

/**
 * Format a number for a cell. @param {number|string} value
 */
export function figure(value) {
  const found = Number(value);
  if (!Number.isFinite(found)) return String(value);
  if (Number.isInteger(found) && Math.abs(found) < 1e7) return String(found);
  return String(Number(found.toPrecision(4)));
}

/** Short form of a set of ranks: `[0, 1, 2, 5]` is "0-2,5". @param {number[]} ranks */
export function short(ranks) {
  /** @type {number[][]} */
  const runs = [];
  for (const rank of [...ranks].sort((a, b) => a - b)) {
    const last = runs.at(-1);
    if (last && rank === last[1] + 1) last[1] = rank;
    else runs.push([rank, rank]);
  }
  return runs.map(([first, last]) => (first === last ? `${first}` : `${first}-${last}`)).join(",");
}

/** @param {number[]} ranks */
export function inWords(ranks) {
  return ranks.length ? `rank${ranks.length > 1 ? "s" : ""} ${short(ranks)}` : "nobody";
}

/**
 * Set the background of a cell: the colours of the ranks whose data it contains.
 * @param {HTMLElement} cell @param {number[]} who
 */
export function colour(cell, who) {
  if (!who.length) {
    cell.style.removeProperty("--of");
    return;
  }
  const share = 100 / who.length;
  const stops = who.map((rank, at) => `var(--rank${rank % 8}) ${at * share}% ${(at + 1) * share}%`);
  cell.style.setProperty("--of", who.length === 1 ? `linear-gradient(var(--rank${who[0] % 8}), var(--rank${who[0] % 8}))` : `linear-gradient(to right, ${stops.join(", ")})`);
}

/**
 * A cell that shows a number and the ranks it comes from.
 * @param {Document} document
 * @param {string} words
 * @param {number[]} who
 * @param {string} said
 */
export function cell(document, words, who, said) {
  const found = make(document, "span", { class: "ddpl-cell", role: "img", "aria-label": said, title: said }, make(document, "span", {}, words));
  colour(found, who);
  if (who.length > 1) found.append(make(document, "small", { "aria-hidden": "true" }, short(who)));
  return found;
}

/** The legend of the colours. @param {Document} document @param {number} worldSize */
export function legend(document, worldSize) {
  const found = make(document, "span", { class: "ddpl-legend" }, "data of");
  for (let rank = 0; rank < worldSize; rank++) {
    const mark = make(document, "i", {});
    mark.style.background = `var(--rank${rank % 8})`;
    found.append(make(document, "span", {}, mark, `rank ${rank}`));
  }
  return found;
}

export { arrow, bytes, make, newId, svg };
