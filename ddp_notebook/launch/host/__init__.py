"""The host server: one process per host, which forks the ranks of that host and ends with its owner.

host           one host as its owner sees it     ── messages ─┐
owner/         what that takes: requests and their replies, and whether the host is heard
server         the process that forks ranks      ─────────────┘
channel        the server's end of the stream between the two
preload        what the server imports, and knows about its host
spawn          how it starts a process: a fork of itself, or afresh
child          the first steps of a forked or spawned process
pipes          between the server and each process: cells in, text out; text waits until the owner takes more
files          files that the notebook sends to the host
kill_causes    why the kernel killed a process: out of memory, or a resource limit
open_files     how many files a process may have open, which grows with the ranks
process_state  what is seen of a process that cannot answer: is it stopped, where is its stack
preflight/     what it tells those who compare hosts, and whether others are reached from here
termination    how processes end, with all that they have started
remote_server  how the server of another machine begins, below a process that sees to it
watchdog       sees to the server's end when its owner is gone and it cannot notice

A transport starts the host server and makes the stream to it: see `launch.transports`.
"""
