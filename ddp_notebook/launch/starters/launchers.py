"""ipyparallel launchers: the only module that depends on their internals.

ipyparallel itself reads `ipcluster_config.py` of a profile, and the launcher is created as in `ipp.Cluster`. But no
controller is started, and the engines' command is replaced. docs/design/private_interfaces.md lists the undocumented
interfaces that this module uses.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import traceback
from pathlib import Path
from typing import Any

from ddp_notebook.errors import StartError, UsageError
from ddp_notebook.launch.environment import working_directory

CONFIG = "ipcluster_config.py"
# These launchers run the command of their templates, or another ipcluster. Their command cannot be replaced.
_CANNOT = ("HTCondorEngineSetLauncher", "WindowsHPCEngineSetLauncher", "SSHProxyEngineSetLauncher")


def profile_dir(name: str) -> Path:
    """Return the folder of a profile.

    Args:
        name: as for `ipcluster --profile`, or a folder.

    Raises:
        UsageError: it does not exist; the message lists the existing profiles.
    """
    if "/" in name and (folder := Path(name).expanduser()).is_dir():
        return folder.resolve()
    # The functions of IPython warn about a read-only folder, and search in an empty one.
    home = Path(os.environ.get("IPYTHONDIR") or "~/.ipython").expanduser()
    for parent in (Path(working_directory()), home):
        if (folder := parent / f"profile_{name}").is_dir():
            return folder
    there = [file.parent.name.removeprefix("profile_") for file in sorted(home.glob(f"profile_*/{CONFIG}"))]
    raise UsageError(
        f"profile {name!r} does not exist in {home}; "
        + (f"it has {', '.join(there)}" if there else f"ipython profile create --parallel {name} makes one")
    )


class _Heard(logging.Handler):
    """Keeps logged exceptions, since the reader of profiles does not raise them. Drops other log records."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[Exception] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and isinstance(record.exc_info[1], Exception):
            self.errors.append(record.exc_info[1])


def make(name: str, work_dir: str) -> Any:
    """Create the engine launcher of a profile, without starting it.

    Args:
        name: of the profile.
        work_dir: folder for the script of a batch system.

    Raises:
        UsageError: the profile does not exist, or its launcher can start only engines.
        StartError: the profile cannot be read.
    """
    from ipyparallel import Cluster

    folder = profile_dir(name)
    log, heard = logging.getLogger(f"{__name__}.{name}"), _Heard()
    log.propagate, log.handlers = False, [heard]
    try:
        cluster = Cluster(profile_dir=str(folder), cluster_file="", shutdown_atexit=False, log=log)
        _ = cluster.config  # reads the config
        for error in heard.errors:
            raise error
        kind = cluster.engine_launcher_class
        _refuse(kind, name)
        # The environment contains the invitation. By default, files of a controller that does not exist would be sent.
        cluster.config.SSHEngineLauncher.setdefault("to_send", [])
        launcher = kind(
            work_dir=work_dir if is_a(kind, "BatchSystemLauncher") else ".",
            parent=cluster,
            log=log,
            profile_dir=str(folder),
            cluster_id=cluster.cluster_id,
            engine_set_id="1",
        )
    except UsageError:
        raise
    except Exception as error:  # the profile is a program of the user
        raise StartError(f"profile {name}: {_where(error, folder)}{type(error).__name__}: {_message(error)}") from error
    if is_a(kind, "BatchSystemLauncher"):
        launcher._run_command = _run_command
    return launcher


def _refuse(kind: type, name: str) -> None:
    if any(is_a(kind, one) for one in _CANNOT) or not hasattr(kind, "engine_cmd"):
        raise UsageError(
            f"profile {name} uses {kind.__name__}, which can start only ipyparallel's own engines: start them with "
            f"ipcluster start --profile={name}, then use --client profile={name}"
        )


def is_a(kind: type, name: str) -> bool:
    """Return whether a launcher's class is this ipyparallel class, or a subclass."""
    return any(one.__name__ == name and one.__module__.startswith("ipyparallel.") for one in kind.__mro__)


def python(launcher: Any) -> list[str]:
    """Return the interpreter of a launcher's engines, with the words that the user has put before it.

    Raises:
        UsageError: the command runs another program.
    """
    words = list(launcher.engine_cmd)
    if "-m" not in words:
        raise UsageError(
            f"engine_cmd of {type(launcher).__name__} must contain -m, got {words}; set the interpreter with --python"
        )
    return words[: words.index("-m")]


def slots(launcher: Any) -> dict[str, int] | None:
    """Return the number of engines for each host of an ssh launcher, by host name; None for other launchers."""
    if not is_a(type(launcher), "SSHEngineSetLauncher"):
        return None
    return {host: of.get("n", 1) if isinstance(of, dict) else int(of) for host, of in launcher.engines.items()}


def check_template(launcher: Any) -> None:
    """Check that the template of a batch system can be formatted, and runs the given command.

    Raises:
        StartError: a line is wrong; the message names it.
    """
    if not is_a(type(launcher), "BatchSystemLauncher"):
        return
    where, text = f"batch_template of {type(launcher).__name__}", launcher.batch_template
    if not text and launcher.batch_template_file:
        where = launcher.batch_template_file
        try:
            text = Path(where).read_text()
        except OSError as error:
            raise StartError(f"the batch template cannot be read: {error}") from error
    if not text:
        return
    values = {**launcher.context, "environment_json": "{}", **launcher.namespace}
    for number, line in enumerate(text.splitlines(), 1):
        try:
            launcher.formatter.format(line, **values)
        except Exception as error:  # an expression of the user
            raise StartError(f"{where}, line {number}: {line.strip()!r}: {type(error).__name__}: {error}") from error
        if re.match(r"\s*[^#]*\bip(engine|yparallel\.engine)\b", line):
            raise StartError(
                f"{where}, line {number}: {line.strip()!r} starts engines by name; use {{program_and_args}} "
                "instead, which becomes the command to start"
            )


def script(launcher: Any, count: int) -> str:
    """Return the script for a batch system; "" for other launchers."""
    if not is_a(type(launcher), "BatchSystemLauncher"):
        return ""
    launcher.write_batch_script(count)  # into the folder given to `make`
    return Path(launcher.batch_file).read_text()


def have_ended(launcher: Any) -> bool:
    """Return whether the processes of a launcher have ended, or one of them."""
    return launcher.state == "after" or bool(launcher.stop_data)


def ends_by_itself(launcher: Any) -> bool:
    """Return whether the launcher runs and will notice the end of its processes. It does not notice the end of a batch
    job.
    """
    return launcher.state == "running" and not is_a(type(launcher), "BatchSystemLauncher")


def starts_one_by_one(launcher: Any) -> bool:
    """Return whether the launcher starts the given number of separate processes."""
    return is_a(type(launcher), "LocalEngineSetLauncher")  # base class of the ssh launcher


def _run_command(command: list[str], **options: Any) -> str:
    """Replacement of a batch launcher's method, which would print the command's output to the terminal of Jupyter."""
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, **options)
    if done.returncode != 0:
        words = " ".join(f"{done.stdout} {done.stderr}".split())
        raise StartError(f"{command[0]} ended with status {done.returncode}: {words}")
    return done.stdout


def _where(error: Exception, folder: Path) -> str:
    """Return the file and line of a profile's error, as the start of a sentence."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}: "
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).name == CONFIG]
    return f"{frames[-1].filename}, line {frames[-1].lineno}: " if frames else f"{folder / CONFIG}: "


def _message(error: Exception) -> str:
    return error.msg if isinstance(error, SyntaxError) else str(error)
