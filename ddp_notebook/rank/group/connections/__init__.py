"""gloo connections: track, close and replace them, while the group objects stay.

DDP or FSDP models, device meshes and variables of the user hold references to groups. So the objects cannot be
replaced. Instead, operations of a group use the connections of its successor. The owners of the references do not
notice.

abort        the connections, and how waits for them are ended
reconnect    new connections for every group: re-forms the groups
models       DDP and FSDP models, and how they forget an incomplete backward
stuck_waits  waits that gloo does not end
sockets      the TCP sockets of a process, identified by their ports
"""
