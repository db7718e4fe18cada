/**
 * The live monitor in the browser: as a widget (anywidget), and on a page without a kernel (`mount`).
 */

import { Hub } from "./data/hub.js";
import { makeView } from "./view.js";
import { fromBase64 } from "./data/wire.js";

/** @type {Map<string, Hub>} by the widget's key: a model comes to `initialize` and to `render` as different objects */
const hubs = new Map();

/** Once for each model: takes in what comes, whether somebody looks or not. @param {{model: any}} context */
function initialize({ model }) {
  const key = model.get("key");
  const hub = new Hub((message) => model.send(message));
  hubs.set(key, hub);
  model.on("msg:custom", hub.receive);
  const stop = hub.greet();
  return () => {
    stop();
    model.off("msg:custom", hub.receive);
    hubs.delete(key);
  };
}

/** Once for each view. @param {{model: any, el: HTMLElement}} context */
function render({ model, el }) {
  const key = model.get("key");
  if (!hubs.has(key)) initialize({ model });
  const hub = /** @type {Hub} */ (hubs.get(key));
  return makeView(el, hub, { compact: Boolean(model.get("compact")), panel: "loss" });
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
