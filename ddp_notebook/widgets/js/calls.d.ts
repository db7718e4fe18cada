// Calls between ranks as the kernel sends them (observe/figures/moments.py).

/** A call to another rank; times are milliseconds since the first one was sent. */
export interface RemoteCall {
  src: number;
  dst: number;
  function: string;
  kind: string;
  site: string;
  parent: number | null; // index of the enclosing call
  nbytes: number | null; // null: not known
  sent: number;
  begun: number | null;
  ended: number | null;
  done: number | null; // arrival of the answer; later than `ended` with async_execution
  returned: number | null;
  error: string;
}

export interface RemoteReference {
  owner: number;
  what: string;
  made: number | null;
  deleted: number | null;
  users: { rank: number; parent: number | null; since: number | null; deleted: number | null }[];
}

/** A send and its recv; `at` is the time of their backward pass, from `dst` to `src`. */
export interface RemotePair {
  src: number;
  dst: number;
  at: number | null;
}
