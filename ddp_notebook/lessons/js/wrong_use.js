/** Experiments in which one rank makes an error: runs them on the ranks and shows the result. */

import { button, choice, enable, figure, make } from "./parts.js";

/** @typedef {import("./states.js").ExplorerState} State */

/**
 * @param {Document} document
 * @param {import("./link.js").Link<State>} link
 * @param {{say(words: string): void}} status
 */
export function wrongUse(document, link, status) {
  let kind = "";
  let rank = "";
  let isOpen = false;
  const el = make(document, "details", { class: "ddpl-wrong" });
  el.addEventListener("toggle", () => (isOpen = el.open));

  /** @param {State} now */
  function draw(now) {
    if (!now.wrong.includes(kind)) kind = now.wrong[0];
    if (!now.actors.includes(Number(rank)) || rank === "") rank = String(now.actors.at(-1));
    const attempt = button(document, "Try it on the ranks", tryIt);
    enable(attempt, !link.isBusy());
    el.replaceChildren(
      make(document, "summary", {}, "What if one rank gets it wrong?"),
      make(
        document,
        "div",
        { class: "ddpl-controls" },
        choice(document, "what is wrong", now.wrong, kind, (value) => (kind = value)),
        choice(document, "on rank", now.actors, rank, (value) => (rank = value)),
        attempt,
      ),
      make(document, "div", { class: "ddpl-told", role: "status" }, ...(now.happened ? told(now.happened) : [])),
    );
    el.open = isOpen;
  }

  async function tryIt() {
    await link.ask({ do: "wrong", kind, rank: Number(rank) });
    const { happened } = link.state();
    if (happened) status.say(happened.error ? "" : "No rank raised an error.");
    el.querySelector("button")?.focus();
  }

  /** @param {import("./states.js").Happened} happened */
  function told({ code, error, message, by_rank: byRank, values, seconds }) {
    const ran = make(document, "pre", { class: "ddpl-code", "aria-label": "what ran" }, make(document, "code", {}, code));
    if (!error) {
      const numbers = Object.entries(values).map(([one, its]) => `rank ${one}: ${its.map(figure).join(", ")}`);
      return [ran, make(document, "p", {}, make(document, "b", {}, "No rank raised an error. "), "The ranks have these numbers:"), list(numbers)];
    }
    const isHang = error === "CellTimeoutError";
    const isFound = message.includes("Nothing was sent");
    const how = isHang ? "They waited, and were stopped. " : isFound ? "It was found before data moved. " : "It failed. ";
    /** @type {HTMLElement[]} */
    const found = [
      ran,
      make(document, "p", {}, make(document, "b", {}, how), `After ${seconds.toFixed(1)} s the group could be used again, every variable kept.`),
      make(document, "pre", { class: "ddpl-message" }, `${error}: ${message}`),
    ];
    if (!isHang && !isFound) found.push(list(Object.entries(byRank).map(([one, act]) => `rank ${one}: ${act}`)));
    return found;
  }

  /** @param {string[]} lines */
  function list(lines) {
    return make(document, "ul", {}, ...lines.map((line) => make(document, "li", {}, line)));
  }

  return {
    el,
    draw,
    /** @param {boolean} isBusy */
    work(isBusy) {
      for (const one of el.querySelectorAll("button")) enable(one, !isBusy);
    },
  };
}
