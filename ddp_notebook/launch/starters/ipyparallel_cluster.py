"""A running ipyparallel cluster: its engines start outposts, and stay available to the user.

Engines with the same machine, GPUs and cores share one outpost, which forks the ranks of all of them. Requests to
engines are expressions of built-in Python functions, so nothing is imported into the engines and no name of the user
changes.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddp_notebook.errors import StartError, UsageError
from ddp_notebook.launch.starters import launchers
from ddp_notebook.launch.starters.mpi import explain_log
from ddp_notebook.launch.starters.starter import Starter, address_for
from ddp_notebook.launch.transports.base import OWN_NUMBER

_KEYS = ("profile", "cluster_id")
_CONNECT_S = 5.0
_ANSWER_S = 10.0  # time limit for engines to answer; an engine that runs a cell answers after its end
_LOOK_S = 1.0  # interval of checks of the outposts' output
_ASK = """(
    __import__("socket").gethostname(),
    __import__("os").environ.get("CUDA_VISIBLE_DEVICES"),
    sorted(getattr(__import__("os"), "sched_getaffinity", lambda _: [])(0)),
    __import__("sys").executable,
)"""
# The shell starts the command in the background, so that it is not a child of the engine and survives the call.
_SHELL = 'file=$(mktemp) && echo "$file"; { "$@"; echo "status $?"; } >"$file" 2>&1 </dev/null &'
_START = """__import__("subprocess").run(
    ["sh", "-c", shell, "sh", *command],
    env={**__import__("os").environ, **env}, start_new_session=True, stdout=-1, text=True,
).stdout.strip()"""
_READ = "open(file, errors='replace').read()"
_REMOVE = "__import__('os').unlink(file)"


class ClientStarter(Starter):
    """Starts tasks through engines of a running cluster.

    Args:
        line: the cluster: "profile=NAME", "cluster_id=ID", or both with a comma.
        python: the interpreter of the tasks; None: that of the engines.

    Raises:
        UsageError: the line cannot be parsed, or names an unknown profile or cluster.
        StartError: the cluster does not run, it has no engines, or they do not answer.
    """

    def __init__(self, line: str, python: str | None) -> None:
        self._line = line
        self._client, self._open = _connect(line)
        try:
            self._engines = self._ask(self._client.ids, {engine: (_ASK, {}) for engine in self._client.ids})
        except BaseException:
            self._client.close()
            raise
        alike: dict[tuple[Any, ...], list[int]] = {}
        for engine, (host, gpus, cores, _) in self._engines.items():
            alike.setdefault((host, gpus, *cores), []).append(engine)
        self._starting = [engines[0] for engines in alike.values()]
        self.shares = [len(engines) for engines in alike.values()]
        self.tasks = len(alike)
        self._python = python
        self._files: dict[int, str] = {}  # engine -> file with the output of its outpost
        self._looking: Any = None
        self._lock = threading.Lock()  # threads of several hosts may call `trouble` at the same time
        self._looked_s = time.monotonic()
        self._trouble = ""

    @property
    def words(self) -> str:
        return f"the cluster {self._line}"

    def status(self) -> str:
        """Return a warning if others could read the session's keys on the cluster's channel; else ""."""
        return f"{self.words}: {self._open}" if self._open else ""

    @property
    def address(self) -> str:
        return address_for(host for host, *_ in self._engines.values())

    def start(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        calls = {}
        for number, engine in enumerate(self._starting):
            python = self._python or self._engines[engine][3]
            own = dict(zip(OWN_NUMBER, (str(number), str(self.tasks)), strict=True))
            calls[engine] = (_START, {"shell": _SHELL, "command": [python, *command[1:]], "env": {**env, **own}})
        self._files = self._ask(self._starting, calls)

    def preview(self) -> str:
        """Return the engines that would start tasks."""
        lines = (f"engine {engine} on {self._engines[engine][0]}" for engine in self._starting)
        return f"{self.words}: tasks are started by {', '.join(lines)}"

    def trouble(self, *, now: bool = False) -> str:
        with self._lock:
            self._poll()
            return self._trouble

    def _poll(self) -> None:
        if self._looking is None and time.monotonic() > self._looked_s + _LOOK_S and self._files:
            self._looking = self._send({engine: (_READ, {"file": file}) for engine, file in self._files.items()})
        if self._looking is not None and all(one.ready() for one in self._looking.values()):
            for engine, one in self._looking.items():
                with contextlib.suppress(Exception):  # the engine has ended, or the file was removed
                    written, ended, status = one.get().rpartition("status ")
                    if ended:
                        words, fix = explain_log(written)
                        words = words or f"it ended with status {status.strip()}"
                        host = self._engines[engine][0]
                        self._trouble = f"{self.words}, engine {engine} on {host}: {words}" + (
                            f"; {fix}" if fix else ""
                        )
            self._looking, self._looked_s = None, time.monotonic()

    def end(self) -> None:
        with contextlib.suppress(Exception):  # errors are ignored: the engines may have ended
            self._ask(self._starting, {engine: (_REMOVE, {"file": file}) for engine, file in self._files.items()})
        self._client.close()

    def _send(self, calls: Mapping[int, tuple[str, Mapping[str, Any]]]) -> dict[int, Any]:
        return {engine: self._client[engine].apply_async(eval, *call) for engine, call in calls.items()}

    def _ask(self, engines: Sequence[int], calls: Mapping[int, tuple[str, Mapping[str, Any]]]) -> dict[int, Any]:
        """Return the engines' results of one expression each, with its variables.

        Raises:
            StartError: an engine does not answer, or fails.
        """
        import ipyparallel

        asked, until = self._send(calls), time.monotonic() + _ANSWER_S
        try:
            return {engine: asked[engine].get(timeout=max(0.1, until - time.monotonic())) for engine in calls}
        except (TimeoutError, ipyparallel.error.TimeoutError) as error:
            silent = [str(engine) for engine, one in asked.items() if not one.ready()]
            for one in asked.values():
                with contextlib.suppress(Exception):
                    one.abort()
            raise StartError(
                f"{self.words}: engine {', '.join(silent)} has not answered in {_ANSWER_S:g} s; "
                "it may still be running code: stop that first"
            ) from error
        except ipyparallel.error.IPythonError as error:
            raise StartError(f"{self.words}: an engine has failed: {error}") from error


def _connect(line: str) -> tuple[Any, str]:
    """Return a client of a cluster, and the result of `unencrypted`."""
    import ipyparallel

    given = dict(part.strip().partition("=")[::2] for part in line.split(","))
    if not given or any(key not in _KEYS or not value for key, value in given.items()):
        raise UsageError(f"--client takes profile=NAME or cluster_id=ID, not {line!r}")
    profile = given.get("profile", "default")
    folder = launchers.profile_dir(profile) / "security"
    file = _connection_file(folder, given.get("cluster_id"), f"ipcluster start --profile={profile} starts one", line)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns if the cluster can be reached only from this machine
            client = ipyparallel.Client(str(file), timeout=_CONNECT_S)
    except Exception as error:  # errors of files, sockets and timeouts
        raise StartError(
            f"the cluster {line} does not answer ({' '.join(str(error).split())}); it may have ended without removing "
            f"{file}"
        ) from error
    if not client.ids:
        client.close()
        raise StartError(f"the cluster {line} has no engines yet; wait until they have registered, or start some")
    return client, unencrypted(json.loads(file.read_text()))


def unencrypted(connection: Mapping[str, Any]) -> str:
    """Return a warning and a fix if the channel to a cluster's engines is not encrypted; "" if it is.

    Args:
        connection: content of the connection file.

    Example:
        >>> unencrypted({"interface": "tcp://127.0.0.1"}), unencrypted({"interface": "tcp://*", "curve_serverkey": "k"})
        ('', '')
    """
    if connection.get("curve_serverkey") or os.environ.get("IPP_CURVE_SERVERKEY"):
        return ""
    host = str(connection.get("interface", "")).rpartition("/")[2]
    if host.startswith("127.") or host in ("localhost", "[::1]"):
        return ""
    return (
        f"its own channel (at {host}) is signed but not encrypted, and has sent the key of this session's tasks. "
        "A process that reads that network could connect in their place; c.IPController.enable_curve = True in its "
        "ipcontroller_config.py encrypts the channel"
    )


def _connection_file(folder: Path, cluster_id: str | None, how: str, line: str) -> Path:
    """Return the connection file of a cluster's clients; without an id that of the only cluster."""
    named = folder / (f"ipcontroller-{cluster_id}-client.json" if cluster_id else "ipcontroller-client.json")
    if named.exists():
        return named
    there = sorted(folder.glob("ipcontroller-*client.json"))
    ids = [file.name.removeprefix("ipcontroller-").removesuffix("-client.json") for file in there]
    if cluster_id is None and len(there) == 1:
        return there[0]
    if cluster_id is None and there:
        raise UsageError(
            f"--client {line}: the profile has several clusters; choose one with cluster_id=: {', '.join(ids)}"
        )
    raise StartError(
        f"found no cluster {line}: {named} does not exist; " + (f"known are {', '.join(ids)}" if ids else how)
    )
