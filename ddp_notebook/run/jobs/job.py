"""A cell in the background: a future of its result, with a status line above its output."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from ddp_notebook.errors import DDPNotebookError, JobCancelledError
from ddp_notebook.records.words import list_ranks
from ddp_notebook.run.cells.cell import CellRun
from ddp_notebook.run.cells.interrupt import Interrupts
from ddp_notebook.run.cells.result import CellResult
from ddp_notebook.run.cells.run_queue import GivenUpError, QueueSlot, in_words
from ddp_notebook.run.cells.watch import Waiter
from ddp_notebook.run.interrupted import OF_JOB, tells_interrupts
from ddp_notebook.run.output.display_target import DisplayHandle, DisplayTarget
from ddp_notebook.run.output.rate_limiter import new_id

if TYPE_CHECKING:
    from ddp_notebook.messages.keeper import Waiting

_log = logging.getLogger(__name__)


@tells_interrupts(OF_JOB)
class Job(Future[CellResult]):
    """A cell that runs in the background. `await job` waits for it; cancelling that wait does not cancel the job.

    Args:
        number: its number in `%ddp_jobs`.
        ranks: ranks that run it.
        code: code of the cell.
        prompt: number in the `In [n]` of its cell.
        place: slot in the run queue.
        target: shows its output; None: the output is not shown.
        cancel: cancels the job.
        waiting: description of the waiting job, for a keeper that runs it if this process ends.
        telling: lock that is held while waiting jobs are reported to the keeper.

    Attributes:
        state: "waiting", "running", "done", "failed" or "cancelled".
        seconds: run time so far.

    Example:
        >>> job = session.submit("import time; time.sleep(0.1); rank", quiet=True)
        >>> job.result(timeout=10)[1].result, job.state
        ('1', 'done')
    """

    def __init__(
        self,
        number: int,
        ranks: Sequence[int],
        code: str,
        prompt: int,
        place: QueueSlot,
        target: DisplayTarget | None,
        cancel: Callable[[Job], object],
        waiting: Waiting | None,
        telling: AbstractContextManager[object],
    ) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()  # from now on only `cancel` cancels it
        self.number = number
        self._ranks = list(ranks)
        self.code = code
        self.prompt = prompt
        self.state = "waiting"
        self.waiter = Waiter(
            name=f"job {number}",
            ends=f"%ddp_cancel {number} ends the job",
            replaces="%ddp_interrupt --replace gives a new process to",
            can_answer=False,
        )
        self.place = place
        self.run: CellRun | None = None  # its cell, once that has started
        self.reason = ""  # reason of a cancellation that the user did not request
        self._target = target
        self._line: DisplayHandle | None = None
        self._error: BaseException | None = None
        self._interrupts: Interrupts | None = None
        self._is_pressed = False
        self._pressing = threading.Lock()
        self._cancel = cancel
        self.waiting = waiting
        self._telling = telling
        self._began_s = self._ended_s = 0.0

    # ---- for its user

    @property
    def ranks(self) -> list[int]:
        return self._ranks if self.run is None else self.run.result.ranks

    @property
    def seconds(self) -> float:
        return (self._ended_s or time.monotonic()) - self._began_s if self._began_s else 0.0

    def cancel(self) -> bool:
        """End the job, or remove it from the queue. Return whether it is cancelled.

        A rank that does not end the cell may still be in it; `session.interrupt(replace=True)` replaces that rank.
        """
        self._cancel(self)
        return self.state == "cancelled"

    def __await__(self) -> Generator[Any, None, CellResult]:
        return asyncio.shield(asyncio.wrap_future(self)).__await__()

    @property
    def waits(self) -> str:
        """Description of the wait of a waiting job: `"waits for job 3"`."""
        ahead = self.place.ahead
        return f"waits for {in_words(ahead) if ahead else 'its turn'}"

    def __repr__(self) -> str:
        name, after = f"job {self.number}", f"after {self.seconds:.1f} s"
        if self.state == "waiting":
            return f"{name} {self.waits}"
        if self.state == "running":
            return f"{name} runs on {list_ranks(self.ranks)}, since {self.seconds:.1f} s"
        if self.state == "failed":
            return f"{name} failed {after}: {type(self._error).__name__}"
        why = f": {self.reason}" if self.reason else ""
        return f"{name} is done {after}" if self.state == "done" else f"{name} was cancelled {after}{why}"

    # ---- for its thread

    def _work(self, run: Callable[[], CellResult]) -> None:
        """Run the cell, and publish its result or error."""
        try:
            result = run()
        except BaseException as error:
            self._end_badly(error)
        else:
            self._end("done")
            self.set_result(result)

    def _on_begin(self, run: CellRun, interrupts: Interrupts) -> None:
        """Handle the start of the cell."""
        self._began_s = run.began_s
        with self._telling:
            self.run = run
            self.state = "running"
        with self._pressing:
            self._interrupts = interrupts
            if self._is_pressed:
                interrupts.press()
        self._show_state()

    def _press(self) -> None:
        """End the cell like the stop button, only once: a second press would replace ranks."""
        with self._pressing:
            self._is_pressed, was_pressed = True, self._is_pressed
            if self._interrupts is not None and not was_pressed:
                self._interrupts.press()

    def _show_state(self) -> None:
        """Update the status line above its output."""
        if self._target is None:
            return
        n = self.number
        said = f"job {n} runs on {list_ranks(self.ranks)}" if self.state == "running" else repr(self)
        if not self._ended_s:
            said += f"; %ddp_wait {n} waits for it, %ddp_cancel {n} ends it"
        if self._target.can_update:
            self._line = self._line or DisplayHandle(self._target, new_id())
            self._line.update({"text/plain": said})
        else:
            self._write(said)

    def _end_badly(self, error: BaseException) -> None:
        if self.reason or isinstance(error, KeyboardInterrupt | GivenUpError):
            where = str(error).split("\n")[1:] if isinstance(error, KeyboardInterrupt) else []
            self._end("cancelled", *where)
            self.set_exception(JobCancelledError("\n".join([repr(self), *where])))
            return
        if isinstance(error, DDPNotebookError):
            error.__traceback__ = None  # drop the frames of this thread, and the data in them
        self._error = error
        self._end("failed")
        self.set_exception(error)

    def _end(self, state: str, *where: str) -> None:
        """Show the end of the job.

        Args:
            where: lines with the last activity of its ranks.
        """
        self._ended_s = time.monotonic()
        self._began_s = self._began_s or self._ended_s
        self.state = state
        try:
            self._show_state()
            if where:
                self._write("\n".join(where))
            if self._error is not None and self._target is not None:
                self._target.fail(self._error)
        except Exception:  # callers that wait for the job must still get its result
            _log.exception("the end of job %s was not shown", self.number)

    def _write(self, text: str) -> None:
        if self._target is not None:
            self._target.write("stderr", f"{text}\n")
            self._target.flush("stderr")
