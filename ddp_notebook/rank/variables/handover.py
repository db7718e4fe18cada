"""Send values from one rank to others by a private broadcast. Large arrays are sent without pickling.

One rank sends, the others receive. All values are in one pickle, so that an optimizer still holds the parameters of its
model.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroupGloo, Store
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # exported at run time

from ddp_notebook.rank.group import authentication, deferred_destroy
from ddp_notebook.rank.variables.copying import DevicePickler
from ddp_notebook.stdlib import io, pickle

_GIVER = 0
_STALLED = timedelta(seconds=60)  # timeout of one piece
_PIECE_BYTES = 64 << 20


class Handover:
    """Temporary group of the sending rank and the receiving ranks.

    It is not a group of `torch.distributed`, so programs cannot find it. It does not affect the ranks' own groups,
    their counters or the guard.

    Args:
        store: store at which the ranks meet.
        meeting: unique name at this store.
        number: number of this rank in the group; 0 sends.
        size: number of ranks in the group.
        timeout: timeout of the wait for another rank.

    Raises:
        RuntimeError: a rank did not arrive or has died. The methods raise it too.

    Example:
        >>> from torch.distributed import HashStore
        >>> Handover(HashStore(), "alone", number=0, size=1).give({"x": torch.ones(2)})
    """

    def __init__(self, store: Store, meeting: str, *, number: int, size: int, timeout: timedelta = _STALLED) -> None:
        at = PrefixStore(f"{meeting}/", store)
        if number == _GIVER:
            authentication.publish_key(at)
        self._group: Any = ProcessGroupGloo(at, number, size, timeout=timeout)
        self._key = authentication.key_of(at)

    def give(self, value: Any) -> None:
        """Send a value, pickled with `DevicePickler`. Errors of the pickler are raised before anything is sent."""
        self.give_pickled(*dumps(value))

    def give_pickled(self, pickled: bytes, buffers: Sequence[Any]) -> None:
        """Send a pickle and buffers of `dumps`."""
        parts = [memoryview(part).cast("B") for part in (pickled, *buffers)]
        sizes = torch.tensor([len(part) for part in parts])
        self._send(torch.tensor([len(sizes)]))
        self._send(sizes)
        sealed = authentication.mac(self._key, [sizes.numpy().data, parts[0]])
        self._send(torch.frombuffer(bytearray(sealed), dtype=torch.uint8))
        for part in filter(len, parts):
            self._send(torch.frombuffer(bytearray(part) if part.readonly else part, dtype=torch.uint8))

    def refuse(self) -> None:
        """Send nothing, so that `result` of the other ranks raises an error."""
        self._send(torch.tensor([0]))

    def result(self) -> Any:
        """Receive the value.

        Raises:
            NotAuthenticError: the pickle is not from the session. (Memory of arrays has no MAC, because loading it
                calls no function.)
            RuntimeError: see the class.
        """
        count = self._send(torch.zeros(1, dtype=torch.int64))
        if not count:
            raise RuntimeError("the source rank could not send its variables")
        sizes = self._send(torch.zeros(int(count), dtype=torch.int64))
        sealed = bytes(self._send(torch.empty(authentication.MAC_BYTES, dtype=torch.uint8)).numpy())
        pickled = self._take_part(int(sizes[0]))
        authentication.check(self._key, sealed, [sizes.numpy().data, pickled], "the rank that sends its variables")
        buffers = [self._take_part(size) for size in sizes[1:].tolist()]
        return pickle.loads(pickled, buffers=buffers)

    def _take_part(self, nbytes: int) -> memoryview:
        return self._send(torch.empty(nbytes, dtype=torch.uint8)).numpy().data

    def _send(self, x: torch.Tensor) -> torch.Tensor:
        """Broadcast a tensor from the sending rank, in place."""
        for start in range(0, x.numel(), _PIECE_BYTES):
            self._group.broadcast(x[start : start + _PIECE_BYTES], _GIVER).wait()
        return x

    def close(self) -> None:
        """Close the group."""
        deferred_destroy.keep(self._group)
        self._group = None


def dumps(value: Any) -> tuple[bytes, list[pickle.PickleBuffer]]:
    """Return a pickle, and the memory of its arrays and tensors without a copy."""
    file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    DevicePickler(file, protocol=5, buffer_callback=buffers.append).dump(value)
    return file.getvalue(), buffers
