/**
 * A lesson without a kernel: what its view asks for is answered with what ranks have given when it was recorded
 * (tools/docs/replays.py). What was not recorded is said, and nothing is made up.
 */

/** @typedef {import("../ddp_notebook/lessons/js/states.js").ExplorerState} ExplorerState */
/** @typedef {import("../ddp_notebook/lessons/js/states.js").StepperState} StepperState */
/** @typedef {import("../ddp_notebook/lessons/js/states.js").SceneState} SceneState */
/** @typedef {import("../ddp_notebook/lessons/js/states.js").ProductState} ProductState */
/** @typedef {import("../ddp_notebook/lessons/js/states.js").MeshState} MeshState */
/** @typedef {import("../ddp_notebook/lessons/js/states.js").Happened} Happened */
/** @typedef {Record<string, any>} Wish  what a button asks for, see `Lesson.act` */

/** @typedef {{first: string, states: Record<string, SceneState>}} SceneTape */
/** @typedef {{first: string, states: Record<string, StepperState>}} StepperTape  all steps of each algorithm */
/** @typedef {{first: string, states: ExplorerState[], happened: Record<string, Happened>}} ExplorerTape */
/** @template S @typedef {{before: S, after: S, guesses: Record<string, Partial<S>>}} Guessed  what another guess changes */
/** @template S @typedef {{first: string, states: Record<string, Guessed<S>>}} GuessedTape */

const NOT_RECORDED = "This page replays what four ranks did, and that is not among it. In a notebook your own ranks do it: ";

/** The wish is for something that was not recorded. */
export class NotRecordedError extends Error {
  /** @param {string} call what does it in a notebook */
  constructor(call) {
    super(NOT_RECORDED + call);
  }
}

const same = /** @param {any} one @param {any} other */ (one, other) => JSON.stringify(one) === JSON.stringify(other);

/** Sends and receives. @param {SceneTape} tape */
export function messages(tape) {
  return {
    first: tape.states[tape.first],
    /** @param {SceneState} now @param {Wish} wish */
    answer(now, wish) {
      const found = tape.states[wish.name ?? now.name];
      if (!found) throw new NotRecordedError(`lessons.point_to_point("${wish.name}")`);
      return found;
    },
  };
}

/** An algorithm: all its steps were recorded, and as many are shown as were taken. @param {StepperTape} tape */
export function algorithm(tape) {
  /** @param {string} name @param {number} taken @param {boolean} isCompared @returns {StepperState} */
  const after = (name, taken, isCompared) => {
    const all = tape.states[name];
    return { ...all, taken, states: all.states.slice(0, taken + 1), agrees: isCompared ? all.agrees : null };
  };
  return {
    first: after(tape.first, 0, false),
    /** @param {StepperState} now @param {Wish} wish */
    answer(now, wish) {
      if (wish.do === "restart") return after(now.name, 0, false);
      if (wish.do === "compare") return after(now.name, now.steps, true);
      if (wish.do === "step") return after(now.name, Math.min(now.taken + 1, now.steps), now.agrees !== null);
      const { name, sizes } = wish.options;
      if (!tape.states[name] || !same(sizes, tape.states[name].sizes)) throw new NotRecordedError(`lessons.algorithm("${name}", sizes=[${sizes}])`);
      return after(name, 0, false);
    },
  };
}

/** A collective: each with each root and each way to reduce. @param {ExplorerTape} tape */
export function collective(tape) {
  const forgotten = { prediction: {}, result: null, right: null, agrees: null, happened: null };
  /** What an option leaves open, or what this collective has not, is as it was recorded first. @param {Wish} options */
  const recorded = ({ op, group, dtype, reduce_op, root, peer }) => {
    const matches = /** @param {any} asked @param {any} has @param {boolean} [counts] */ (asked, has, counts = true) => !counts || asked === undefined || same(asked, has);
    const found = tape.states.find(
      (one) =>
        one.op === op &&
        matches(group, one.group) &&
        matches(dtype, one.dtype) &&
        matches(reduce_op, one.reduce_op, one.reduces) &&
        matches(root, one.root, one.rooted) &&
        matches(peer, one.peer, one.messages),
    );
    if (!found) throw new NotRecordedError(`lessons.collective("${op}", ...)`);
    return found;
  };
  return {
    first: { ...recorded({ op: tape.first }), ...forgotten },
    /** @param {ExplorerState} now @param {Wish} wish @returns {ExplorerState} */
    answer(now, wish) {
      if (wish.do === "configure") {
        const { sizes } = wish.options;
        const found = recorded(wish.options);
        if (sizes !== undefined && !same([sizes].flat(), found.sizes)) throw new NotRecordedError(`lessons.collective("${found.op}", sizes=${sizes})`);
        return { ...found, ...forgotten };
      }
      if (wish.do === "wrong") {
        const happened = tape.happened[`${now.line} ${wish.kind} ${wish.rank}`];
        if (!happened) throw new NotRecordedError(`lessons.collective("${now.op}").wrong("${wish.kind}", ${wish.rank})`);
        return { ...now, happened };
      }
      if (wish.inputs && !same(wish.inputs, now.inputs)) throw new NotRecordedError(`lessons.collective("${now.op}", inputs=...)`);
      const found = recorded(now);
      return { ...found, prediction: wish.prediction, right: marks(wish.prediction, found), happened: now.happened };
    },
  };
}

/** A @ B: each placement of both. @param {GuessedTape<ProductState>} tape */
export function product(tape) {
  return guessed(tape, ({ of_a, of_b }) => `${of_a} ${of_b}`, "lessons.product(...)");
}

/** A training on a mesh: each shape of it. @param {GuessedTape<MeshState>} tape */
export function mesh(tape) {
  const key = /** @param {Wish} options */ ({ way, rows, is_by_rank }) => `${way} ${rows} ${Boolean(is_by_rank) && way !== "HSDP"}`;
  return guessed(tape, key, "lessons.mesh(...)");
}

/**
 * A lesson that asks for a guess and then runs.
 * @template S
 * @param {GuessedTape<S>} tape @param {(options: Wish) => string} keyOf @param {string} call what does it in a notebook
 */
function guessed(tape, keyOf, call) {
  let key = tape.first;
  return {
    first: tape.states[key].before,
    /** @param {S} _ @param {Wish} wish @returns {S} */
    answer(_, wish) {
      if (wish.do === "run") return { ...tape.states[key].after, ...tape.states[key].guesses[wish.guess] };
      const wanted = keyOf(wish.options);
      if (!tape.states[wanted]) throw new NotRecordedError(call);
      key = wanted;
      return tape.states[key].before;
    },
  };
}

/**
 * Which predicted elements the ranks have, within what a float32 can tell; what torch does not specify is right.
 * @param {Record<string, (number|null)[]>} prediction @param {ExplorerState} state
 */
function marks(prediction, { result, specified }) {
  /** @type {Record<string, boolean[]>} */
  const found = {};
  for (const [rank, values] of Object.entries(result ?? {})) {
    const guesses = prediction[rank] ?? [];
    const isClose = /** @param {number} value @param {number} at */ (value, at) => guesses[at] !== null && Math.abs(Number(guesses[at]) - value) <= 1e-5 * Math.abs(value);
    found[rank] = specified.includes(Number(rank)) ? (guesses.length ? values.map(isClose) : []) : guesses.map(() => true);
  }
  return found;
}

/**
 * What anywidget would give a view as its model.
 * @param {{first: any, answer(now: any, wish: Wish): any}} lesson
 */
export function model(lesson) {
  let state = lesson.first;
  /** @type {Map<string, Function[]>} */
  const listeners = new Map();
  const emit = /** @param {string} name @param {any} [content] */ (name, content) => listeners.get(name)?.forEach((listener) => listener(content));
  return {
    get: () => state,
    on: /** @param {string} name @param {Function} listener */ (name, listener) => void listeners.set(name, [...(listeners.get(name) ?? []), listener]),
    off: /** @param {string} name @param {Function} listener */ (name, listener) => void listeners.set(name, (listeners.get(name) ?? []).filter((one) => one !== listener)),
    /** @param {Wish} wish */
    send(wish) {
      try {
        state = { ...lesson.answer(state, wish), error: "", answered: wish.request };
      } catch (error) {
        if (!(error instanceof NotRecordedError)) throw error;
        state = { ...state, error: error.message, answered: wish.request };
      }
      emit("change:state");
    },
  };
}
