/**
 * The live monitor in the browser: as a widget (anywidget), and on a page without a kernel (`mount`).
 *
 * A module imports only from its own folder and from folders above it in this list. tests/js/layers.test.js checks
 * this.
 *
 *     data/       the state, without access to the page
 *       format          text for numbers, times, sizes and sets of ranks
 *       names           identity of the collective that a row belongs to
 *       unpack          converts a message of the feed to columns
 *       table           rows in columns, in bounded memory
 *       tables          the tables of the store, and the rows of a step or of a collective
 *       courses         courses of metrics: the logged values of each rank and cell
 *       run             state of one run
 *       intake          write side of the store: adds messages
 *       store           read side of the store, for panels
 *       steps           how the time of a step was spent; its buckets
 *       stepmarks       times of steps, and steps that were left out
 *       lanes           spans sorted by start, by rank
 *       values          formats, compares and summarises elements of tensors
 *       tensor_source   the shown collective, and requests for all its elements
 *     drawing/    converts numbers to positions and pixels
 *       colours         meanings of colours, light and dark; colours of ranks
 *       canvas          a sharp canvas with text and arrows
 *       pixels          rectangles drawn directly into pixels
 *       axis            ticks and their labels
 *       timewindow      the time window of the timeline: zoom, pan, axis
 *       curves          lines of a metric, smoothed and thinned
 *       stepbars        positions of the bars of the steps
 *       sync_draw       draws the bars of the steps, the buckets, the times of the ranks
 *       bars            positions of the bars of the timeline
 *       links           ribbons that join the calls of a collective, arrows of remote calls
 *       timeline_draw   draws the timeline
 *       heat            colours for numbers
 *       tiles           positions of tensors
 *       tensors_draw    draws the tensors
 *     parts/      elements that several panels share
 *       dom             elements in one line
 *       a11y            sentence and table behind a picture, line for screen readers
 *       svg             SVG elements in one line
 *       sequence        calls between ranks, and references
 *       controls        choice of ranks, metric, step, collective
 *       legend          meanings of the colours of the step bars
 *       notices         hanging ranks, state of the run, left-out data
 *       tooltip         text next to the pointer
 *     panels/     one tab each
 *       index           list of panels, and the interface of a panel
 *       loss            metrics: loss_picture, loss_missing
 *       sync            gradient synchronisation
 *       timeline        the timeline: timeline_choice, timeline_controls, timeline_pointer, timeline_words
 *       tensors         the tensors of a collective: tensors_words
 *       ranks           the state of each rank
 *       calls           calls between ranks, moment by moment
 *     hub         a store, and the connection to the kernel
 *     neighbours  connects the full view of a session and the compact views under its cells
 *     head        the title, and the controls that apply to all panels
 *     view        one view: tabs, and the times of drawing
 */

import { Hub } from "./hub.js";
import { makeView } from "./view.js";
import { fromBase64 } from "./data/unpack.js";

/** @type {Map<string, Hub>} by the widget's key: `initialize` and `render` get different objects for the same model */
const hubs = new Map();

/**
 * @typedef {object} Model  the used part of anywidget's model
 * @property {(name: "key"|"compact"|"group"|"place") => any} get
 * @property {(content: object) => void} send
 * @property {(name: "msg:custom"|"comm_live_update", listener: Hub["receive"]|Hub["left"]) => void} on  ipywidgets sends the second event when a manager has lost the kernel
 * @property {(name: "msg:custom"|"comm_live_update", listener: Hub["receive"]|Hub["left"]) => void} off
 */

/** Called once for each model. Stores messages even if there is no view. @param {{model: Model}} context */
function initialize({ model }) {
  const key = model.get("key");
  const hub = new Hub((message) => model.send(message));
  hubs.set(key, hub);
  model.on("msg:custom", hub.receive);
  model.on("comm_live_update", hub.left);
  const stop = hub.greet();
  return () => {
    stop();
    model.off("msg:custom", hub.receive);
    model.off("comm_live_update", hub.left);
    hubs.delete(key);
  };
}

/** Called once for each view. @param {{model: Model, el: HTMLElement}} context */
function render({ model, el }) {
  const key = model.get("key");
  if (!hubs.has(key)) initialize({ model });
  const hub = /** @type {Hub} */ (hubs.get(key));
  return makeView(el, hub, { compact: Boolean(model.get("compact")), panel: "loss", key, group: model.get("group"), place: model.get("place") });
}

export default { initialize, render };

/**
 * Show the monitor on a page.
 * @param {HTMLElement} el
 * @param {{start(deliver: Hub["receive"]): (() => void)|void, send?(message: object): void}} source
 * @param {{panel?: string, compact?: boolean}} [options]
 * @returns {() => void} removes the monitor
 */
export function mount(el, source, { panel = "loss", compact = false } = {}) {
  const hub = new Hub(source.send?.bind(source));
  const destroy = makeView(el, hub, { panel, compact });
  const stop = source.start(hub.receive);
  return () => {
    stop?.();
    destroy();
  };
}

/**
 * A source of stored messages.
 * @param {[Record<string, any>, string|ArrayBuffer][]} messages header, and buffer or its base64
 */
export function recorded(messages) {
  return {
    /** @param {Hub["receive"]} deliver */
    start(deliver) {
      for (const [header, data] of messages) deliver(header, [typeof data === "string" ? fromBase64(data) : data]);
    },
  };
}
