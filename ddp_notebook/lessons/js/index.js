/**
 * The lessons in the browser: what anywidget calls.
 *
 *     explorer      a collective: inputs, predictions, what the ranks have
 *     prediction    which inputs may go into an element, how many predictions are right
 *     wrong_use     what if one rank gets it wrong?
 *     stepper       an algorithm, one step at a time
 *     scene         point to point: time to the right, an arrow for each message
 *     remote        calls to other ranks: a guess, and what was recorded
 *     product       A @ B in pieces: who holds what, and what puts it together
 *     mesh          a training on a mesh: who talks to whom
 *     parts         pieces that all lessons are made of
 *     link          the state that the kernel sends, and asking it
 *     states.d.ts   the types of these states
 */

import { statusLine } from "../../widgets/js/parts/a11y.js";
import { palette, themeOf } from "../../widgets/js/drawing/colours.js";
import sequenceStyle from "../../widgets/js/parts/sequence.css";
import { explorer } from "./explorer.js";
import { linkTo } from "./link.js";
import { mesh } from "./mesh.js";
import { make } from "./parts.js";
import { product } from "./product.js";
import { remote } from "./remote.js";
import { scene } from "./scene.js";
import { stepper } from "./stepper.js";
import style from "./style.css";

/** @typedef {ReturnType<typeof statusLine>} Status */

/** @type {Record<string, {show: (el: HTMLElement, link: import("./link.js").Link<any>, status: Status) => {inspect: () => object}, title: string}>} */
const LESSONS = {
  collective: { show: explorer, title: "Collective explorer" },
  algorithm: { show: stepper, title: "Algorithm, step by step" },
  messages: { show: scene, title: "Point to point" },
  remote: { show: remote, title: "Calls to other ranks" },
  product: { show: product, title: "A @ B in pieces" },
  mesh: { show: mesh, title: "Training on a mesh" },
};

/** @param {{model: import("./link.js").Model, el: HTMLElement}} given */
function render({ model, el }) {
  const document = el.ownerDocument;
  const link = linkTo(model);
  const { show, title } = LESSONS[model.get("state").kind];
  const root = make(document, "section", { class: "ddpl", "aria-label": title, "aria-busy": "false", "data-lm-suppress-shortcuts": "true" });
  const line = make(document, "div", { class: "ddpl-status" });
  const error = make(document, "div", { class: "ddpl-error", role: "alert" });
  const status = statusLine(line);
  const body = make(document, "div", {});
  root.append(make(document, "style", {}, style + sequenceStyle), make(document, "div", { class: "ddpl-title" }, title), body, error, line);
  el.append(root);

  function theme() {
    const colours = palette(themeOf(root));
    root.dataset.theme = colours.theme;
    colours.ranks.forEach((colour, rank) => root.style.setProperty(`--rank${rank}`, colour));
  }
  theme();
  const watcher = new MutationObserver(theme);
  watcher.observe(document.body, { attributes: true });

  const lesson = show(body, link, status);
  link.onWork((words, isBusy) => {
    root.toggleAttribute("data-busy", isBusy);
    root.setAttribute("aria-busy", String(isBusy));
    if (words || !isBusy) status.say(words);
  });
  const tellError = () => {
    const words = link.state().error ?? "";
    if (error.textContent !== words) error.textContent = words;
  };
  link.onState(tellError);
  tellError();
  // What tests read.
  Object.assign(root, { ddpLesson: { state: link.state, inspect: lesson.inspect } });
  return () => {
    watcher.disconnect();
    link.close();
  };
}

export default { render };
