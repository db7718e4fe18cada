"""An ipyparallel profile, unchanged: its launcher starts outposts instead of engines.

The launcher gets the number of ranks as its number of engines. A template that starts fewer tasks (one per node) has
several ranks in each. The launcher runs in a separate thread, since some take seconds to start and all need an event
loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import shlex
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ddp_notebook.errors import StartError, UsageError
from ddp_notebook.launch.starters import launchers
from ddp_notebook.launch.starters.mpi import explain_log
from ddp_notebook.launch.starters.starter import OUTPOST, Starter, address_for, address_towards
from ddp_notebook.launch.transports import folders
from ddp_notebook.launch.transports.base import LOOPBACK
from ddp_notebook.launch.transports.ssh_config import host_name

_END_S = 15.0  # time for the tasks to end in order, before the launcher ends them
_GONE_S = 30.0  # time for the launcher to do so: its commands may wait for a queue that does not answer
_LOOK_S = 0.05
_log = logging.getLogger(__name__)
_WITHOUT_QUESTIONS = "BatchMode=yes"


class ProfileStarter(Starter):
    """Starts tasks with the launcher of a profile.

    Args:
        name: of the profile.
        world_size: number of ranks; None: the profile's number of engines.
        python: the interpreter of the tasks; None: that of the profile's engines.

    Raises:
        UsageError: the profile does not exist, its launcher is not supported, or it has too few slots.
        StartError: the profile cannot be read.
    """

    def __init__(self, name: str, world_size: int | None, python: str | None) -> None:
        self._name = name
        self._directory = folders.make("ddp_notebook-")  # mode 700: the script may contain the invitation
        try:
            self._launcher = launchers.make(name, self._directory)
            self._python = [python] if python else launchers.python(self._launcher)
            self._count = _count(name, self._launcher, world_size)
        except BaseException:
            folders.remove(self._directory)
            raise
        self._refused = ""
        self._thread: threading.Thread | None = None
        self._end_asked: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    @property
    def words(self) -> str:
        return f"profile {self._name} ({type(self._launcher).__name__})"

    @property
    def address(self) -> str:
        if (slots := launchers.slots(self._launcher)) is not None:
            return address_for(host_name(host.rpartition("@")[2].partition(":")[0]) for host in slots)
        return LOOPBACK if launchers.starts_one_by_one(self._launcher) else address_towards("")

    def expected(self, told: int) -> int:
        """Return the number of tasks. A launcher of separate processes has the given number; other tasks report their
        number.
        """
        return self._count if launchers.starts_one_by_one(self._launcher) or not told else told

    def start(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        launcher = self._launcher
        launcher.engine_cmd = [*self._python, *command[1:]]
        launcher.engine_args = []
        launcher.environment = {**launcher.environment, **env}
        if launchers.slots(launcher) is not None:  # a question of ssh could not be answered
            launcher.ssh_args = [*launcher.ssh_args, "-o", _WITHOUT_QUESTIONS]
            launcher.scp_args = [*launcher.scp_args, "-o", _WITHOUT_QUESTIONS]
        launchers.check_template(launcher)
        is_begun = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._live(is_begun)), name="ddp-profile", daemon=True
        )
        self._thread.start()
        is_begun.wait()

    def preview(self) -> str:
        """Return the script of a batch system, or the command and the number of processes."""
        self._launcher.engine_cmd, self._launcher.engine_args = [*self._python, *OUTPOST[1:]], []
        launchers.check_template(self._launcher)
        return launchers.script(self._launcher, self._count) or (
            f"{self.words}: {self._count} times {shlex.join(self._launcher.engine_cmd)}"
        )

    @property
    def is_queued(self) -> bool:
        """True until the job has written output: batch systems have no common command for the state of a job."""
        return bool(getattr(self._launcher, "job_id", "")) and not os.path.exists(self._launcher.output_file)

    def state(self) -> str:
        job = getattr(self._launcher, "job_id", "")
        if not job:
            return ""
        what = "is queued or starting" if self.is_queued else "runs"
        return f"{self.words}: job {job} {what}; its output is in {self._launcher.output_file}"

    def trouble(self, *, now: bool = False) -> str:
        if self._refused:
            return f"{self.words}: {self._refused}"
        if not launchers.have_ended(self._launcher):
            return ""
        words, fix = explain_log(self._launcher.get_output())
        return f"{self.words}: its processes have ended" + (f": {words}" if words else "") + (f"; {fix}" if fix else "")

    def end(self) -> None:
        if self._end_asked is not None and self._thread is not None:
            loop, asked = self._end_asked
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(asked.set)
            self._thread.join(_END_S + _GONE_S)
            if self._thread.is_alive():
                job = getattr(self._launcher, "job_id", "")
                _log.warning(
                    "%s does not end its processes%s; check that they have ended, and end them yourself if not",
                    self.words,
                    f", job {job}" if job else "",
                )
        folders.remove(self._directory)

    async def _live(self, is_begun: threading.Event) -> None:
        """Start the launcher, and stop it when `end` is called."""
        asked = asyncio.Event()
        self._end_asked = asyncio.get_running_loop(), asked
        is_begun.set()
        try:
            await _done(self._launcher.start(self._count))
        except StartError as error:
            self._refused = str(error)
        except subprocess.CalledProcessError as error:
            self._refused = f"{' '.join(map(str, error.cmd[:2]))} ended with status {error.returncode}"
        except Exception as error:  # a launcher may raise any error
            self._refused = " ".join(str(error).split()) or type(error).__name__
        await asked.wait()
        until = time.monotonic() + _END_S
        while launchers.ends_by_itself(self._launcher) and time.monotonic() < until:
            await asyncio.sleep(_LOOK_S)
        with contextlib.suppress(Exception):  # after the end of a job, `stop` fails with an unknown job
            if self._launcher.state == "running":
                await _done(self._launcher.stop())
        with contextlib.suppress(Exception):
            self._launcher.get_output(remove=True)


async def _done(result: Any) -> None:
    if inspect.isawaitable(result):
        await result


def _count(name: str, launcher: Any, world_size: int | None) -> int:
    """Return the number of engines to request: one for each rank."""
    slots = launchers.slots(launcher)
    count = world_size or (sum(slots.values()) if slots is not None else launcher.parent.n)
    if slots is not None and (count or 1) > sum(slots.values()):
        said = ", ".join(f"{host}: {of}" for host, of in slots.items()) or "none"
        raise UsageError(
            f"profile {name} has slots for {sum(slots.values())} engines ({said}), not for {count or 'any'}; start "
            "fewer ranks, or name more in c.SSHEngineSetLauncher.engines"
        )
    if not count:
        raise UsageError(f"profile {name} does not set a number of engines; pass N, e.g. %ddp_start 8 --profile {name}")
    return int(count)
