"""Sessions that outlive their notebook: `%ddp_start 4 --keep`, `%ddp_attach`.

Which process keeps what:

1. A *keeper* has what otherwise the notebook's process has: the `Cluster`, with its hosts, its wire and its keys. So
   ranks and host servers are the keeper's, whatever the way to them, and notice nothing when a notebook goes or comes.
2. It is a process of the user's, no descendant of the kernel's, in an OS session of its own. It imports no torch.
3. Host servers and watchdogs end with the keeper, as they do with a notebook: nothing is kept that nobody owns.
4. A notebook has a stand-in of the cluster (`stand_in`), which asks the keeper by a Unix socket of the user's.
5. What ranks say goes into a *journal* first, and then to each notebook that is there. It keeps text, displays and ends
   of cells until the notebook that drives has shown them, in bounded memory, and says what it left out.
6. A notebook that attaches is told how things are, then the journal, then what comes: one stream, so nothing is lost
   between them and nothing comes twice.
7. Batches of the recording are written to files as they come, also while a notebook is there, which reads them when it
   attaches.
8. One notebook drives; others look: they get the same stream, and may ask ranks, but do nothing.
9. Taking over closes the connection of who drove before, so that one can end nothing any more.
10. The keeper ends when it is told to, when nobody was there for its hours, or when that long nothing has run.

keeper/          its process: starts the ranks, keeps what they say, and serves notebooks
proxy            the cluster and its hosts as a notebook has them
connect          from a notebook: starting a keeper, attaching to one
remote           what is asked of it, and what comes
state            how things are: what a notebook is told of hosts and processes
recording_store  what ranks have recorded, in files
exception_data   exceptions of the keeper, as data
channel          the stream between the two, after the first words (`registry.unix_sockets`)
descriptions     what can be attached to in a line each, a session as it says itself how it is
"""
