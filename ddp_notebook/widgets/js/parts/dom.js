/** Create elements in one line. */

let ids = 0;
// each view may load its own copy of this module, so counting from 1 is not unique
const OWN = Math.random().toString(36).slice(2, 10);

/** An id that is unique on the page. @param {string} name */
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

/**
 * Show or hide an element. Does nothing if it already has this state.
 * @param {HTMLElement} el
 * @param {boolean} isShown
 */
export function show(el, isShown) {
  if (el.hidden === isShown) el.hidden = !isShown;
}
