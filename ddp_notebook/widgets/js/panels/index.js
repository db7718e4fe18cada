/**
 * The panels, in the order of their tabs.
 *
 * A panel is a function that fills an element and returns a `Panel`. To add a panel, add a file here and a line in
 * `PANELS`.
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
 * @property {() => void} draw  called in an animation frame after a change
 * @property {(width: number, height: number) => void} resize  CSS pixels
 * @property {(width: number) => number} height  its height at this width
 * @property {() => string} describe  the picture in a sentence
 * @property {() => {head: string[], rows: string[][]}|null} table  the same as a table, for screen readers
 * @property {() => string[]} notes  notes about left-out or merged data
 * @property {() => Record<string, any>} state  the drawn state, for tests
 * @property {() => boolean} [isEmpty]  whether there is nothing to draw; a compact view then hides the panel
 * @property {() => {metric: string|null}} [drawn]  the metric whose latency is measured
 * @property {(event: KeyboardEvent) => boolean} onKey  whether the panel has used the key
 * @property {() => void} destroy
 *
 */

/**
 * @typedef {object} Env  the environment that a view gives to a panel
 * @property {import("../drawing/colours.js").Palette} colours
 * @property {number} dpr  device pixels per CSS pixel
 * @property {boolean} reducedMotion
 * @property {boolean} compact  the view under a running cell
 * @property {boolean} canSend  there is a kernel
 * @property {(message: Record<string, any>) => number} ask  returns the key of the answer in `store.answers`
 * @property {(resized?: boolean) => void} redraw
 *
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
