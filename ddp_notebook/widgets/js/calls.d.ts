// Calls between ranks as the kernel tells them (observe/figures/moments.py).

/** A call to another rank; times are milliseconds since the first one was sent. */
export interface RemoteCall {
  src: number;
  dst: number;
  function: string;
  kind: string;
  site: string;
  parent: number | null; // place of the call inside of which it was made
  nbytes: number | null; // null: not known
  sent: number;
  begun: number | null;
  ended: number | null;
  done: number | null; // when its answer was there; later than `ended` with async_execution
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

/** A send and its recv; `at` is when the backward went through them, from `dst` to `src`. */
export interface RemotePair {
  src: number;
  dst: number;
  at: number | null;
}
