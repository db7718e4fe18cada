/**
 * Requests points that are missing in the shown courses.
 *
 * The answer has as many points as can be drawn; if there are more, the lowest and the highest of neighbours. While a
 * cell logs faster than its rows may be sent, the request is repeated every few seconds, and once more after the cell.
 */

import { LATE } from "../data/run.js";

const AGAIN_MS = { running: 5000, over: 400 };

/**
 * @typedef {{request: number, at: number, most: number, missing: number|null}} Asked  missing: points that the answer left out; null: no answer yet
 */

export class MissingPoints {
  /** @param {import("../data/store.js").Store} store @param {import("./index.js").Env} env */
  constructor(store, env) {
    this.store = store;
    this.env = env;
    /** @type {WeakMap<import("../data/courses.js").Course, Asked>} */
    this.asked = new WeakMap();
    /** @type {ReturnType<typeof setTimeout>|undefined} */
    this.timer = undefined;
  }

  /**
   * Request missing points.
   * @param {import("../data/courses.js").RunOfCells[]} runs shown runs
   * @param {number} most most points that can be drawn in total
   * @returns {string} the state of the request, as text
   *
   */
  look(runs, most) {
    if (!this.env.canSend) return "";
    const wait = ["running", "stuck"].includes(this.store.state) ? AGAIN_MS.running : AGAIN_MS.over;
    const now = performance.now();
    const missing = runs.flatMap(({ courses }) => courses).filter(({ missing: count }) => count > 0);
    /** @type {import("../data/courses.js").Course[]} */
    const wanted = [];
    let isPending = false;
    let soonest = Infinity;
    for (const course of missing) {
      const before = this.asked.get(course);
      if (before && before.missing === null && this.store.isAnswered(before.request)) before.missing = course.leftOut;
      if (before?.missing === null) isPending = true;
      else if (!before) wanted.push(course);
      else if (course.missing > before.missing || most > before.most) {
        if (now - before.at >= wait) wanted.push(course);
        else soonest = Math.min(soonest, before.at + wait - now);
      }
    }
    if (wanted.length) {
      this.#ask(wanted, most, now);
      isPending = true;
    }
    clearTimeout(this.timer);
    if (soonest < Infinity) this.timer = setTimeout(() => this.env.redraw(), soonest + 10);
    if (!isPending && soonest === Infinity) return "";
    return this.store.answersWhen === LATE ? "the kernel sends the other points when the cell is over" : "the other points are asked for";
  }

  /** @param {import("../data/courses.js").Course[]} courses @param {number} most @param {number} now */
  #ask(courses, most, now) {
    const question = { kind: "ask", what: "metrics", name: courses[0].name, cells: courses.map(({ cell }) => cell) };
    const request = this.env.ask(Number.isFinite(most) ? { ...question, most } : question);
    for (const course of courses) this.asked.set(course, { request, at: now, most, missing: null });
  }

  destroy() {
    clearTimeout(this.timer);
  }
}
