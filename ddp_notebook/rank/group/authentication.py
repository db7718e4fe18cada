"""MACs for the pickles that ranks send each other over gloo.

gloo accepts connections from every user. While a group forms, a foreign process can connect in place of a rank and send
arbitrary bytes. Loading its pickle would execute its code. The store of the session admits only processes of the
session, so ranks exchange a key there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch._C._distributed_c10d import Store

from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import hmac, secrets

MAC_BYTES = 32
_KEY = "key"


class NotAuthenticError(RuntimeError):
    """Received data did not come from a rank of the session."""


def publish_key(store: Store) -> None:
    """Create the key of a group. One rank calls this before any rank calls `key_of`."""
    store.set(_KEY, secrets.token_hex(MAC_BYTES))


def key_of(store: Store) -> bytes:
    """Return the key, and wait until it has been published."""
    return bytes.fromhex(store.get(_KEY).decode())


def mac(key: bytes, parts: Iterable[Any]) -> bytes:
    """Return the MAC of a message.

    Args:
        key: the key.
        parts: parts of the message, bytes or other contiguous memory.

    Example:
        >>> check(b"key", mac(b"key", [b"a", b"b"]), [b"a", b"b"], "rank 1")
        >>> mac(b"key", [b"ab"]) == mac(b"key", [b"a", b"b"]), mac(b"key", [b"a"]) == mac(b"other", [b"a"])
        (True, False)
    """
    made = hmac.new(key, digestmod="sha256")
    for part in parts:
        made.update(part)
    return made.digest()


def check(key: bytes, received: bytes, parts: Iterable[Any], sender: str) -> None:
    """Check the MAC of a received message.

    Args:
        sender: description of the expected sender, for the error.

    Raises:
        NotAuthenticError: the MACs differ.
    """
    if not hmac.compare_digest(received, mac(key, parts)):
        raise NotAuthenticError(
            f"data expected from {sender} did not come from this session, and was dropped. Another process connected "
            "to a port of this rank while the group was formed (docs/security.md)"
        )
