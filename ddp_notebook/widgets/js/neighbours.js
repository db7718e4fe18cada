/**
 * Connects the full view and the compact views of one session on the page.
 *
 * A compact view stands under a running cell. While the full view of `%ddp_monitor` is visible, the compact view is one
 * line with a link. Each widget loads its own copy of this module, so the shared state is in the page.
 */

import { make, show } from "./parts/dom.js";

const CHANGED = "ddp-monitor-seen";
const LEAST_SEEN = 0.3; // share of the full view that must be visible
export const THRESHOLDS = [0, LEAST_SEEN, 0.6];

/** @param {IntersectionObserverEntry} entry */
export const isWellSeen = ({ isIntersecting, intersectionRatio, intersectionRect, rootBounds }) =>
  isIntersecting && (intersectionRatio >= LEAST_SEEN || (rootBounds !== null && intersectionRect.height > rootBounds.height / 2));

/**
 * Notify the compact views whether a full view is visible.
 * @param {HTMLElement} root of the full view
 * @param {{group: string, place: string}} whose
 * @param {boolean} isSeen
 */
export function tellSeen(root, { group, place }, isSeen) {
  if (!group || root.dataset.seen === String(isSeen)) return;
  Object.assign(root.dataset, { group, place, seen: String(isSeen) });
  root.ownerDocument.dispatchEvent(new CustomEvent(CHANGED, { detail: group }));
}

/** Notify the compact views that a full view was removed. @param {HTMLElement} root */
export function tellGone(root) {
  const { group } = root.dataset;
  delete root.dataset.group;
  if (group) root.ownerDocument.dispatchEvent(new CustomEvent(CHANGED, { detail: group }));
}

/**
 * The line in a compact view that leads to the full one.
 * @param {HTMLElement} root of the compact view
 * @param {string} group
 * @param {() => void} changed called when the view changes
 */
export function follow(root, group, changed) {
  const document = root.ownerDocument;
  const words = make(document, "span", {});
  const link = make(document, "button", { type: "button", class: "ddpm-link", onclick: go });
  const el = make(document, "div", { class: "ddpm-neighbour", hidden: true }, words, link);

  function full() {
    const all = group ? [...document.querySelectorAll(`.ddpm[data-group="${group}"]`)] : [];
    return /** @type {HTMLElement[]} */ (all).find((one) => one !== root) ?? null;
  }

  function go() {
    const there = full();
    there?.scrollIntoView({ block: "center" });
    /** @type {HTMLElement|null|undefined} */ (there?.querySelector("[role=tab][aria-selected=true]"))?.focus({ preventScroll: true });
  }

  function update() {
    const there = full();
    const isSeen = there?.dataset.seen === "true";
    show(el, there !== null);
    words.textContent = isSeen ? "Shown live in " : "All panels are in ";
    link.textContent = there?.dataset.place ? `the monitor of ${there.dataset.place}` : "the monitor";
    if (root.classList.contains("ddpm-elsewhere") === isSeen) return;
    root.classList.toggle("ddpm-elsewhere", isSeen);
    changed();
  }

  /** @param {Event} event */
  const listen = (event) => {
    if (/** @type {CustomEvent} */ (event).detail === group) update();
  };
  document.addEventListener(CHANGED, listen);
  return { el, update, destroy: () => document.removeEventListener(CHANGED, listen) };
}
