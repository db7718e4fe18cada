"""What of this user's runs on this machine and can be attached to from any notebook of the same user.

    entries       a small file for each process, in a folder of the user's own: what has gone is cleared away
    private       folders for this user only, which are made again when a cleaner has removed them
    modes         the modes of private folders and files, set after they were made
    unix_sockets  the Unix sockets that go with them: who is at the other end, and lines of JSON
    lookup        kept sessions and jobs of torchrun's, and which one a name means
    torchrun      a rank of a job of torchrun's, as its entry tells it
    identities    processes by id and start time

Notebooks, ranks and keepers import this package; it imports none of them.
"""
