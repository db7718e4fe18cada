/**
 * A store, and the connection to the kernel. There is one hub for each model of the widget. It lives as long as the
 * model, so it has the data from before a view was opened.
 */

import { LATE } from "./data/run.js";
import { Store } from "./data/store.js";

const HELLO_AFTER_MS = 300; // the first message of a model from a running cell arrives earlier
// Until a front end has a subshell for its messages, it sends them to the kernel's main thread.
const HERE_AFTER_MS = [0, 300, 800, 1500];
const LAST_WORDS_MS = 8000; // a restarting kernel has ended by then: Jupyter servers give it five seconds
const HEARD_AFTER_MS = 2500; // a kernel that has not answered by then reads messages only after its cell

export class Hub {
  /** @param {(message: object) => void} [send] undefined on a page without a kernel */
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
   * The kernel is restarting, or the connection was replaced. The data stays as the last picture. Last messages of the
   * old kernel arrive later than this; a kernel that is still alive will answer.
   */
  left = () => {
    this.store.leave();
    setTimeout(() => {
      this.store.leave();
      this.send({ kind: "hello" });
    }, LAST_WORDS_MS);
  };

  /** void} => Announce the view, and request a snapshot unless one arrives. @returns {() => void} => void} */
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

  /**
   * Send a request. Its answer appears in `store.answers` under the returned number.
   * @param {Record<string, any>} message
   */
  ask(message) {
    this.send({ ...message, request: ++this.requests });
    return this.requests;
  }
}
