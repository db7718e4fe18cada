/**
 * The panels, in the order of their tabs.
 *
 * A panel is a function that fills an element and returns a `Panel`. One more is a file here and a line in `PANELS`.
 */

import { callsPanel } from "./calls.js";
import { lossPanel } from "./loss.js";
import { ranksPanel } from "./ranks.js";
import { syncPanel } from "./sync.js";
import { tensorsPanel } from "./tensors.js";
import { timelinePanel } from "./timeline.js";

/**
 * @typedef {object} Panel
 * @property {import("../parts/controls.js").Control[]} controls  above the picture; none in a compact view
 * @property {() => void} draw  within an animation frame, when something has changed
 * @property {(width: number, height: number) => void} resize  CSS pixels
 * @property {(width: number) => number} height  that it would have at this width
 * @property {() => string} describe  the picture in a sentence
 * @property {() => {head: string[], rows: string[][]}|null} table  the same as a table, for screen readers
 * @property {() => string[]} notes  what was left out or drawn together
 * @property {() => Record<string, any>} state  what is drawn, for tests
 * @property {() => boolean} [isEmpty]  whether there is nothing to draw: a compact view leaves the panel out
 * @property {() => {metric: string|null}} [drawn]  whose latency is measured
 * @property {(event: KeyboardEvent) => boolean} onKey  whether the key was for it
 * @property {() => void} destroy
 */

/**
 * @typedef {object} Env  what a panel has of its view
 * @property {import("../drawing/colours.js").Palette} colours
 * @property {number} dpr  device pixels in a CSS pixel
 * @property {boolean} reducedMotion
 * @property {boolean} compact  the view under a running cell
 * @property {boolean} canSend  there is a kernel
 * @property {(message: Record<string, any>) => number} ask  returns the number by which `store.answers` has the answer
 * @property {(resized?: boolean) => void} redraw
 */

/** @type {Record<string, {title: string, make: (el: HTMLElement, store: import("../data/store.js").Store, env: Env) => Panel}>} */
export const PANELS = {
  loss: { title: "Loss", make: lossPanel },
  sync: { title: "Gradient sync", make: syncPanel },
  timeline: { title: "Timeline", make: timelinePanel },
  tensors: { title: "Tensors", make: tensorsPanel },
  ranks: { title: "Ranks", make: ranksPanel },
  calls: { title: "Calls", make: callsPanel },
};
