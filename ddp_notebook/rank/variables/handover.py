"""Values of one rank for others, by a broadcast among these alone: large arrays go from memory to memory.

One rank gives, the others take. All of it is one pickle, so that an optimizer still holds the parameters of its model.
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
_STALLED = timedelta(seconds=60)  # without progress of one piece
_PIECE_BYTES = 64 << 20


class Handover:
    """A meeting of the rank that gives and of those that take. It is no group of torch's: nobody finds it in
    `torch.distributed`, and the ranks' own groups, their counts and the guard know nothing of it.

    Args:
        store: where they meet.
        meeting: a name that no other meeting at this store has.
        number: of this rank among them; 0 gives.
        size: how many they are.
        timeout: how long one waits for another.

    Raises:
        RuntimeError: here and in the methods: one of them did not come, or is gone.

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
        """Give a value: by the pickle that `copying` makes, and what fails in it is raised before anything is sent."""
        self.give_pickled(*dumps(value))

    def give_pickled(self, pickled: bytes, buffers: Sequence[Any]) -> None:
        """Give what `dumps` has made."""
        parts = [memoryview(part).cast("B") for part in (pickled, *buffers)]
        sizes = torch.tensor([len(part) for part in parts])
        self._send(torch.tensor([len(sizes)]))
        self._send(sizes)
        sealed = authentication.mac(self._key, [sizes.numpy().data, parts[0]])
        self._send(torch.frombuffer(bytearray(sealed), dtype=torch.uint8))
        for part in filter(len, parts):
            self._send(torch.frombuffer(bytearray(part) if part.readonly else part, dtype=torch.uint8))

    def refuse(self) -> None:
        """Give nothing: the others' `result` raises."""
        self._send(torch.tensor([0]))

    def result(self) -> Any:
        """The value that the first of them gives.

        Raises:
            NotAuthenticError: the pickle is not from the session. (The memory of arrays has no MAC: loading it calls no
                function.)
            RuntimeError: see the class.
        """
        count = self._send(torch.zeros(1, dtype=torch.int64))
        if not count:
            raise RuntimeError("the rank that was to give its variables could not")
        sizes = self._send(torch.zeros(int(count), dtype=torch.int64))
        sealed = bytes(self._send(torch.empty(authentication.MAC_BYTES, dtype=torch.uint8)).numpy())
        pickled = self._take_part(int(sizes[0]))
        authentication.check(self._key, sealed, [sizes.numpy().data, pickled], "the rank that gives its variables")
        buffers = [self._take_part(size) for size in sizes[1:].tolist()]
        return pickle.loads(pickled, buffers=buffers)

    def _take_part(self, nbytes: int) -> memoryview:
        return self._send(torch.empty(nbytes, dtype=torch.uint8)).numpy().data

    def _send(self, x: torch.Tensor) -> torch.Tensor:
        """Broadcast from the giver, in place."""
        for start in range(0, x.numel(), _PIECE_BYTES):
            self._group.broadcast(x[start : start + _PIECE_BYTES], _GIVER).wait()
        return x

    def close(self) -> None:
        """It is over."""
        deferred_destroy.keep(self._group)
        self._group = None


def dumps(value: Any) -> tuple[bytes, list[pickle.PickleBuffer]]:
    """A pickle, and beside it the memory of its arrays and tensors, which is not copied."""
    file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    DevicePickler(file, protocol=5, buffer_callback=buffers.append).dump(value)
    return file.getvalue(), buffers
