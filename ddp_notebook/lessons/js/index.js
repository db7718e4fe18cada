/**
 * The lessons in the browser: the functions that anywidget calls.
 *
 *     explorer      a collective: inputs, predictions, results of the ranks
 *     prediction    the inputs that an element can depend on, and the score of the predictions
 *     wrong_use     experiments in which one rank makes an error
 *     stepper       an algorithm, one step at a time
 *     scene         point to point: a time axis, and an arrow for each message
 *     remote        calls to other ranks: a guess, and the recording
 *     product       A @ B in pieces: the ranks that hold each piece, and the collective that combines them
 *     mesh          a training run on a mesh: the communication along rows and columns
 *     parts         elements that all lessons share
 *     link          the state that the kernel sends, and requests to the kernel
 *     states.d.ts   the types of these states
 */

import { statusLine } from "../../widgets/js/parts/a11y.js";
import { palette, textOn, themeOf } from "../../widgets/js/drawing/colours.js";
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
    root.style.setProperty("--accent", colours.focus);
    root.style.setProperty("--on-accent", textOn(colours.focus));
    root.style.setProperty("--bad", colours.alarm);
    for (const part of ["compute", "hidden", "exposed", "waiting", "waitingLine"]) root.style.setProperty(`--${part}`, colours.fill[part]);
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
  // Read by tests.
  Object.assign(root, { ddpLesson: { state: link.state, inspect: lesson.inspect } });
  return () => {
    watcher.disconnect();
    link.close();
  };
}

export default { render };
