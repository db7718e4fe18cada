"""ZeroMQ connection between the notebook and its ranks, bulk data, the store's protocol, and signals.

    endpoint       one end of the connection: a thread that owns the sockets
    link           sequence numbers, acknowledgements and retransmission of messages
    keys           key pairs of a session, and the check of each new connection
    store          protocol of the session's store, and its access check
    bulk           large values, in pieces of 1 MB, on separate sockets
    shared_memory  large values for a process on the same machine, in shared memory
    buffers        several buffers joined into one
    safe           serialization of values without pickle
    stream_order   merges stdout and stderr in the order in which a process wrote them
    marks          marks in the text of a rank: end of a cell, position of a display, change of the stream
    text           splits the text of a rank at its marks and orders it with the displays
    signals        real-time signals between a host server and its ranks

    at the notebook                                     at a rank
    Endpoint.listen ── ROUTER ◄═ CURVE, ZAP ═► DEALER ── Endpoint.connect    messages of `messages`
    BulkFetcher     ── ROUTER ◄═ CURVE, ZAP ═► DEALER ── BulkServer          data

The notebook and the ranks import this package. It imports code of neither.
"""
