"""The host server: one process per host, which forks the ranks of that host and ends with its owner.

host         a host server as its owner sees it     ── framing ──┐
server       the process that forks ranks           ─────────────┘
framing      frames on one stream between the two
preload      what the server imports, and knows about its host
pipes        between it and each rank: cells in, text out
child        the first steps of a forked or spawned process
watchdog     sees to the server's end when its owner is gone and it cannot notice
"""
