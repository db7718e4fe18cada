"""Clock for time limits of operations. It stands still while a debugger waits for a command of the user."""

from __future__ import annotations

from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import time

_AGAIN_S = 0.05  # a wait that may not end now looks again after this time, or after the rest of its limit
_SOON_S = 0.002  # a wait that ends this early has reached its limit


class HeldTime:
    """Stretches of time that count for no limit. Callable from any thread; one thread changes it.

    Example:
        >>> clock = HeldTime()
        >>> began_ns = time.monotonic_ns()
        >>> clock.hold(True)
        >>> time.sleep(0.02)
        >>> clock.hold(False)
        >>> clock.elapsed_s(began_ns) < 0.02
        True
    """

    def __init__(self) -> None:
        self._held: tuple[tuple[int, int], ...] = ()  # start and end of each stretch in ns
        self._since_ns = 0  # start of the current stretch; 0: none

    def hold(self, on: bool) -> None:
        """Start or end a stretch. Does nothing if that is the case already."""
        now = time.monotonic_ns()
        if on and not self._since_ns:
            self._since_ns = now
        elif not on and self._since_ns:
            self._held, self._since_ns = (*self._held, (self._since_ns, now)), 0

    def reset(self) -> None:
        """Forget all stretches: no operation is in progress that began before their end."""
        self._held, self._since_ns = (), 0

    def left_s(self, limit_s: float, since_ns: int) -> float:
        """Return the seconds until a limit is reached; 0.0 if it was. While time stands still, it never is.

        Args:
            limit_s: limit in seconds.
            since_ns: start of the wait, on the monotonic clock.
        """
        left_s = limit_s - self.elapsed_s(since_ns)
        return max(left_s, _AGAIN_S) if self._since_ns else left_s if left_s > _SOON_S else 0.0

    def elapsed_s(self, since_ns: int) -> float:
        """Return the seconds that count since a time of the monotonic clock."""
        held, began_ns = self._held, self._since_ns
        now = time.monotonic_ns()
        if held or began_ns:
            stretches = (*held, (began_ns, now)) if began_ns else held
            now -= sum(max(0, end - max(begin, since_ns)) for begin, end in stretches)
        return (now - since_ns) / 1e9


CLOCK = HeldTime()
