"""The socket wire between the notebook and its ranks, large values, the store, and signals. Messages are in `messages`.

    endpoint      one end of the wire: the thread that owns the sockets
    link          counts messages, acknowledges and resends them
    keys          who may speak on the wire
    store         the protocol of the session's store, and who may connect to it
    bulk          large values, in pieces of 1 MB, on sockets of their own
    memory        large values for a process on the same machine, in shared memory
    buffers       several buffers as one
    safe          values as bytes without pickle
    stream_order  text of stdout and stderr in the order in which a process wrote it
    marks         where the text of a cell ends in a rank's pipe, and where something is displayed
    text          the bytes of a rank's pipes, cut at their marks and put in order with its displays
    signals       the real-time signals between a host server and its ranks

    at the notebook                                     at a rank
    Endpoint.listen ── ROUTER ◄═ CURVE, ZAP ═► DEALER ── Endpoint.connect    messages of `messages`
    BulkFetcher     ── ROUTER ◄═ CURVE, ZAP ═► DEALER ── BulkServer          data

Both sides import this package; it imports neither.
"""
