/**
 * Elements in one line each.
 */

let ids = 0;
const OWN = Math.random().toString(36).slice(2, 10); // each view may load this module anew, and count from 1

/** An id that no other view on the page has. @param {string} name */
export function newId(name) {
  return `ddpm-${name}-${OWN}-${++ids}`;
}

/**
 * @template {keyof HTMLElementTagNameMap} T
 * @param {Document} document
 * @param {T} tag
 * @param {Record<string, any>} [properties] of the element; `class`, `role`, `aria-...` and `for` are attributes
 * @param {...(Node|string)} children
 * @returns {HTMLElementTagNameMap[T]}
 */
export function make(document, tag, properties = {}, ...children) {
  const found = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (/^(class|role|for|aria-.*|data-.*)$/.test(name)) found.setAttribute(name, String(value));
    else Object.assign(found, { [name]: value });
  }
  found.append(...children);
  return found;
}

/** Show an element or not, without touching it where that is so already. @param {HTMLElement} el @param {boolean} isShown */
export function show(el, isShown) {
  if (el.hidden === isShown) el.hidden = !isShown;
}
