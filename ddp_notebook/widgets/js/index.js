/**
 * The live monitor in the browser: as a widget (anywidget), and on a page without a kernel (`mount`).
 *
 * A module imports from its own room and from those above it in this list; tests/js/layers.test.js holds that.
 *
 *     data/       what is known, without a page
 *       format          numbers, times, sizes and sets of ranks in words
 *       names           which collective a row is of
 *       unpack          from a message of the feed to columns
 *       table           rows in columns, in bounded memory
 *       tables          the tables that are kept, and the rows of a step or of a collective
 *       courses         the courses of metrics: what each rank has logged in each cell
 *       run             all that is known of one run
 *       intake          how messages are taken in
 *       store           what panels ask
 *       steps           what a step's time went into; its buckets
 *       stepmarks       when each step was; which were left out
 *       lanes           spans in the order of their start, by rank
 *       values          elements of tensors: written, compared, in one line
 *       tensor_source   which collective's tensors are shown, and asking for all elements
 *     drawing/    from numbers to places and pixels
 *       colours         what each colour means, light and dark; the colour of a rank
 *       canvas          a sharp canvas, words and arrows on it
 *       pixels          rectangles straight into pixels
 *       axis            ticks and their labels
 *       timewindow      the stretch of time that the timeline shows: zoom, pan, axis
 *       curves          lines of a metric, smoothed and thinned
 *       stepbars        where the bars of the steps lie
 *       sync_draw       the bars of the steps, the buckets, the ranks' times
 *       bars            where the timeline's bars lie
 *       links           ribbons that join a collective's calls, arrows of remote calls
 *       timeline_draw   the timeline
 *       heat            numbers as colours
 *       tiles           where tensors lie
 *       tensors_draw    the tensors
 *     parts/      pieces of the page that several panels have
 *       dom             an element in one line
 *       a11y            the sentence and the table behind a picture, the line that is read out
 *       svg             elements of SVG
 *       sequence        calls between ranks, and who has a reference to what
 *       controls        choosing ranks, metric, step, collective
 *       legend          what the colours of the steps' bars mean
 *       notices         who hangs, what goes on, what was left out
 *       tooltip         words beside the pointer
 *     panels/     a tab each
 *       index           the list of panels, and what a panel is
 *       loss            metrics: loss_picture, loss_missing
 *       sync            gradient synchronisation
 *       timeline        the timeline: timeline_choice, timeline_controls, timeline_pointer, timeline_words
 *       tensors         the tensors of a collective: tensors_words
 *       ranks           how each rank is
 *       calls           calls between ranks, one moment after the other
 *     hub         a store, and the connection to the kernel
 *     neighbours  the full view of a session and the small ones under its cells
 *     head        the title and what is chosen for all panels
 *     view        one view: tabs, when to draw
 */

import { Hub } from "./hub.js";
import { makeView } from "./view.js";
import { fromBase64 } from "./data/unpack.js";

/** @type {Map<string, Hub>} by the widget's key: a model comes to `initialize` and to `render` as different objects */
const hubs = new Map();

/**
 * @typedef {object} Model  of anywidget, as far as it is used
 * @property {(name: "key"|"compact"|"group"|"place") => any} get
 * @property {(content: object) => void} send
 * @property {(name: "msg:custom"|"comm_live_update", listener: Hub["receive"]|Hub["left"]) => void} on  the second name
 *   is of ipywidgets, and told when a manager has lost the kernel
 * @property {(name: "msg:custom"|"comm_live_update", listener: Hub["receive"]|Hub["left"]) => void} off
 */

/** Once for each model: takes in what comes, whether somebody looks or not. @param {{model: Model}} context */
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

/** Once for each view. @param {{model: Model, el: HTMLElement}} context */
function render({ model, el }) {
  const key = model.get("key");
  if (!hubs.has(key)) initialize({ model });
  const hub = /** @type {Hub} */ (hubs.get(key));
  return makeView(el, hub, { compact: Boolean(model.get("compact")), panel: "loss", key, group: model.get("group"), place: model.get("place") });
}

export default { initialize, render };

/**
 * The monitor on a page.
 * @param {HTMLElement} el
 * @param {{start(deliver: Hub["receive"]): (() => void)|void, send?(message: object): void}} source
 * @param {{panel?: string, compact?: boolean}} [options]
 * @returns {() => void} takes it away
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
 * A source of messages that were kept.
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
