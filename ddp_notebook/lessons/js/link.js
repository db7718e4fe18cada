/** Connection of a lesson in the browser to the kernel: the state to draw, and requests. */

const SILENT_MS = 500;

/**
 * @typedef {object} Model  the used part of anywidget's model
 * @property {(name: string) => any} get
 * @property {(name: string, listener: Function) => void} on
 * @property {(name: string, listener: Function) => void} off
 * @property {(content: any) => void} send
 */

/**
 * @template {{answered?: string, error?: string}} State of the lesson
 * @typedef {object} Link
 * @property {() => State} state
 * @property {(wish: object) => Promise<State|null>} ask  resolves to the state when the kernel has finished
 * @property {() => boolean} isBusy
 * @property {(listener: () => void) => void} onState
 * @property {(listener: (words: string, isBusy: boolean) => void) => void} onWork
 * @property {() => void} close
 */

/**
 * @template {{answered?: string, error?: string}} State
 * @param {Model} model
 * @returns {Link<State>}
 */
export function linkTo(model) {
  const view = Math.random().toString(36).slice(2, 8); // another view of the same widget asks too
  let number = 0;
  /** @type {{request: string, resolve: (state: State) => void, timer: ReturnType<typeof setTimeout>}|null} */
  let pending = null;
  /** @type {(() => void)[]} */
  const onState = [];
  /** @type {((words: string, isBusy: boolean) => void)[]} */
  const onWork = [];
  const tell = /** @param {string} words @param {boolean} isBusy */ (words, isBusy) => onWork.forEach((listener) => listener(words, isBusy));

  function changed() {
    const answered = pending && model.get("state").answered === pending.request ? pending : null;
    if (answered) {
      clearTimeout(answered.timer);
      pending = null;
    }
    onState.forEach((listener) => listener());
    if (answered) {
      tell("", false);
      answered.resolve(model.get("state"));
    }
  }

  /**
   * Messages can arrive before the state, so only the state shows that a request is done.
   * @param {{kind: string, request: string}} content
   */
  function heard(content) {
    if (!pending || content?.kind !== "began" || content.request !== pending.request) return;
    clearTimeout(pending.timer);
    tell("Running on the ranks …", true);
  }

  model.on("change:state", changed);
  model.on("msg:custom", heard);
  return {
    state: () => model.get("state"),
    isBusy: () => pending !== null,
    ask(wish) {
      if (pending) return Promise.resolve(null);
      return new Promise((resolve) => {
        const request = `${view}-${++number}`;
        const silent = () => tell("Nothing heard from the kernel yet: it runs a cell, and does this after it. (Or there is no kernel.)", true);
        pending = { request, resolve, timer: setTimeout(silent, SILENT_MS) };
        tell("Asking the kernel …", true);
        model.send({ ...wish, request });
      });
    },
    onState: (listener) => void onState.push(listener),
    onWork: (listener) => void onWork.push(listener),
    close() {
      if (pending) clearTimeout(pending.timer);
      model.off("change:state", changed);
      model.off("msg:custom", heard);
    },
  };
}
