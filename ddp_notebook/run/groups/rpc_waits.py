"""Sentences about RPC calls that ranks wait for or serve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRemoteCalls:
    """Open RPC calls of one rank.

    Args:
        function, to, callee, number, since_s: the call that the main thread waits for, such as `"train"`, `"worker1
            (rank 1)"`, 1, 7 and 12.3. "", -1 and 0: it waits for none. `number` is 0 for waits that are not calls.
            `callee` is -1 if the called worker is not a rank.
        serves: functions that it executes for other ranks: name, current line, seconds.
        exhausted: reason why it cannot serve calls, as text.
        going_on: functions that it still executes although their cell was stopped: name, cell number.
    """

    function: str = ""
    to: str = ""
    callee: int = -1
    number: int = 0
    since_s: float = 0.0
    serves: tuple[tuple[str, str, float], ...] = ()
    exhausted: str = ""
    going_on: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of_vitals(cls, told: Mapping[str, Any]) -> OpenRemoteCalls:
        """Create it from a rank's answer."""
        return cls(
            serves=tuple((function, place, since_s) for function, place, since_s in told.get("serves", ())),
            exhausted=told.get("exhausted", ""),
            going_on=tuple((function, cell) for function, cell in told.get("going_on", ())),
            **(told.get("call") or {}),
        )

    @property
    def serving(self) -> str:
        """Description of the calls that it serves; "" if there are none.

        Example:
            >>> OpenRemoteCalls(serves=(("train", "cell line 5 in train", 12.0),)).serving
            'runs train for another rank, at cell line 5 in train'
        """
        if self.exhausted or not self.serves:
            return self.exhausted
        function, place, _ = max(self.serves, key=lambda one: one[2])
        return f"runs {function} for another rank" + (f", at {place}" if place else "")

    def why(self, callee: OpenRemoteCalls, is_silent: bool) -> str:
        """Return a description of its wait, to follow the name of its rank.

        Args:
            callee: open calls of the called rank.
            is_silent: the called rank does not answer.

        Example:
            >>> caller = OpenRemoteCalls(function="train", to="worker1 (rank 1)", callee=1, number=7, since_s=12.3)
            >>> caller.why(OpenRemoteCalls(serves=(("train", "cell line 5 in train", 12.0),)), is_silent=False)
            'waits for train on worker1 (rank 1), call 7, 12 s, which is at cell line 5 in train'
        """
        places = [place for function, place, _ in callee.serves if function == self.function]
        if callee.exhausted:
            does = f"where {callee.exhausted}"
        elif is_silent:
            does = "which does not answer"
        else:
            does = f"which is at {places[0]}" if places and places[0] else "which runs it" if places else ""
        number = f", call {self.number}" * bool(self.number)
        call = f"waits for {self.function} on {self.to}{number}, {self.since_s:.0f} s"
        return f"{call}, {does}" if does else call


def still_running(views: Mapping[int, OpenRemoteCalls], cell: int) -> list[str]:
    """Return a sentence for each rank that still executes calls of a stopped cell.

    Example:
        >>> still_running({1: OpenRemoteCalls(going_on=(("nap", 7),))}, cell=7)
        ['rank 1 still runs nap for it, until what that waits in returns, such as time.sleep']
    """
    functions = {rank: dict.fromkeys(name for name, of in one.going_on if of == cell) for rank, one in views.items()}
    return [
        f"rank {rank} still runs {' and '.join(names)} for it, until what that waits in returns, such as time.sleep"
        for rank, names in sorted(functions.items())
        if names
    ]
