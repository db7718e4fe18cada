"""gloo's connections: known, cut, and made anew behind the groups.

A group that somebody holds (a model in DDP or FSDP, a device mesh, a variable of the user's) cannot be replaced there.
So the group stays, and its operations go through the connections of another one: whoever holds it never notices.

abort        which connections there are, and how what waits for them is ended
reconnect    new connections for every group: the group formed anew
models       models in DDP and FSDP, and how they forget a backward that did not end
stuck_waits  waits that gloo forgets to end
sockets      a process's TCP sockets, told by their ports
"""
