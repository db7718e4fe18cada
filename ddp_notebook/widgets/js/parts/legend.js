/** Meanings of the colours of the step bars. */

import { show } from "./dom.js";
import { PARTS } from "../data/tables.js";

/** @type {Record<string, string>} */
export const WORDS = {
  input: "input",
  compute: "compute",
  overlapped: "compute while data moves",
  exposed: "exposed communication",
  waiting: "waiting for a slower rank",
  optimizer: "optimizer",
  rest: "rest",
};

/**
 * A list of colours and their meanings.
 * @param {HTMLElement} el
 * @param {{colours: import("../drawing/colours.js").Palette}} env
 */
export function legend(el, env) {
  const document = el.ownerDocument;
  const list = document.createElement("ul");
  list.className = "ddpm-legend";
  const meanings = [...PARTS.map((part) => [part, WORDS[part]]), ["backward", "backward"], ["hidden", "hidden communication"]];
  const swatches = meanings.map(([part, words]) => {
    const item = document.createElement("li");
    const swatch = document.createElement("i");
    item.append(swatch, words);
    list.append(item);
    return { part, style: swatch.style };
  });
  el.append(list);
  /** @type {object|null} */
  let drawn = null;
  return {
    /** @param {string} detail content below the bars */
    update(detail) {
      for (const item of [...list.children].slice(PARTS.length)) show(/** @type {HTMLElement} */ (item), detail === "buckets");
      if (drawn === env.colours) return;
      drawn = env.colours;
      const { fill } = env.colours;
      for (const { part, style } of swatches) {
        style.background = part === "overlapped" ? `repeating-linear-gradient(135deg, ${fill.overlapped} 0 3px, ${fill.overlappedStripe} 3px 5px)` : fill[part];
        style.borderColor = part === "waiting" ? fill.waitingLine : "transparent";
      }
    },
    height: () => list.offsetHeight,
    destroy: () => list.remove(),
  };
}
