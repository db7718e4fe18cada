/** Text next to the pointer. */

import { make, show } from "./dom.js";

/** Hidden from screen readers, which read the table. @param {HTMLElement} el */
export function tooltip(el) {
  const box = make(el.ownerDocument, "div", { class: "ddpm-tip", "aria-hidden": "true", hidden: true });
  box.style.whiteSpace = "pre-line";
  el.append(box);
  return {
    /**
     * @param {string[]|null} lines null hides the tooltip
     * @param {number} x
     * @param {number} y in `el`
     * @param {number} width of `el`
     */
    show(lines, x = 0, y = 0, width = 0) {
      show(box, !!lines);
      if (!lines) return;
      const text = lines.join("\n");
      if (box.textContent !== text) box.textContent = text;
      const isRight = x + 14 + box.offsetWidth <= width;
      box.style.left = `${isRight ? x + 14 : Math.max(x - 14 - box.offsetWidth, 0)}px`;
      box.style.top = `${y + 16}px`;
    },
  };
}
