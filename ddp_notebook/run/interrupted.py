"""Show one line, without frames of this package, when a command is interrupted or called with a wrong argument.

After an interrupt the line states which work was done. Commands with a more detailed message raise a
`keyboard_interrupt` themselves, which is not changed. If a library replaces the interrupt by its own error, as NumPy
does, the command is interrupted too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from ddp_notebook.errors import DDPNotebookError
from ddp_notebook.run.call_arguments import wrong_argument
from ddp_notebook.run.cells.interrupt import NotedPresses, keyboard_interrupt

_UNCHANGED = "nothing was changed, and the ranks keep what they have"
_START = "interrupted: %ddp_status shows whether ranks are running; %ddp_start starts them if not"
_READ = "interrupted: nothing was read; the recording is unchanged"
_ATTACH = "interrupted: %ddp_status shows whether this notebook has a session or job now; both continue"
_CELL = "interrupted before the cell was sent or after its end: %ddp_status shows what the ranks do"

# Sentences by function of `ddp_notebook`.
OF_FUNCTIONS: Mapping[str, str] = {
    **dict.fromkeys(("attach_job", "attach_session"), _ATTACH),
    "check": "interrupted: the comparison of the hosts is not complete; no rank was started",
    "load": "interrupted: nothing was read; the files are unchanged",
    "load_ipython_extension": "interrupted: the magics may be missing; %load_ext ddp_notebook again adds them",
    "start": _START,
}
# Sentences by method of `Session`.
OF_SESSION: Mapping[str, str] = {
    "__repr__": "interrupted: the session was not described; it continues",
    "baseline": "interrupted: the baseline was not measured; rank 0 has the variables that it had before",
    "catch_nan": "interrupted: the next cells may not be checked; call it again",
    "check": f"interrupted: the comparison is not complete; {_UNCHANGED}",
    "_check_restart": "interrupted: the check is not complete; all ranks continue",
    "client": "interrupted: the client is not connected; the next use of session.client connects it",
    "detach": "interrupted: %ddp_status shows whether this notebook still has the session, which continues",
    "interrupt": "interrupted: %ddp_status shows which ranks are still in a cell",
    "log": f"interrupted: the text was not read; {_UNCHANGED}",
    "memory": "interrupted: the measurement is not complete; variables are kept",
    "monitor": "interrupted: the monitor may not be shown; the recording continues, and %ddp_monitor shows it again",
    "peek": "interrupted: nothing was read; the ranks continue",
    "placement": f"interrupted: the placement was not read; {_UNCHANGED}",
    "pull": "interrupted: nothing was pulled; the ranks keep what they have",
    "push": "interrupted before anything was sent, or after all ranks had everything",
    "recording": _READ,
    "record": "interrupted: some ranks may still record at the old level; set it again",
    "report": "interrupted: the report is not complete, but the recording is",
    "run": _CELL,
    "submit": _CELL,
    "_show_unseen": "interrupted: session.log(rank) has the text that was not shown",
    "status": f"interrupted: the table is not complete; {_UNCHANGED}",
    "stop": "interrupted: %ddp_status shows whether ranks are left; %ddp_stop again ends them",
    "trace": "interrupted: the file is not complete, but the recording is; write the file again",
    "_trouble": f"interrupted: the host servers were not queried; {_UNCHANGED}",
    "verify": "interrupted: the step was not compared; models, gradients and variables are restored",
    "whos": f"interrupted: the variables were not listed; {_UNCHANGED}",
    "_write_trace": "interrupted: the file is not complete, but the recording is; write the file again",
}
# Sentences by method of `SessionRanks`.
OF_RANKS: Mapping[str, str] = {
    "fault": "interrupted: some ranks may have the fault; %ddp_fault off removes it",
    "heal": "interrupted: %ddp_status shows the dead ranks; run %ddp_heal again to replace them",
    "reform": "interrupted: the group may not have been formed again; the next cell forms it if needed",
    "resize": "interrupted: %ddp_status shows the number of ranks; run %ddp_resize again to continue",
    "when_stopped": "interrupted: the function may not be called when the session stops",
}
# Sentences by method of `SessionFiles`.
OF_FILES: Mapping[str, str] = {
    "fetch": "interrupted: the files fetched so far are complete, the others were not fetched",
    "sync": "interrupted: the files sent so far are complete, the others were not sent",
}
# Sentences by method of `Recording`.
OF_RECORDING: Mapping[str, str] = {
    **dict.fromkeys(("save", "save_html", "save_trace"), OF_SESSION["trace"]),
    **dict.fromkeys(("collectives", "steps", "runs", "waits", "straggler", "pipeline", "bandwidth", "calls"), _READ),
    "first_nan": _READ,
    **dict.fromkeys(("references", "contexts", "gradients", "resources", "layouts", "to_pandas"), _READ),
    **dict.fromkeys(("rows", "metrics", "_metrics_of", "_metrics_until", "tensor"), _READ),
    "__repr__": "interrupted: the recording was not described; it is unchanged",
    "forecast": "interrupted: nothing was predicted; the recording is unchanged",
    "compare": "interrupted: the comparison is not complete, but the recording is",
    "report": OF_SESSION["report"],
}
# Sentences by method of `Plots`.
OF_PLOTS: Mapping[str, str] = dict.fromkeys(
    ("loss", "steps", "buckets", "pipeline", "bandwidth", "calls"),
    "interrupted: the figure is not complete, but the recording is",
)
# Sentences by method of `Job`, a cell in the background.
OF_JOB: Mapping[str, str] = {
    "cancel": "interrupted: %ddp_jobs shows whether the job still runs; %ddp_cancel again ends it",
    **dict.fromkeys(
        ("result", "exception"), "interrupted: the job continues; %ddp_wait waits for it, and %ddp_cancel ends it"
    ),
}
# Sentences by method of `Jobs`.
OF_JOBS: Mapping[str, str] = {
    "__repr__": "interrupted: the table is not complete; the jobs continue",
    "cancel": "interrupted: %ddp_jobs shows which jobs are left",
    "wait": "interrupted: the jobs continue",
}
# Sentences by method of `RankValues`.
OF_VALUES: Mapping[str, str] = {
    "plot": "interrupted: the figure is not complete, but the values are",
}
# Sentences by method of `TorchrunJob`.
OF_TORCHRUN_JOB: Mapping[str, str] = {
    "__repr__": "interrupted: the job was not described; it continues",
    "close": "interrupted: this notebook may still be attached to the job, which continues",
    "interrupt": "interrupted: %ddp_status shows which ranks are still in their scripts",
    "keep_logs": "interrupted: some logs may not be kept; the job continues",
    **dict.fromkeys(("left", "recording"), _READ),
    **dict.fromkeys(("log", "log_of"), "interrupted: the text was not read; the job continues"),
    **dict.fromkeys(("inspect", "status"), "interrupted: the ranks were not queried; the job continues"),
    **dict.fromkeys(("monitor", "_views"), OF_SESSION["monitor"]),
    "report": OF_SESSION["report"],
    **dict.fromkeys(
        ("settle", "wait_for_ranks", "waits_for_end"), "interrupted: the wait has ended; the job continues"
    ),
    "stop": "interrupted: %ddp_status shows whether the job runs; %ddp_stop again detaches from it",
    "_write_trace": OF_SESSION["trace"],
}
# Sentences by magic. Magics of features have their sentence in their declaration.
OF_MAGICS: Mapping[str, str] = {
    "ddp_auto": "interrupted: %ddp_auto on or off sets where plain cells run",
    "ddp_check": OF_SESSION["check"],
    "ddp_heal": OF_RANKS["heal"],
    "ddp_help": "interrupted: the help was not shown",
    "ddp_interrupt": OF_SESSION["interrupt"],
    "ddp_peek": OF_SESSION["peek"],
    "ddp_pull": "interrupted: no variable was set; the ranks keep what they have",
    "ddp_push": OF_SESSION["push"],
    "ddp_restart": _START,
    "ddp_start": _START,
    "ddp_status": OF_SESSION["status"],
    "ddp_stop": OF_SESSION["stop"],
    "local": "interrupted: the cell did not run to its end in the notebook",
    "on_all_ranks": _CELL,
    "on_ranks": _CELL,
}
T = TypeVar("T", bound=type)
P = ParamSpec("P")
R = TypeVar("R")


def tells_interrupts(sentences: Mapping[str, str]) -> Callable[[T], T]:
    """Decorate a class: a KeyboardInterrupt that leaves one of these methods or properties shows its sentence.

    Args:
        sentences: sentences by name of the method or property.

    Example:
        >>> @tells_interrupts({"work": "interrupted: nothing was done"})
        ... class Worker:
        ...     def work(self):
        ...         raise KeyboardInterrupt
        >>> try:
        ...     Worker().work()
        ... except KeyboardInterrupt as error:
        ...     print(error)
        interrupted: nothing was done
    """

    def decorate(cls: T) -> T:
        for name, sentence in sentences.items():
            member = getattr(cls, name)
            if isinstance(member, property):
                assert member.fget is not None
                setattr(cls, name, property(_told(member.fget, sentence), member.fset, member.fdel, member.__doc__))
            else:
                setattr(cls, name, _told(member, sentence))
        return cls

    return decorate


def _told(function: Callable[..., Any], sentence: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def told(*arguments: Any, **named: Any) -> Any:
        try:
            with NotedPresses() as presses:
                try:
                    return function(*arguments, **named)
                except DDPNotebookError:
                    raise
                except Exception as error:
                    if not presses.were_any and (refused := wrong_argument(function, arguments, named, error)):
                        raise refused from None
                    raise
        except KeyboardInterrupt as error:
            if hasattr(error, "_render_traceback_") and str(error) != _READ:  # it has a more detailed message
                raise
            error.__traceback__ = None  # IPython keeps the last error, with its frames and their data
        except DDPNotebookError:
            raise
        except Exception:
            if not presses.were_any:
                raise
        raise keyboard_interrupt(sentence)

    return told


def tells_interrupt(sentence: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function: a KeyboardInterrupt that leaves it shows this sentence.

    Example:
        >>> @tells_interrupt("interrupted: nothing was done")
        ... def work():
        ...     raise KeyboardInterrupt
        >>> try:
        ...     work()
        ... except KeyboardInterrupt as error:
        ...     print(error)
        interrupted: nothing was done
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        return _told(function, sentence)

    return decorate
