/** Calls to other ranks: guess, run, and step through the recording. */

import { callsTable, moments, sequence } from "../../widgets/js/parts/sequence.js";
import { button, choice, enable, make, radios, verdict } from "./parts.js";

/** @typedef {import("./states.js").RemoteState} State */

const PACE_MS = 900;

/** @param {HTMLElement} el @param {import("./link.js").Link<State>} link */
export function remote(el, link) {
  const document = el.ownerDocument;
  const state = () => link.state();
  let at = 0;
  let guess = state().guess ?? "";
  let drawnFor = "";
  let ran = state().run;
  let isPlaying = false;

  const controls = make(document, "div", { class: "ddpl-controls" });
  const lesson = make(document, "p", { class: "ddpl-lesson" });
  const code = make(document, "code", {});
  const question = make(document, "fieldset", { class: "ddpl-question" });
  const run = button(document, "Run on the ranks", doRun, { class: "ddpl-main" });
  const back = button(document, "◀", () => goTo(at - 1), { "aria-label": "back one step (,)", title: "back one step (,)" });
  const next = button(document, "Step ▶", () => goTo(at + 1), { title: "the next thing that happened (.)" });
  const play = button(document, "Play", doPlay, { "aria-pressed": "false" });
  const reveal = button(document, "Reveal", () => goTo(moments(state()).length), { title: "all that happened, and the answer" });
  const scrub = make(document, "input", { type: "range", min: "0", step: "1", "aria-label": "step" });
  const where = make(document, "output", {});
  const rule = make(document, "div", { class: "ddpl-rule", role: "status" });
  const picture = make(document, "div", { class: "ddpl-scroll ddpl-tall", tabIndex: 0, role: "region", "aria-label": "what happened" });
  const said = make(document, "div", { role: "status" });
  const table = make(document, "details", { class: "ddpl-wrong" });
  scrub.addEventListener("input", () => goTo(Number(scrub.value)));
  const after = make(document, "div", {}, make(document, "div", { class: "ddpl-actions" }, back, next, play, scrub, where, reveal), rule, picture, said, table);
  el.append(controls, lesson, make(document, "pre", { class: "ddpl-code ddpl-long", tabIndex: 0, "aria-label": "what runs" }, code), question, make(document, "div", { class: "ddpl-actions" }, run), after);
  el.addEventListener("keydown", (event) => {
    if (/^(INPUT|SELECT|TEXTAREA)$/.test(/** @type {HTMLElement} */ (event.target).tagName) || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === ".") goTo(at + 1);
    else if (event.key === ",") goTo(at - 1);
    else return;
    event.preventDefault();
  });

  /** @param {number} step */
  function goTo(step) {
    at = Math.max(0, Math.min(moments(state()).length, step));
    draw();
  }

  async function doRun() {
    isPlaying = false;
    const now = await link.ask({ do: "run", guess });
    if (!now || now.error) return;
    goTo(1);
    next.focus();
  }

  async function doPlay() {
    isPlaying = !isPlaying;
    tellPlaying();
    const last = moments(state()).length;
    if (isPlaying && at === last) goTo(0);
    while (isPlaying && el.isConnected && at < last) {
      goTo(at + 1);
      await new Promise((resolve) => setTimeout(resolve, PACE_MS));
    }
    isPlaying = false;
    tellPlaying();
  }

  function tellPlaying() {
    play.setAttribute("aria-pressed", String(isPlaying));
    play.textContent = isPlaying ? "Pause" : "Play";
  }

  /** @param {State} now */
  function drawQuestion(now) {
    controls.replaceChildren(choice(document, "program", now.stories, now.name, (name) => link.ask({ do: "choose", name })));
    lesson.textContent = now.lesson;
    code.textContent = now.code;
    radios(document, question, now.question, now.choices, guess, (words) => (guess = words));
  }

  function draw() {
    const now = state();
    if (now.name !== drawnFor) {
      if (drawnFor) guess = "";
      drawnFor = now.name;
      drawQuestion(now);
    }
    if (now.run !== ran) {
      ran = now.run;
      at = 0;
    }
    const all = moments(now);
    after.hidden = now.run === null;
    at = Math.min(at, all.length);
    const isAll = at === all.length;
    scrub.max = String(all.length);
    scrub.value = String(at);
    where.textContent = `${at} / ${all.length}`;
    rule.textContent = at ? `${all[at - 1].words}.` : "Nothing has happened yet.";
    picture.replaceChildren(sequence(document, now, at, `${now.calls.length} calls; ${at} of ${all.length} moments. ${rule.textContent}`));
    const marked = picture.querySelector(".ddps-now");
    if (marked) picture.scrollTop += marked.getBoundingClientRect().top - picture.getBoundingClientRect().top - picture.clientHeight / 2;
    said.replaceChildren(...verdict(document, isAll ? now.said : [], now.right));
    table.replaceChildren(make(document, "summary", {}, "All calls in a table"), make(document, "div", { class: "ddpl-scroll" }, callsTable(document, now)));
    table.hidden = !isAll;
    tellEnabled();
  }

  function tellEnabled() {
    const last = moments(state()).length;
    enable(run, !link.isBusy());
    enable(back, at > 0);
    enable(next, at < last);
    enable(reveal, at < last);
  }

  link.onState(draw);
  link.onWork(tellEnabled);
  draw();
  return { inspect: () => ({ at, isPlaying, guess }) };
}
