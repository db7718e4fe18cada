"""Find collectives in a cell that cannot work, because some of the ranks that they wait for do not call them.

The cell is read, not run. A `Reader` follows it for one rank: it decides tests on the rank, but not those on data, and
follows functions of the cell. The collectives that it reaches are its trace. A cell is correct if the traces of all
members of a group have the same shape, whatever lines they come from:

    if rank != 0: dist.barrier()     ranks 1-3: barrier (line 1)
    download()
    if rank == 0: dist.barrier()     rank 0:    barrier (line 3), which is correct

If in doubt, no warning is shown: a warning about a working cell would be worse than none.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Final

from ddp_notebook.records.words import name_ranks
from ddp_notebook.run.lint.branches import GiveUpError
from ddp_notebook.run.lint.groups import ELSEWHERE, MAKE_GROUPS, ForeseenCollective, ForeseenGroup
from ddp_notebook.run.lint.statements import Reader

# Each name in `groups` contains one of these. A search for few strings is faster.
_STEMS: Final = (
    *("reduce", "gather", "scatter", "broadcast", "barrier", "all_to_all", "new_", "_group"),
    *("DataParallel", "fully_shard", "device_mesh"),
)
_CODE_MAGICS: Final = {"capture", "prun", "time", "timeit"}  # magics whose cell is code of this rank
_CELL_MAGIC: Final = re.compile(r"\s*%%(\w*).*")
# A magic or a shell command, on one or several lines, or a question such as `x?`. The `x = ` of `x = !ls` is kept.
_NO_PYTHON: Final = re.compile(
    r"^([ \t]*(?:[\w, ]+=[ \t]*(?=[%!]))?)(?:[%!?](?:.*\\\n)*.*|[\w.]+\?{1,2}[ \t]*)$", re.MULTILINE
)


def foresee(
    code: str,
    ranks: Sequence[int],
    world_size: int,
    gone: Sequence[int] = (),
    local_rank: Callable[[int], int] = lambda rank: rank,
) -> list[str]:
    """Return warnings, one line each, about collectives of a cell that cannot work.

    Args:
        code: the cell, as it is sent.
        ranks: the ranks that run it.
        world_size: number of ranks of the session.
        gone: dead ranks.
        local_rank: returns the local rank of a rank.

    Example:
        >>> foresee("if rank == 0: dist.barrier()", range(4), 4)
        ['line 1: dist.barrier runs on rank 0 only; ranks 1-3 do not take part and are waited for']
    """
    # This runs before each cell. Measured by timeit on two cores: 1 us for `pass`, 10 us for 50 lines without a
    # collective, 0.2 ms for an all_reduce and an `if rank == 0: print(x)`. 54 lines of training with both take 1.3 ms,
    # including 0.5 ms of `ast.parse`. Collectives under tests on the rank take longer: 4 ms on 4 ranks, 55 ms on 64.
    if not any(stem in code for stem in _STEMS):
        return []
    here = sorted(set(ranks))
    is_on_all = len(here) == world_size
    if is_on_all and "rank" not in code and "RANK" not in code:
        return []  # nothing in it depends on the rank
    tree = parse_cell(code)
    if tree is None:
        return []
    try:
        if is_on_all and not Reader(None, world_size).tells_apart(tree):
            return []
        readers = {rank: Reader(rank, world_size, local_rank(rank)) for rank in here}
        for reader in readers.values():
            reader.block(tree.body)
    except (GiveUpError, RecursionError):
        return []
    may_wait = ".wait(" in code
    found = _found(readers, gone, lambda call: not call.is_async or may_wait)
    warned = [(sorted(calls, key=lambda call: call.site), text) for text, calls in found.items()]
    return [_sentence(calls, text) for calls, text in sorted(warned, key=lambda each: (each[0][0].site, each[1]))]


def _found(
    readers: Mapping[int, Reader], gone: Sequence[int], is_waited_for: Callable[[ForeseenCollective], bool]
) -> dict[str, set[ForeseenCollective]]:
    """Return the collectives that cannot work, by the text of the problem.

    Args:
        readers: by rank, the reader that has read the cell.
        gone: dead ranks.
        is_waited_for: returns whether a rank may wait for a collective in this cell. If not, other ranks may call it in
            a later cell.
    """
    here = sorted(readers)
    found: dict[str, set[ForeseenCollective]] = {}
    for group in {call.group for reader in readers.values() for call in reader.trace}:
        members = [readers[rank] for rank in group.members if rank in readers]
        is_complete = len(members) == len(group.members)
        for call, text in _uneven(members, group) if is_complete else _too_few(members, group, here, gone):
            if is_waited_for(call):
                found.setdefault(text, set()).add(call)
    return found


def parse_cell(code: str) -> ast.Module | None:
    """Return the cell as a syntax tree, or None if it is not Python. Magics become calls of an unknown function."""
    while (magic := _CELL_MAGIC.match(code)) is not None:
        if magic[1] not in _CODE_MAGICS:
            return None
        code = "\n" * magic[0].count("\n") + code[magic.end() :]
    try:
        return _tree(code)
    except SyntaxError:
        code = _NO_PYTHON.sub(lambda found: f"{found[1]}__magic__()" + "\n" * found[0].count("\n"), code)
    try:
        return _tree(code)
    except SyntaxError:
        return None


def _tree(code: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes: the rank warns about them itself
        try:
            return ast.parse(code)
        # the last one because of python/cpython#106905
        except (ValueError, RecursionError, MemoryError, SystemError) as error:
            raise SyntaxError from error


# ---- what is wrong with the traces


def _too_few(
    members: list[Reader], group: ForeseenGroup, here: list[int], gone: Sequence[int]
) -> Iterator[tuple[ForeseenCollective, str]]:
    """Yield the collectives of the members that run the cell, if other members do not run it."""
    is_default = group.made_at == 0
    whom = f"all {len(group.members)} ranks" if is_default else f"{name_ranks(group.members)}, its group"
    if dead := sorted(set(gone) & set(group.members)):
        place = f"{whom}, and {name_ranks(dead)} died. %ddp_heal replaces dead ranks"
        for reader in members:
            yield from (
                (call, f"must be called by {place}" if call.name in MAKE_GROUPS else f"need{{s}} {place}")
                for call in reader.passed(group)
            )
        return
    place = f"{whom}, and this cell runs on {name_ranks(here)}"
    out = "Use a group of these ranks (group=...), or run it on all" if is_default else "Run it on all of them"
    waits = f"need{{s}} {place}; the others will be waited for. {out}"
    makes = f"must be called by {place}. Run it on all"
    for reader in members:
        yield from ((call, makes if call.name in MAKE_GROUPS else waits) for call in reader.passed(group))


def _uneven(members: list[Reader], group: ForeseenGroup) -> Iterator[tuple[ForeseenCollective, str]]:
    """Yield the collectives that some members of a group reach and others do not."""
    alike: dict[object, list[Reader]] = {}
    for reader in members:
        shapes = tuple(call.shape for call in reader.passed(group))
        alike.setdefault((shapes, frozenset(reader.unseen)), []).append(reader)
    most = max(alike.values(), key=len)
    uneven: dict[ForeseenCollective, tuple[set[Reader], set[Reader]]] = {}  # ranks that reach it, ranks that do not
    for some in alike.values():
        for have, lack in ((some, most), (most, some)):
            for call, is_elsewhere in _unmet(have[0], lack[0], group):
                if is_elsewhere:
                    one, other = sorted([reader.rank for reader in each] for each in (have, lack))
                    yield call, f"come{{s}} in another order on {name_ranks(one)} than on {name_ranks(other)}"
                else:
                    having, lacking = uneven.setdefault(call, (set(), set()))
                    having.update(have)
                    lacking.update(lack)
    for call, (having, lacking) in uneven.items():
        passing = {reader for reader in members if call in reader.trace}
        if "?" not in call.within or passing == having:  # otherwise the correct ranks may reach it
            yield call, _who_lacks(call, passing, lacking)


def _unmet(one: Reader, other: Reader, group: ForeseenGroup) -> Iterator[tuple[ForeseenCollective, bool]]:
    """Yield the collectives that one rank reaches and another certainly does not, and whether the other has them
    elsewhere.
    """
    mine, theirs = one.passed(group), other.passed(group)
    if other.unseen - one.unseen or [call.shape for call in mine] == [call.shape for call in theirs]:
        return  # the other rank calls unknown functions, which may run the missing collectives
    may_differ, perhaps = _in_any_number(mine, theirs), _in_any_number(theirs, mine)

    def weight(call: ForeseenCollective) -> int:  # collectives that certainly run are matched first
        return 1 if call.within or call.shape[0] in may_differ | perhaps else 1000

    more, less = _left(mine, theirs, lambda call: call.shape, weight)
    elsewhere = {call.shape[0] for call in less}
    may_differ |= {call.shape[0] for call in (*more, *less) if call.within}
    for shape in dict.fromkeys(call.shape for call in more):
        name, _ = shape
        if name not in perhaps and not (name in elsewhere and name in may_differ):
            calls = [call for call in more if call.shape == shape]
            # It is unknown which of several calls is wrong. Prefer lines that the other rank does not reach.
            placed, _ = _left(mine, theirs, lambda call: call.site)
            blamed = [call for call in placed if call.shape == shape][-len(calls) :] or calls
            yield from ((call, name in elsewhere) for call in blamed)


def _in_any_number(trace: list[ForeseenCollective], other: list[ForeseenCollective]) -> set[str]:
    """Return the names of collectives under a test on data, or in a loop of this rank alone.

    A loop over data is assumed to have the same number of iterations on all ranks.
    """
    places = {call.site for call in other}
    return {call.shape[0] for call in trace if "?" in call.within or ("*" in call.within and call.site not in places)}


def _left(
    one: list[ForeseenCollective],
    other: list[ForeseenCollective],
    key: Callable[[ForeseenCollective], object],
    weight: Callable[[ForeseenCollective], int] = lambda call: 1,
) -> tuple[list[ForeseenCollective], list[ForeseenCollective]]:
    """Return the rest of both traces without their heaviest common subsequence."""
    keys, others, weights = list(map(key, one)), list(map(key, other)), list(map(weight, one))
    most = [[0] * (len(others) + 1) for _ in range(len(keys) + 1)]  # weight of the best match from i and j on
    for i, j in product(reversed(range(len(keys))), reversed(range(len(others)))):
        goes = keys[i] == others[j]
        most[i][j] = most[i + 1][j + 1] + weights[i] if goes else max(most[i + 1][j], most[i][j + 1])
    left: tuple[list[ForeseenCollective], list[ForeseenCollective]] = ([], [])
    i = j = 0
    while i < len(keys) and j < len(others):
        if keys[i] == others[j]:
            i, j = i + 1, j + 1
        elif most[i + 1][j] >= most[i][j + 1]:
            left[0].append(one[i])
            i += 1
        else:
            left[1].append(other[j])
            j += 1
    return [*left[0], *one[i:]], [*left[1], *other[j:]]


def _who_lacks(call: ForeseenCollective, passing: set[Reader], readers: set[Reader]) -> str:
    """Return a sentence about the ranks that do not reach a collective, with the line where they leave the code."""
    ranks, lacking = (sorted(reader.rank for reader in each) for each in (passing, readers))
    if not passing.isdisjoint(readers):
        return f"do{{es}} not run equally often on {name_ranks(sorted({*ranks, *lacking}))}"
    if call.name in MAKE_GROUPS:
        return f"run{{s}} on {name_ranks(ranks)} only, and all ranks must call it"
    s, do, are = ("s", "does", "is") if len(lacking) == 1 else ("", "do", "are")
    exits = {line for reader in readers for line in reader.exits if line < call.site[0]}
    exits -= {line for reader in passing for line in reader.exits}
    leave = f" leave{s} in line {max(exits)}," if exits and not call.is_branched else ""
    away = f"{name_ranks(lacking)}{leave} {do} not take part and {are} waited for"
    return f"run{{s}} on {name_ranks(ranks)} only; {away}"


def _sentence(calls: list[ForeseenCollective], text: str) -> str:
    """Return `lines 2 (called in line 7) and 8: dist.barrier runs on ...`."""
    lines = [f"{line} (called in line {via})" if via else str(line) for line, _, via in (call.site for call in calls)]
    names = [call.name if call.name in ELSEWHERE else f"dist.{call.name}" for call in calls]
    places, subjects = list(dict.fromkeys(lines)), list(dict.fromkeys(names))
    s, es = ("s", "es") if len(subjects) == 1 else ("", "")
    return f"line{'s' * (len(places) > 1)} {_listed(places)}: {_listed(subjects)} {text.format(s=s, es=es)}"


def _listed(parts: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))
