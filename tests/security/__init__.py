"""What another user of the machine can do to a session: a second user who attacks every port and socket."""
