"""What of this user's runs on this machine and can be attached to from any notebook of the same user.

    entries     a small file for each, in a folder of the user's own: who is there, what has gone is cleared away
    doors       the Unix sockets that entries name: who is at the other end, and lines of JSON
    torchrun    a rank of a job of torchrun's, as its entry tells it
    identities  processes by id and start time

Kernels, ranks and whatever else lives longer than a kernel import this package; it imports none of them.
"""
