"""Write the reference page of inputs from the recorded results of every operation with every kind of tensor.

    python -m tools.docs.inputs    writes docs/reference/inputs.md

`python -m tests.inputs.matrix --write` and `python -m tests.inputs.on_ranks --write` record the results. A test
compares the page with them.
"""

from __future__ import annotations

from pathlib import Path

from tests.inputs import on_ranks
from tests.inputs.cases import KINDS, rows
from tests.inputs.matrix import Case, Outcome, recorded

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "inputs.md"
_HEAD = """# Tensors that operations accept

Gloo accepts some tensors that it does not move correctly: it reads or changes memory next to a view, or mixes up
elements. On the ranks of a session, such a call raises an error before data move. Every rank that waits for the
operation gets it. It has the shape, the strides and the fix:

```text
ValueError: all_reduce would change memory next to the tensor (shape [4], stride [2]): pass x.contiguous() and copy the
result back. Nothing was sent, and the group can be used (ranks 0-1)
```

The tables list the result of every operation with every kind of tensor, on two ranks with gloo and torch {torch}. The
kind applies to the argument in the second column, on all ranks unless the heading names one rank. `python -m
tools.docs.inputs` writes this page from recorded results, and a test repeats all of them.

| cell | meaning |
|---|---|
| works | the result is right, and no other memory changes |
| torch | torch raises an error |
| refused / wrong | ddp_notebook raises an error; torch alone computes a wrong result |
| refused / memory | ddp_notebook raises an error; torch alone changes memory outside of the tensor |
| refused / waits | ddp_notebook raises an error; torch alone waits forever |
| refused / nothing | ddp_notebook raises an error; torch alone returns without data, since a tensor has none |
| refused / torch | ddp_notebook raises an error on all ranks; torch alone raises one |
| late | ddp_notebook raises an error in `wait` of an operation with `async_op=True`, after data have moved |
| stopped / waits | the other rank ends the cell without the operation, so the waiting rank is stopped after \
`--grace`, with this reason; torch alone waits forever |
| waits | the rank waits, and a card under the cell names the operation |
| - | the operation has no such argument |

With two results, the second one holds for `async_op=True`.

These calls are not checked: those of DDP, FSDP, DTensor and functional collectives, and all calls with `--guard off`.
A comparison between ranks is not possible for an operation with `async_op=True`. Then each rank checks its own
tensors before data move, and the other ranks are stopped after `--grace`.

**NCCL** has other rules, and this table was not measured with it. `tests/gpu/test_inputs.py` runs the same pairs on
GPUs. It has not been run yet.
"""
_TABLES = {
    "Strides": (
        *("contiguous", "column", "column_1", "transposed", "transposed_1", "channels_last", "channels_last_1"),
        *("expanded", "overlapping"),
    ),
    "Shared memory": ("twice", "overlap_in_list", "in_place", "shifted"),
    "Layouts, types and devices": (
        *("sparse_coo", "sparse_coo_1", "sparse_csr", "quantised", "complex", "bool", "zero", "requires_grad"),
        *("meta", "meta_1", "conj", "conj_1", "neg", "neg_1"),
    ),
}
_ON_RANKS = {"right": "works", "error": "torch", "hang": "waits"}
_PLAIN = {"right": "works", "error": "torch", "hang": "waits"}


def page() -> str:
    """Return the text of the page."""
    assert {kind for kinds in _TABLES.values() for kind in kinds} == set(KINDS)
    plain, ranks = recorded(), recorded(on_ranks.RESULTS)
    parts = [_HEAD.format(torch=".".join(on_ranks.torch_of_results().split(".")[:2]))]
    for title, kinds in _TABLES.items():
        heads = " | ".join(KINDS[kind].title for kind in kinds)
        lines = [f"| operation | argument | {heads} |", "|---" * (len(kinds) + 2) + "|"]
        for operation, role in rows():
            cells = [_cell(operation, role, kind, plain, ranks) for kind in kinds]
            if set(cells) != {"-"}:
                lines.append(f"| `{operation}` | {role} | {' | '.join(cells)} |")
        parts.append(f"## {title}\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def _cell(operation: str, role: str, kind: str, plain: dict[str, Outcome], ranks: dict[str, Outcome]) -> str:
    names = [Case(operation, role, kind, is_async).name for is_async in (False, True)]
    results = [_result(plain[name], ranks[name].verdict) for name in names if name in ranks]
    return ", ".join(dict.fromkeys(results)) or "-"


def _result(plain: Outcome, on_ranks: str) -> str:
    alone = "nothing" if plain.words == "no data" else _PLAIN.get(plain.verdict, plain.verdict)
    return f"{on_ranks} / {alone}" if on_ranks in ("refused", "stopped") else _ON_RANKS.get(on_ranks, on_ranks)


if __name__ == "__main__":
    PAGE.write_text(page())
