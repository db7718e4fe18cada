"""Variables of the ranks in one table: each variable once, and how it differs between ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddp_notebook.errors import MissingPackageError
from ddp_notebook.records.units import size
from ddp_notebook.records.words import format_ranks, group_by_value, list_ranks

_FORM = ("type", "shape", "dtype", "device")
_COLUMNS = ("name", "type", "shape", "dtype", "device", "bytes", "ranks")
_MOST_SHOWN = 200
_MOST_CODE = 8
_LONGEST = 40  # characters of a cell
NOT_READ = ""
SAME, SAMPLED, SHARDED = "same", "same (sampled)", "sharded"
NOT_COMPARED = "contents not compared"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """A variable on all ranks.

    Args:
        name: its name.
        type, shape, dtype, device: text; alternatives are separated by " / " if ranks differ. A device is without its
            number if only that differs.
        nbytes: largest number of bytes on a rank.
        of_nbytes: bytes of the storage that a slice keeps alive; 0 if it is no larger.
        ranks: "same", "same (sampled)", "sharded", "contents not compared", or the groups of ranks that differ and in
            what: "ranks 0,2 / 1,3: shape". "" if there is one rank, or if a cell runs.
    """

    name: str
    type: str
    shape: str
    dtype: str
    device: str
    nbytes: int
    of_nbytes: int
    ranks: str

    @property
    def differs(self) -> bool:
        """Return whether the variable differs between ranks, or is missing on some."""
        return ":" in self.ranks or self.ranks.startswith("missing")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variables:
    """Variables of all ranks, largest first. `Session.whos` returns them; the `repr` is the table of `%ddp_whos`.

    Args:
        rows: the variables.
        code: names of functions, classes and modules, which are not in the table.
        memory: bytes by purpose, by rank, with each storage once: "variables", "gradients", and on a GPU "other"
            (memory of torch that no listed variable holds) and "cached".
        notes: sentences under the table.

    Example:
        >>> session.run("weights = torch.ones(4)", quiet=True) and None
        >>> session.whos("weights")["weights"].shape
        '(4,)'
    """

    rows: tuple[Variable, ...]
    code: tuple[str, ...] = ()
    memory: Mapping[int, Mapping[str, int]]
    notes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Variable]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, name: str) -> Variable:
        """Return a variable by its name.

        Raises:
            KeyError: no rank has it.
        """
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(name)

    def to_pandas(self) -> Any:
        """Return the table as a DataFrame with the columns name, type, shape, dtype, device, nbytes and ranks.

        Raises:
            MissingPackageError: pandas is not installed.
        """
        try:
            import pandas  # type: ignore[import-untyped,import-not-found,unused-ignore]
        except ImportError as error:
            raise MissingPackageError(
                "to_pandas() needs pandas, which is not installed: %pip install pandas"
            ) from error
        names = ("name", "type", "shape", "dtype", "device", "nbytes", "ranks")
        return pandas.DataFrame({name: [getattr(row, name) for row in self.rows] for name in names})

    def __repr__(self) -> str:
        lines = []
        if self.rows:
            cells = [_cells(row) for row in self.rows[:_MOST_SHOWN]]
            shown = [at for at in range(len(_COLUMNS)) if any(row[at] for row in cells)]
            table = [[one[at] for at in shown] for one in [_COLUMNS, *cells]]
            widths = [max(len(row[at]) for row in table) for at in range(len(shown))]
            right = [_COLUMNS[at] == "bytes" for at in shown]
            for row in table:
                words = [
                    word.rjust(width) if is_right else word.ljust(width)
                    for word, width, is_right in zip(row, widths, right, strict=True)
                ]
                lines.append("  ".join(words).rstrip())
        elif not self.notes:
            lines.append("no variables")
        if (more := len(self.rows) - _MOST_SHOWN) > 0:
            lines.append(f"... and {more:,} smaller ones: %ddp_whos PATTERN lists some")
        if self.code:
            left = len(self.code) - _MOST_CODE
            names = ", ".join(self.code[:_MOST_CODE]) + (f" and {left} more" if left > 0 else "")
            lines.append(f"functions, classes and modules: {names}")
        totals = {rank: _total(memory) for rank, memory in self.memory.items()} if self.rows else {}
        lines += [f"{list_ranks(ranks)}: {total}" for total, ranks in group_by_value(totals).items()]
        return "\n".join([*lines, *self.notes])


def variables_of(by_rank: Mapping[int, Mapping[str, Any]], pattern: str = "", notes: Sequence[str] = ()) -> Variables:
    """Return the table from the answers of the ranks, see `rank.whos.rows.Rows.of`."""
    names = dict.fromkeys(name for facts in by_rank.values() for name in facts["rows"])
    rows = [_variable(name, {rank: facts["rows"].get(name) for rank, facts in by_rank.items()}) for name in names]
    rows.sort(key=lambda row: (-row.nbytes, row.name))
    code = sorted({name for facts in by_rank.values() for name in facts["code"]})
    if pattern and not rows:
        notes = [*notes, f"no variable matches {pattern!r}"]
    return Variables(
        rows=tuple(rows),
        code=tuple(code),
        memory={rank: facts["memory"] for rank, facts in by_rank.items()},
        notes=tuple(notes),
    )


def _variable(name: str, by_rank: Mapping[int, Mapping[str, Any] | None]) -> Variable:
    here = {rank: row for rank, row in by_rank.items() if row is not None}
    texts = {field: _text(field, here) for field in _FORM}
    largest = max(here.values(), key=lambda row: row.get("nbytes", 0))
    return Variable(
        name=name,
        **texts,
        nbytes=largest.get("nbytes", 0),
        of_nbytes=largest.get("of_nbytes", 0),
        ranks=_compared(by_rank, here),
    )


def _text(field: str, here: Mapping[int, Mapping[str, Any]]) -> str:
    """Return the text of a field, with alternatives if ranks differ."""
    found = list(dict.fromkeys(_comparable(field, row) for row in here.values()))
    if field == "device" and len(found) == 1:
        devices = {row.get("device", "") for row in here.values()}
        return devices.pop() if len(devices) == 1 else found[0]
    return " / ".join(found)


def _comparable(field: str, row: Mapping[str, Any]) -> str:
    """Return the text of a field in which ranks have to agree: devices without their numbers."""
    text = str(row.get(field, ""))
    return ", ".join(part.partition(":")[0] for part in text.split(", ")) if field == "device" else text


def _compared(by_rank: Mapping[int, Mapping[str, Any] | None], here: Mapping[int, Mapping[str, Any]]) -> str:
    """Return how the ranks differ, see `Variable.ranks`."""
    if missing := [rank for rank, row in by_rank.items() if row is None]:
        return f"missing on {list_ranks(missing)}"
    if len(here) < 2:
        return NOT_READ
    if form := _differing_form(here):
        return form
    rows = list(here.values())
    if any("unread" in row for row in rows):
        return NOT_COMPARED
    if any(row.get("sharded") for row in rows):
        return SHARDED
    if any("digest" not in row for row in rows):
        return NOT_READ
    digests = {rank: str(row["digest"]) for rank, row in here.items()}
    if len(set(digests.values())) > 1:
        return f"{_groups(digests)}: values"
    if not all(row["complete"] for row in rows):
        return NOT_COMPARED
    return SAMPLED if any(row["sampled"] for row in rows) else SAME


def _differing_form(here: Mapping[int, Mapping[str, Any]]) -> str:
    """Return how types, shapes, dtypes, devices and `requires_grad` differ between ranks; "" if they do not."""
    differing = [
        field for field in (*_FORM, "requires_grad") if len({_comparable(field, row) for row in here.values()}) > 1
    ]
    if not differing:
        return ""
    forms = {rank: tuple(_comparable(field, row) for field in differing) for rank, row in here.items()}
    return f"{_groups(forms)}: {', '.join(differing)}"


def _groups(values: Mapping[int, Any]) -> str:
    groups = [format_ranks(ranks) for ranks in group_by_value(values).values()]
    return f"ranks {' / '.join(groups)}"


def _cells(row: Variable) -> tuple[str, ...]:
    held = f" of {size(row.of_nbytes)}" if row.of_nbytes else ""
    texts = (row.name, row.type, row.shape, row.dtype, row.device)
    return (*map(_short, texts), f"{size(row.nbytes)}{held}" if row.nbytes else "", row.ranks)


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _total(memory: Mapping[str, int]) -> str:
    words = [f"tensors of these variables {size(memory['variables'])} (each storage once)"]
    if memory["gradients"]:
        words.append(f"their gradients {size(memory['gradients'])}")
    if "other" in memory:
        words.append(f"other memory of torch on the GPU {size(memory['other'])}, and {size(memory['cached'])} cached")
    return ", ".join(words)
