/** Content for screen readers: a sentence and a table behind each picture, and a status line for changes. */

import { plural } from "../data/format.js";

const EVERY_MS = 1000;
const MOST_ROWS = 64;

/**
 * A sentence and a visually hidden table behind the first canvas of a panel. Updated at most once a second.
 * @param {HTMLElement} el
 * @param {{describe(): string, table(): {head: string[], rows: string[][]}|null}} panel
 * @param {string} name of the panel
 *
 */
export function behind(el, panel, name) {
  const hidden = el.ownerDocument.createElement("div");
  hidden.className = "ddpm-hidden";
  el.append(hidden);
  let last = -Infinity;
  let said = "";

  return {
    update() {
      const now = performance.now();
      if (now - last < EVERY_MS) return;
      last = now;
      const canvases = el.querySelectorAll("canvas");
      const sentence = `${name}: ${panel.describe()}`;
      canvases.forEach((canvas, at) => {
        if (at) canvas.setAttribute("aria-hidden", "true");
        else {
          canvas.setAttribute("role", "img");
          if (canvas.tabIndex < 0) canvas.tabIndex = 0;
          canvas.setAttribute("aria-label", sentence);
        }
      });
      const table = panel.table();
      const told = JSON.stringify(table);
      if (told === said) return;
      said = told;
      hidden.replaceChildren();
      if (table) hidden.append(htmlTable(el.ownerDocument, table, name));
    },
    destroy: () => hidden.remove(),
  };
}

/** @param {Document} document @param {{head: string[], rows: string[][]}} content @param {string} name */
function htmlTable(document, { head, rows }, name) {
  const table = document.createElement("table");
  const caption = table.createCaption();
  caption.textContent = rows.length > MOST_ROWS ? `${name}, the first ${MOST_ROWS} of ${plural(rows.length, "row")}` : name;
  const top = table.createTHead().insertRow();
  for (const words of head) top.append(cell(document, "th", words, "col"));
  const body = table.createTBody();
  for (const row of rows.slice(0, MOST_ROWS)) {
    const line = body.insertRow();
    row.forEach((words, at) => line.append(cell(document, at ? "td" : "th", words, at ? "" : "row")));
  }
  return table;
}

/** @param {Document} document @param {string} tag @param {string} words @param {string} scope */
function cell(document, tag, words, scope) {
  const found = document.createElement(tag);
  found.textContent = words;
  if (scope) found.setAttribute("scope", scope);
  return found;
}

/** The status line. Screen readers read it only when it changes. @param {HTMLElement} el */
export function statusLine(el) {
  el.setAttribute("role", "status");
  el.setAttribute("aria-live", "polite");
  return {
    /** @param {string} words */
    say(words) {
      if (el.textContent !== words) el.textContent = words;
    },
  };
}
