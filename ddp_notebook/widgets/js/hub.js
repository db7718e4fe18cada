/**
 * A store, and the connection to the kernel. There is one for each model of the widget, which lives as long as the model:
 * so it has what came before a view was opened.
 */

import { LATE } from "./data/run.js";
import { Store } from "./data/store.js";

const HELLO_AFTER_MS = 300; // a model that was made by a running cell gets its first message sooner
// A front end that has no subshell for its messages yet sends the first ones to the kernel's main thread.
const HERE_AFTER_MS = [0, 300, 800, 1500];
const LAST_WORDS_MS = 8000; // a kernel that is restarted has ended by then: Jupyter's servers give it five seconds
const HEARD_AFTER_MS = 2500; // a kernel that has not answered by then reads all that when its cell is over

export class Hub {
  /** @param {(message: object) => void} [send] none on a page without a kernel */
  constructor(send) {
    this.store = new Store();
    this.canSend = Boolean(send);
    this.send = send ?? (() => {});
    this.requests = 0;
  }

  /** @param {Record<string, any>} message @param {(ArrayBuffer|ArrayBufferView)[]} [buffers] */
  receive = (message, buffers) => {
    if (this.store.feed(message, buffers)) this.send({ kind: "hello" });
  };

  /**
   * The kernel is restarted, or the connection to it is another one: what is there stays, and is the last picture. What an
   * old one says last comes later than this; one that is there all the same answers.
   */
  left = () => {
    this.store.leave();
    setTimeout(() => {
      this.store.leave();
      this.send({ kind: "hello" });
    }, LAST_WORDS_MS);
  };

  /** Say that somebody is here, and ask for all there is, unless it comes by itself. @returns {() => void} */
  greet() {
    const last = HERE_AFTER_MS.length - 1;
    const timers = HERE_AFTER_MS.map((after, at) =>
      setTimeout(() => {
        if (!this.store.heard) this.send({ kind: "here", last: at === last });
      }, after),
    );
    timers.push(
      setTimeout(() => {
        if (!this.store.messages) this.send({ kind: "hello" });
      }, HELLO_AFTER_MS),
      setTimeout(() => {
        if (!this.store.heard) this.store.takeHeard(LATE);
      }, HEARD_AFTER_MS),
    );
    return () => timers.forEach((timer) => clearTimeout(timer));
  }

  /** A question; its answer is in `store.answers` by the number that is returned. @param {Record<string, any>} message */
  ask(message) {
    this.send({ ...message, request: ++this.requests });
    return this.requests;
  }
}
