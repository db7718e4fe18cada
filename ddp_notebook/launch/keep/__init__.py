"""Sessions that outlive their notebook: `%ddp_start 4 --keep`, `%ddp_attach`.

1. A *keeper* process owns everything that the notebook's process owns otherwise: the `Cluster`, with its hosts, its
   wire and its keys. So ranks and host servers belong to the keeper, and do not notice when a notebook attaches or
   leaves.
2. The keeper runs as the same user, in its own OS session, and is not a descendant of the kernel. It imports no torch.
3. Host servers and watchdogs end with the keeper, as they do with a notebook: no process is kept without an owner.
4. A notebook has a proxy of the cluster (`proxy`), which sends requests to the keeper over a Unix socket of the user.
5. Messages of ranks enter a *journal* first, and are then sent to each attached notebook. The journal keeps text,
   displays and ends of cells until the driving notebook has shown them. Its memory is bounded, and it reports the
   dropped bytes.
6. A notebook that attaches gets the session state, then the journal, then new messages, in one stream. So no message is
   lost or repeated.
7. Batches of the recording are written to files as they arrive, even if a notebook is attached. A notebook reads the
   files when it attaches.
8. One notebook drives. Others are read-only: they get the same stream, and may send queries to ranks.
9. Taking over closes the connection of the former driver, so that it can end nothing any more.
10. The keeper ends on request, when no notebook was attached for its time limit, or when the session was idle for long.

keeper/          the keeper's process: starts the ranks, keeps their messages, and serves notebooks
proxy            the cluster and its hosts in a notebook, through the keeper
connect          start a keeper from a notebook, or attach to one
keeper_client    the notebook's end of the stream: requests, and incoming messages
state            session state: hosts and processes, as sent to notebooks
recording_store  the recording of the ranks, in files
exception_data   exceptions of the keeper, as data
channel          the stream between notebook and keeper, after the first messages (`registry.unix_sockets`)
descriptions     one line for each session and job that a notebook can attach to
"""
