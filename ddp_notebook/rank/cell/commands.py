"""Shell commands of a cell: `!ls`, `x = !ls`, `%pip`, `%%bash` and similar.

Their processes are not ranks, so they do not inherit torchrun variables such as RANK and MASTER_PORT. With these
variables a training script would take this rank's place at the session's store and block forever. A command that
installs packages runs on one rank per host and Python environment.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from IPython.core.magics import packaging, script
from IPython.utils import process
from IPython.utils.encoding import DEFAULT_ENCODING

from ddp_notebook.rank.cell.children import Children
from ddp_notebook.rank.patching import look_for, replace
from ddp_notebook.registry import private
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import contextlib, fcntl, functools, hashlib, json, os, re

_process: Any = process  # the module does not declare its exports
_system = _process.system
_getoutput = _process.getoutput
_get_output_error_code = _process.get_output_error_code
_INSTALLS = re.compile(
    r"(?:^|[\s;&|/])(?:pip[\d.]*|conda|mamba|micromamba|uv|apt|apt-get)['\"]?(?:\s+-\S+)*(?:\s+pip)?"
    r"\s+(?:install|uninstall|remove|update|upgrade|sync|add)\b"
)
_RUNS_SCRIPTS = re.compile(r"(?:python[\d.]*|torchrun|accelerate)$")
_LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")  # modules after -m
# Modules after -m that are command-line tools, in addition to the standard library's.
_TOOLS = {"pip", "uv", "build", "virtualenv", "pytest", "mypy", "ruff", "black", "jupyter", "notebook", "ipykernel"}
_TOOLS |= {"nbconvert", "IPython", "jupyterlab", "torch", "accelerate"}


def prepare() -> None:
    """Run the slow part of `install` before a fork."""
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
    """Run shell commands of cells without the rank's environment variables.

    Args:
        shell: IPython shell.
        children: notified of the command that the main thread waits for.
        names: returns the names of the environment variables to remove.
        place: returns the rank, and the number of ranks on its host.
        cell: returns the number of the running cell.
        folder: folder shared by the ranks of this host.
        session: unique id of the session.
    """
    once = _Once(children, place, cell, folder, session)

    def apart(command: Any) -> Any:
        """Return the command, wrapped in a shell without these variables."""
        if not isinstance(command, str):
            return command
        with_shell = f"{shlex.quote(os.environ.get('SHELL') or 'sh')} -c {shlex.quote(command)}"
        return f"exec env {_unset(names())} {with_shell}"

    @functools.wraps(_system)
    def system(command: str) -> Any:
        def run() -> Any:
            with children.waiting(command):
                return _system(apart(command))

        status = once.run(command, lambda: (run(),))[-1] if _INSTALLS.search(command) else run()
        if isinstance(status, int) and status > 0:  # a negative status is a signal, for example from an interrupt
            _tell_about_program(command, once)
        return status

    def output_and_status(command: Any) -> tuple[str, int | None]:
        """Run the command. Without output and status if it was interrupted, as in IPython."""
        statuses: list[int | None] = []

        def read(started: Any) -> Any:
            output = started.communicate()[0]
            statuses.append(started.returncode)
            return output

        with children.waiting(str(command)):
            output = _process.process_handler(apart(command), read, subprocess.STDOUT)
        return (output or b"").decode(DEFAULT_ENCODING, "replace"), statuses[0] if statuses else None

    @functools.wraps(_getoutput)
    def getoutput(command: Any) -> str:
        text = str(command)
        run = functools.partial(output_and_status, command)
        output, status = once.run(text, run, is_captured=True) if _INSTALLS.search(text) else run()
        if status is not None and status > 0:
            _tell_about_program(text, once)
        return str(output)

    @functools.wraps(_get_output_error_code)
    def get_output_error_code(command: Any) -> Any:
        with children.waiting(str(command)), once.alone(str(command)):
            return _get_output_error_code(apart(command))

    replace(_system, system)
    replace(_getoutput, getoutput)
    replace(_get_output_error_code, get_output_error_code)
    vars(packaging)["print"] = _say_nothing  # suppress the note of %pip: "you may need to restart the kernel"
    _of_scripts(shell, children, names, once)


def _of_scripts(shell: Any, children: Children, names: Callable[[], Collection[str]], once: _Once) -> None:
    """Do the same for `%%bash`, `%%script` and similar cells.

    Such a cell may also contain other commands, so every rank runs it. If it installs packages, the ranks of a host run
    it one after the other.
    """
    original = script.ScriptMagics.shebang

    @functools.wraps(original)
    def shebang(self: Any, line: str, cell: str) -> Any:
        with children.waiting(f"{line}: {cell}"), once.alone(cell):
            try:
                return original(self, f"env {_unset(names())} {line}", cell)
            except Exception:
                for command in cell.splitlines():
                    _tell_about_program(command, once)
                raise

    script.ScriptMagics.shebang = shebang  # type: ignore[method-assign]
    magics = shell.magics_manager
    if (made := magics.registry.get("ScriptMagics")) is not None:  # recent versions create it at first use
        magics.magics["cell"]["script"] = made.shebang


def _unset(names: Collection[str]) -> str:
    return " ".join(f"-u {name}" for name in names)


def _say_nothing(*_: Any, **__: Any) -> None:
    """Replacement of `print` that prints nothing."""


def _tell_about_program(command: str, once: _Once) -> None:
    """If the failed command runs a Python program, print how to run that program on ranks.

    One rank per host prints it, once per program of a cell.
    """
    if (program := program_of(command)) is None:
        return
    name = program[: 1 + (program[0] == "-m")]
    if not once.is_first(f"hint {shlex.join(name)}"):
        return
    # %run parses options before the name of a script, and also after -m NAME.
    is_split = program[0] == "-m" and len(program) > 2
    run = shlex.join([*program[:2], "--", *program[2:]] if is_split else program)
    print(
        "ddp_notebook: a process that a cell starts in the shell is not a rank. It does not inherit RANK, "
        f"WORLD_SIZE and MASTER_ADDR. %run {run} runs it on the ranks. %ddp_torchrun {shlex.join(program)}, in a cell "
        "of the notebook, runs it with torchrun",
        file=sys.stderr,
    )


def program_of(command: str) -> list[str] | None:
    """Return the Python script that a command runs, or -m and its module, with the arguments.

    Returns:
        None if the command runs no Python program, or a command-line tool such as pip.

    Example:
        >>> program_of("cd src && python3 -u train.py --epochs 2"), program_of("python -m src.train")
        (['train.py', '--epochs', '2'], ['-m', 'src.train'])
        >>> program_of("ls *.py") is None
        True
    """
    try:
        words = shlex.split(command)
    except ValueError:  # unclosed quotation mark
        return None
    runner = next((at for at, word in enumerate(words) if _RUNS_SCRIPTS.match(os.path.basename(word))), len(words))
    for at in range(runner + 1, len(words)):
        if words[at].endswith(".py"):
            return words[at:]
        module = words[at + 1] if words[at] in ("-m", "--module") and at + 1 < len(words) else ""
        if module and module not in _LAUNCHERS:
            is_tool = module.partition(".")[0] in _TOOLS | sys.stdlib_module_names
            return None if is_tool else ["-m", *words[at + 1 :]]
    return None


class _Once:
    """Runs a command on one rank per host and Python environment.

    The first rank locks a file, runs the command and writes its result to the file. The other ranks wait for the lock
    and read the result. The kernel releases the lock when a process dies, so the next rank then runs the command. It
    also does so if the command was interrupted on the first rank and has no exit status.

    Args: like those of `install`.
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
        self._counts: Counter[str] = Counter()  # counts equal commands in one cell

    def run(self, command: str, run: Callable[[], Sequence[Any]], *, is_captured: bool = False) -> Sequence[Any]:
        """Return the result of a command. It is run by this rank or by another rank of the host.

        Args:
            command: text of the command.
            run: runs the command. Returns a JSON-serializable result that ends with the exit status (None if
                interrupted).
            is_captured: whether the result also contains the output.
        """
        rank, ranks_here = self._place()
        if ranks_here < 2:
            with self.alone(command):
                return run()
        with open(self._file(f"{command} {is_captured}"), "a+") as file:
            with self._children.waiting(command, is_elsewhere=True):
                fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            if done := file.read():
                result: Sequence[Any] = json.loads(done)
                return result
            with self.alone(command):
                result = run()
            if result[-1] is not None:
                file.write(json.dumps(result))
        if result[-1] == 0 and (found := _INSTALLS.search(command)):
            what = found[0].strip(" \t\n;&|/")
            print(
                f"ddp_notebook: {what} ran on rank {rank} only, for all ranks of its host. Modules that the ranks have "
                "imported already change with %ddp_restart",
                file=sys.stderr,
            )
        return result

    def is_first(self, what: str) -> bool:
        """Return whether this is the first call with this text in the cell, among all ranks of the host."""
        try:
            os.close(os.open(self._file(what, is_counted=False), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            return False
        except OSError:  # disk full or folder removed: a repeated hint does no harm
            return True
        return True

    @contextlib.contextmanager
    def alone(self, command: str) -> Iterator[None]:
        """Lock this Python environment during the context if the command modifies it."""
        if not _INSTALLS.search(command):
            yield
            return
        folder = os.open(sys.prefix, os.O_RDONLY)
        try:
            with self._children.waiting(command, is_elsewhere=True), contextlib.suppress(OSError):
                fcntl.flock(folder, fcntl.LOCK_EX)  # a network file system may not support locks
            yield
        finally:
            os.close(folder)

    def _file(self, command: str, *, is_counted: bool = True) -> str:
        private.restore(self._folder)
        what = f"{self._session} {self._cell()} {sys.prefix} {command}"
        self._counts[what] += is_counted
        name = hashlib.sha256(f"{what} {self._counts[what]}".encode()).hexdigest()[:32]
        return os.path.join(self._folder, f"command-{name}")
