"""gloo connections: track, close and replace them, while the group objects stay.

A group that is in use (by a DDP or FSDP model, a device mesh or a variable of the user) cannot be replaced by another
object. So the group stays, and its operations use the connections of a successor group. The users of the group do not
notice.

abort        the connections, and how waits for them are ended
reconnect    new connections for every group: re-forms the groups
models       DDP and FSDP models, and how they forget an incomplete backward
stuck_waits  waits that gloo does not end
sockets      the TCP sockets of a process, identified by their ports
"""
