"""The wire between the notebook and its ranks.

    notebook                                            rank
    Endpoint.listen ── ROUTER ◄═ CURVE, ZAP ═► DEALER ── Endpoint.connect    messages of `events`
    BulkFetcher     ── ROUTER ◄═ CURVE, ZAP ═► DEALER ── BulkServer          data, in pieces of 1 MB

`link` counts messages, acknowledges and resends them; `endpoint` is the thread around the sockets;
`keys` lets in who was invited; `bulk` moves what is large, on sockets of its own.
Both sides import this package; it imports neither.
"""

from ddp_notebook.channel.bulk import BulkFetcher, BulkServer
from ddp_notebook.channel.endpoint import Endpoint
from ddp_notebook.channel.keys import Address, Keyring

__all__ = ["Address", "BulkFetcher", "BulkServer", "Endpoint", "Keyring"]
