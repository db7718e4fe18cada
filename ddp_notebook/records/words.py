"""Format sets of ranks and places in programs, and shared sentences about them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

_T = TypeVar("_T", bound=Hashable)
# Names that a rank defines in the namespace of cells. `RESERVED_NAMES` cannot be pushed.
RANK_VARIABLES = frozenset({"rank", "local_rank", "world_size", "device"})  # each rank has its own value
IMPORTED_MODULES = frozenset({"torch", "dist"})
OF_EACH_RANK = (  # environment variables that torchrun sets for each rank; a session sets them too
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
)
IPYTHON_NAMES = ("_oh", "_dh", "get_ipython", "__builtins__")  # IPython reads these names in the namespace of cells
RESERVED_NAMES = RANK_VARIABLES | IMPORTED_MODULES | {*IPYTHON_NAMES}
LOG_FUNCTION = "log"  # users also use this name for paths and files, so a push may replace it


def group_by_value(values: Mapping[int, _T]) -> dict[_T, list[int]]:
    """Group ranks by value: value -> ranks, in the order of the first rank of each group."""
    groups: dict[_T, list[int]] = {}
    for rank in sorted(values):
        groups.setdefault(values[rank], []).append(rank)
    return groups


def format_ranks(ranks: Sequence[int]) -> str:
    """Format ranks as a short set: `[0, 1, 2, 5]` -> `"0-2,5"`."""
    parts: list[str] = []
    run: list[int] = []
    for rank in [*sorted(ranks), None]:
        if run and rank is not None and rank == run[-1] + 1:
            run.append(rank)
            continue
        if run:
            parts += [str(run[0])] if len(run) == 1 else [f"{run[0]}-{run[-1]}"]
        run = [] if rank is None else [rank]
    return ",".join(parts)


def list_ranks(ranks: Sequence[int]) -> str:
    """Format ranks for a sentence, with a range from three ranks on.

    `[0, 1, 3]` -> `"ranks 0,1,3"`, `[0, 1, 2]` -> `"ranks 0-2"`.
    """
    short = [part if part.count("-") == 0 else _without_pair(part) for part in format_ranks(ranks).split(",")]
    return f"rank{'' if len(ranks) == 1 else 's'} {','.join(short)}"


def _without_pair(part: str) -> str:
    first, _, last = part.partition("-")
    return f"{first},{last}" if int(last) == int(first) + 1 else part


def name_ranks(ranks: Sequence[int]) -> str:
    """Format ranks with their noun: `[2]` -> `"rank 2"`, `[0, 1, 3]` -> `"ranks 0-1,3"`."""
    return f"rank{'' if len(ranks) == 1 else 's'} {format_ranks(ranks)}"


def rank_on(rank: int, hosts: Sequence[str]) -> str:
    """Format a rank, with its host if the session has several.

    Args:
        rank: rank of the session.
        hosts: host of each rank; empty for a session on one machine.

    Example:
        >>> rank_on(2, ("gpu1", "gpu1", "gpu2")), rank_on(2, ())
        ('rank 2 on gpu2', 'rank 2')
    """
    return ranks_on([rank], hosts)


def ranks_on(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Format ranks, with their host if they share one and the session has several.

    Args:
        ranks: ranks of the session.
        hosts: host of each rank; empty for a session on one machine.

    Example:
        >>> ranks_on([2, 3], ("gpu1", "gpu1", "gpu2", "gpu2")), ranks_on([1, 2], ("gpu1", "gpu1", "gpu2", "gpu2"))
        ('ranks 2-3 on gpu2', 'ranks 1-2')
    """
    theirs = {hosts[rank] for rank in ranks} if hosts else set()
    return name_ranks(ranks) + (f" on {theirs.pop()}" if len(theirs) == 1 else "")


def in_function(name: str) -> str:
    """Return the suffix for the line of a cell: `"load"` -> `" in load"`; `""` for code outside functions.

    Python names such code `<module>`, and IPython 7.34 `<cell line: 3>`.
    """
    return "" if name == "<module>" or name.startswith("<cell line: ") else f" in {name}"


def with_call(line: str, called: str) -> str:
    """Format a place in a program: a line, and the function that it calls. `line_of` and `called_of` parse it.

    Example:
        >>> with_call("cell line 7", "all_reduce"), with_call("cell line 7", "")
        ('cell line 7, in all_reduce', 'cell line 7')
    """
    return f"{line}, in {called}" if called else line


def line_of(place: str) -> str:
    """Return the line of a place from `with_call`.

    Example:
        >>> line_of("cell line 7, in all_reduce"), line_of("cell line 7")
        ('cell line 7', 'cell line 7')
    """
    return place.partition(", in ")[0]


def called_of(place: str) -> str:
    """Return the called function of a place from `with_call`; "" if there is none.

    Example:
        >>> called_of("cell line 7, in all_reduce"), called_of("cell line 7")
        ('all_reduce', '')
    """
    return place.partition(", in ")[2]


APART = {  # sentences by the way in which ranks train without synchronization
    "": "To train together, wrap the model in DistributedDataParallel, and call the wrapped model, not its module",
    "unwrapped": (
        "The parameters of the optimizer belong to no model in DistributedDataParallel. To train together, wrap the "
        "model, and call the wrapped one"
    ),
    "ddp": (
        "The model is wrapped in DistributedDataParallel, but its averaging was not used: call the wrapped model, not "
        "its module, and outside no_sync()"
    ),
    "no gradients": "The parameters of the optimizer had no gradients",
    "ddp, no gradients": (
        "The model is wrapped in DistributedDataParallel, but its parameters had no gradients. A forward under "
        "torch.no_grad() records none"
    ),
}


def train_apart(ranks: Sequence[int], how: str = "") -> str:
    """Return the sentences for ranks whose optimizers step although no gradients are sent.

    Args:
        how: a key of `APART`; "" if it is unknown.
    """
    train = "trains" if len(ranks) == 1 else "train"
    return f"{name_ranks(ranks)} {train} apart: no gradient was averaged by a collective, send or receive. {APART[how]}"


def is_whole_stack(stack: str) -> bool:
    """Return whether the output of `faulthandler` is complete, down to the outermost frame of the main thread.

    On a busy machine a process may pause while it writes the stacks.

    Example:
        >>> is_whole_stack('Thread 0x1:\\n  File "a.py", line 9 in <module>\\n'), is_whole_stack("Thread 0x1:")
        (True, False)
    """
    return stack.rstrip().endswith(("in <module>", "in _run_module_as_main", "..."))  # "...": more than 100 frames


def bad_elements(nans: int, infs: int, count: int) -> str:
    """Format the number of elements that are not finite.

    Example:
        >>> bad_elements(3, 0, 8), bad_elements(0, 2, 8), bad_elements(1, 1, 2000)
        ('3 NaN of 8 elements', '2 infinite of 8 elements', '1 NaN and 1 infinite of 2,000 elements')
    """
    parts = [f"{nans:,} NaN"] * bool(nans) + [f"{infs:,} infinite"] * bool(infs)
    return f"{' and '.join(parts)} of {count:,} elements"
