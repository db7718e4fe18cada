/** Point-to-point communication: a row for each rank, time to the right, an arrow for each message. */

import { arrow, button, choice, enable, make, svg } from "./parts.js";

const WIDTH = 760;
const LEFT = 58;
const ROW = 58;
const FOOT = 30;
const LETTER = 7; // width of a letter of a label
const GAP = 10; // between two labels

/** Round tick distances of an axis. @param {number} end */
export function ticks(end) {
  const rough = end / 6;
  const power = 10 ** Math.floor(Math.log10(rough || 1));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough) ?? power;
  const found = [];
  for (let at = 0; at <= end + 1e-9; at += step) found.push(Number(at.toPrecision(10)));
  return found;
}

/** @typedef {{words: string, width: number, x: number, y: number}} Label */

/** Move the labels of a line apart, so that none covers another one or ends outside. @param {Label[]} labels */
export function sideBySide(labels) {
  const moved = labels.map((label) => ({ ...label }));
  moved.forEach((label, at) => {
    if (at) label.x = Math.max(label.x, moved[at - 1].x + moved[at - 1].width + GAP);
  });
  let end = WIDTH;
  for (const label of moved.reverse()) {
    label.x = Math.min(label.x, end - label.width);
    end = label.x - GAP;
  }
  return moved.reverse();
}

/** @typedef {import("./states.js").SceneState} State */
/** @typedef {import("./states.js").Event} Event */

/** @param {HTMLElement} el @param {import("./link.js").Link<State>} link */
export function scene(el, link) {
  const document = el.ownerDocument;
  let name = link.state().name;
  const controls = make(document, "div", { class: "ddpl-controls" });
  const again = button(document, "Play on the ranks", play, { class: "ddpl-main" });
  const lesson = make(document, "p", { class: "ddpl-lesson" });
  const code = make(document, "code", {});
  const picture = make(document, "div", { class: "ddpl-scroll", tabIndex: 0, role: "region", "aria-label": "what happened" });
  const said = make(document, "ul", { class: "ddpl-said" });
  const status = make(document, "div", { role: "status" }, said); // the list must keep its role
  const message = make(document, "pre", { class: "ddpl-message" });
  el.append(controls, lesson, make(document, "pre", { class: "ddpl-code", "aria-label": "what runs on every rank" }, code), picture, status, message);

  async function play() {
    await link.ask({ do: "play", name });
  }

  function draw() {
    const now = link.state();
    if (!controls.childElementCount || name !== now.name) {
      name = now.name;
      controls.replaceChildren(
        choice(document, "scene", now.stories, now.name, (value) => {
          name = value;
          play();
        }),
        again,
        key(now),
      );
    }
    lesson.textContent = now.lesson;
    code.textContent = now.code;
    said.replaceChildren(...(now.said.length ? now.said : ["no rank waited"]).map((line) => make(document, "li", {}, line)));
    message.hidden = !now.message;
    message.textContent = now.message;
    picture.replaceChildren(timeline(now), ...(now.strip ? [strip(now.strip)] : []));
    enable(again, !link.isBusy());
  }

  /** @param {State} now */
  function key(now) {
    const items = Object.entries(now.parts).map(([part, words]) => make(document, "span", {}, make(document, "i", { class: `ddpl-part-${part}` }), words));
    return make(document, "span", { class: "ddpl-legend" }, ...items);
  }

  /** @param {State} now */
  function timeline(now) {
    const ranks = [...new Set(now.events.map((event) => event.rank))].sort((a, b) => a - b);
    const n = ranks.length;
    const end = Math.max(1, ...now.events.map((event) => event.end)) * 1.04;
    const x = /** @param {number} ms */ (ms) => LEFT + ((WIDTH - LEFT - 12) * ms) / end;
    const y = /** @param {number} rank */ (rank) => 12 + ranks.indexOf(rank) * ROW;
    const height = 12 + n * ROW + FOOT;
    const words = `${now.title}. ${now.said.join(". ")}`;
    const found = svg(document, "svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": words, class: "ddpl-timeline" });
    for (const ms of ticks(end)) {
      found.append(svg(document, "line", { x1: x(ms), x2: x(ms), y1: 6, y2: height - FOOT, class: "ddpl-tick" }), svg(document, "text", { x: x(ms), y: height - FOOT + 15, class: "ddpl-ms" }, `${ms}${ms ? "" : " ms"}`));
    }
    for (const rank of ranks) {
      found.append(svg(document, "line", { x1: LEFT, x2: WIDTH - 12, y1: y(rank) + 40, y2: y(rank) + 40, class: "ddpl-base" }), svg(document, "text", { x: 2, y: y(rank) + 30, class: "ddpl-row-name" }, `rank ${rank}`));
    }
    /** @type {Map<string, Label[]>} */
    const lines = new Map(); // labels by their line: in the bars of a rank, or below them
    for (const event of now.events) {
      const [top, high] = event.what === "work" ? [2, 12] : [20, 18];
      for (const [from, to, part] of event.spans) {
        found.append(svg(document, "rect", { x: x(from), y: y(event.rank) + top, width: Math.max(2.5, x(to) - x(from)), height: high, class: `ddpl-part-${part}${event.over ? "" : " ddpl-stuck"}` }));
      }
      if (event.what === "work") continue;
      const peer = event.peer === null ? "any" : event.peer;
      const words = `${event.what} ${event.what.includes("send") ? "→" : "←"} ${peer}${event.tag ? `, tag ${event.tag}` : ""}${event.over ? "" : "  ✗ never returns"}`;
      const width = words.length * LETTER;
      const isInside = x(event.end) - x(event.start) > width + 10;
      const label = { words, width, x: x(event.start) + (isInside ? 5 : 0), y: y(event.rank) + (isInside ? 33 : 51) };
      lines.set(`${label.y}`, [...(lines.get(`${label.y}`) ?? []), label]);
    }
    for (const [sent, received] of now.arrows) {
      const [one, other] = [now.events[sent], now.events[received]];
      if (!one.over || !other.over) continue;
      const down = other.rank > one.rank;
      const begin = Math.max(one.start, other.start);
      const line = arrow(document, [x(begin), y(one.rank) + (down ? 38 : 20)], [x(other.end), y(other.rank) + (down ? 20 : 38)], { class: "ddpl-message-arrow" });
      found.append(line);
    }
    for (const label of [...lines.values()].flatMap(sideBySide)) found.append(svg(document, "text", { x: label.x, y: label.y, class: "ddpl-what" }, label.words));
    return found;
  }

  /** The values that the receiver of a race has. @param {number[]} values */
  function strip(values) {
    const changed = values.filter((value) => value !== 1).length;
    const share = Math.round((100 * changed) / values.length);
    const words = `What rank 1 has received, from the first element to the last: ${100 - share} % as at isend, ${share} % changed.`;
    const found = svg(document, "svg", { viewBox: `0 0 ${values.length} 14`, preserveAspectRatio: "none", class: "ddpl-strip", role: "img", "aria-label": words });
    values.forEach((value, at) => found.append(svg(document, "rect", { x: at, y: value === 1 ? 0 : 4, width: 1.05, height: value === 1 ? 14 : 10, class: value === 1 ? "ddpl-as-sent" : "ddpl-changed" })));
    return make(document, "figure", { class: "ddpl-figure" }, found, make(document, "figcaption", {}, words, " ", make(document, "i", { class: "ddpl-key-sent" }), "1, as it was  ", make(document, "i", { class: "ddpl-key-changed" }), "2, changed"));
  }

  link.onState(draw);
  link.onWork(() => enable(again, !link.isBusy()));
  draw();
  return { inspect: () => ({ name }) };
}
