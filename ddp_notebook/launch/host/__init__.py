"""The host server: one process per host, which forks the ranks of that host and ends with its owner.

host              one host as its owner sees it     ── messages ─┐
owner/            the owner's side of the stream: requests with replies, and pings
server            the process that forks ranks      ─────────────┘
owner_channel     the server's end of the stream between the two
preload           imports of the server, and facts about its host
spawn             starts a process: a fork of the server, or a new interpreter
child             the first steps of a forked or spawned process
pipes             pipes to each process: cells in, text out; back-pressure when the owner reads slowly
files             files that the notebook sends to the host
kill_causes       finds why the kernel killed a process: out of memory, or a resource limit
open_files        limits of open files, which grow with the number of ranks
preflight_checks  facts for the comparison of hosts, and connection tests
process_state     inspects processes that cannot answer: stopped or not, and the stack
termination       ends processes with all their descendants
remote_server     starts the server on another machine, as the child of a process that watches it
watchdog          ends the server if it hangs or is stopped when its owner has gone

A transport starts the host server and makes the stream to it: see `launch.transports`.
"""
