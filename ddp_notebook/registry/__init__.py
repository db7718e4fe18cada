"""Processes of this user on this machine to which a notebook can attach.

    entries       one file per process, in a private folder; entries of ended processes are removed
    private       private folders of this user, recreated after a cleaner removed them
    modes         creates files and folders with private modes
    unix_sockets  Unix sockets of these processes: user of the peer, and first messages
    lookup        kept sessions and torchrun jobs, and lookup by name
    torchrun      entry of a rank of a torchrun job
    identities    process identities: id and start time

Notebooks, ranks and keepers import this package. It imports code of none of them.
"""
