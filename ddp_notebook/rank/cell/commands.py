"""The commands that a cell gives to the shell: `!ls`, `x = !ls`, `%pip`, `%%bash` and their like.

A process that they start is not a rank. It does not inherit the variables by which torchrun tells a process its rank,
such as RANK and MASTER_PORT: a training script would take the place of this rank at the session's store, and wait there
for ever. A command that installs packages runs on one rank of each host and Python environment.
"""

from __future__ import annotations

import hashlib
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any

from IPython.core.magics import packaging, script
from IPython.utils import process

from ddp_notebook.rank.cell.children import Children
from ddp_notebook.rank.replacing import look_for, replace
from ddp_notebook.registry import private
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import contextlib, fcntl, functools, os, re

_process: Any = process  # the module does not declare its exports
_system = _process.system
_getoutput = _process.getoutput
_get_output_error_code = _process.get_output_error_code
_INSTALLS = re.compile(
    r"(?:^|[\s;&|/])(?:pip[\d.]*|conda|mamba|micromamba|uv|apt|apt-get)['\"]?(?:\s+-\S+)*(?:\s+pip)?"
    r"\s+(?:install|uninstall|remove|update|upgrade|sync|add)\b"
)
_RUNS_SCRIPTS = re.compile(r"(?:python[\d.]*|torchrun|accelerate)$")


def prepare() -> None:
    """Run the slow part of the setup before a fork."""
    look_for([_system, _getoutput, _get_output_error_code])


def install(
    shell: Any,
    children: Children,
    names: Callable[[], Collection[str]],
    place: Callable[[], tuple[int, int]],
    cell: Callable[[], int],
    folder: str,
    session: str,
) -> None:
    """Run the commands of this process's cells without the variables of its rank.

    Args:
        shell: IPython's.
        children: told for which command the main thread waits.
        names: returns the variables that commands do not get.
        place: returns the rank, and the number of ranks on its host.
        cell: returns the number of the running cell.
        folder: one that the ranks of this host share.
        session: a text that no other session has.
    """
    once = _Once(children, place, cell, folder, session)

    def apart(command: Any) -> Any:
        """The command, in a shell without these variables."""
        if not isinstance(command, str):
            return command
        with_shell = f"{shlex.quote(os.environ.get('SHELL') or 'sh')} -c {shlex.quote(command)}"
        return f"exec env {_unset(names())} {with_shell}"

    @functools.wraps(_system)
    def system(command: str) -> Any:
        def run() -> Any:
            with children.waiting(command):
                return _system(apart(command))

        status = once.run(command, run) if _INSTALLS.search(command) else run()
        if isinstance(status, int) and status > 0:  # a negative one is a signal, as of a stop
            _tell_about_script(command)
        return status

    @functools.wraps(_getoutput)
    def getoutput(command: Any) -> str:
        with children.waiting(str(command)), once.alone(str(command)):
            return _getoutput(apart(command))

    @functools.wraps(_get_output_error_code)
    def get_output_error_code(command: Any) -> Any:
        with children.waiting(str(command)), once.alone(str(command)):
            return _get_output_error_code(apart(command))

    replace(_system, system)
    replace(_getoutput, getoutput)
    replace(_get_output_error_code, get_output_error_code)
    vars(packaging)["print"] = _say_nothing  # drops the note of %pip: "you may need to restart the kernel"
    _of_scripts(shell, children, names)


def _of_scripts(shell: Any, children: Children, names: Callable[[], Collection[str]]) -> None:
    """The same for `%%bash`, `%%script` and their like."""
    original = script.ScriptMagics.shebang

    @functools.wraps(original)
    def shebang(self: Any, line: str, cell: str) -> Any:
        with children.waiting(f"{line}: {cell}"):
            try:
                return original(self, f"env {_unset(names())} {line}", cell)
            except Exception:
                for command in cell.splitlines():
                    _tell_about_script(command)
                raise

    script.ScriptMagics.shebang = shebang  # type: ignore[method-assign]
    magics = shell.magics_manager
    if (made := magics.registry.get("ScriptMagics")) is not None:  # newer versions make it when it is first used
        magics.magics["cell"]["script"] = made.shebang


def _unset(names: Collection[str]) -> str:
    return " ".join(f"-u {name}" for name in names)


def _say_nothing(*_: Any, **__: Any) -> None:
    """Print nothing. Replaces `print`."""


def _tell_about_script(command: str) -> None:
    """Tell how a script runs on ranks, where a command that was to run one has failed."""
    if (its := script_of(command)) is not None:
        print(
            "ddp_notebook: a process that a cell starts in the shell is not a rank. It does not inherit RANK, "
            f"WORLD_SIZE and MASTER_ADDR. %run {its} runs the script on the ranks. %ddp_torchrun {its}, in a "
            "cell of the notebook, runs it by torchrun",
            file=sys.stderr,
        )


def script_of(command: str) -> str | None:
    """Return the Python script that a command runs, with its arguments; None if it runs none.

    Example:
        >>> script_of("cd src && python3 -u train.py --epochs 2")
        'train.py --epochs 2'
        >>> script_of("ls *.py") is None
        True
    """
    try:
        words = shlex.split(command)
    except ValueError:  # quotes that do not end
        return None
    for number, word in enumerate(words):
        if _RUNS_SCRIPTS.match(os.path.basename(word)):
            scripts = [at for at in range(number + 1, len(words)) if words[at].endswith(".py")]
            return shlex.join(words[scripts[0] :]) if scripts else None
    return None


class _Once:
    """Runs a command on one rank of each host and environment.

    The first rank that comes locks a file, runs the command and writes its exit status. The others wait for the lock
    and read that. The lock of a process ends with it, so the next rank runs the command if the first one dies.

    Args: as those of `install`.
    """

    def __init__(
        self,
        children: Children,
        place: Callable[[], tuple[int, int]],
        cell: Callable[[], int],
        folder: str,
        session: str,
    ) -> None:
        self._children = children
        self._place = place
        self._cell = cell
        self._folder = folder
        self._session = session
        self._counts: Counter[str] = Counter()  # equal commands in one cell

    def run(self, command: str, run: Callable[[], Any]) -> Any:
        """Return the exit status of a command, which this or another rank has run."""
        rank, ranks_here = self._place()
        if ranks_here < 2:
            return run()
        with open(self._file(command), "a+") as file:
            with self._children.waiting(command, is_elsewhere=True):
                fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            if done := file.read():
                return int(done)
            with self.alone(command):
                status = run()
            file.write(str(status))
        if not status and (found := _INSTALLS.search(command)):
            what = found[0].strip(" \t\n;&|/")
            print(
                f"ddp_notebook: {what} ran on rank {rank} only, for all ranks of its host. Modules that the ranks have "
                "imported already change with %ddp_restart",
                file=sys.stderr,
            )
        return status

    @contextlib.contextmanager
    def alone(self, command: str) -> Iterator[None]:
        """Lock this Python environment during the block, if the command changes it."""
        if not _INSTALLS.search(command):
            yield
            return
        folder = os.open(sys.prefix, os.O_RDONLY)
        try:
            with self._children.waiting(command, is_elsewhere=True), contextlib.suppress(OSError):
                fcntl.flock(folder, fcntl.LOCK_EX)  # a file system of a network may have no locks
            yield
        finally:
            os.close(folder)

    def _file(self, command: str) -> str:
        private.restore(self._folder)
        what = f"{self._session} {self._cell()} {sys.prefix} {command}"
        self._counts[what] += 1
        name = hashlib.sha256(f"{what} {self._counts[what]}".encode()).hexdigest()[:32]
        return os.path.join(self._folder, f"command-{name}")
