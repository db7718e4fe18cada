"""A program of a table, with a random place for its fault."""

from __future__ import annotations

import importlib.util
import random
import re
import string
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

# Advice that was once given from the symptom alone. A program that deserves it names it in its cause.
FALSE_ADVICE = ("Join", "wrap the model")

# Names that each program finds. `batch` returns other data on each rank and in each step.
PRELUDE = """
import contextlib, copy, gc, os, tempfile, threading, time
import torch.nn as nn, torch.nn.functional as F
import torch.distributed.checkpoint as dcp
from concurrent.futures import ThreadPoolExecutor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module)
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
def batch(step, size=8):
    draw = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(size, 4, generator=draw), torch.randn(size, 2, generator=draw)
def dataset(size=32):
    draw = torch.Generator().manual_seed(7)
    return TensorDataset(torch.randn(size, 4, generator=draw), torch.randn(size, 2, generator=draw))
def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)
"""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program.

    Args:
        name: short description, unique in its table.
        source: address of the public report or documentation on which the program is based.
        code: cell for all ranks. `$rank`, `$other`, `$step`, `$layer`, `$part` and the keys of `draws` are replaced.
        cause: patterns of the right cause; one of them must match. Patterns have the same replacements.
        wrong: patterns of wrong causes; none may match.
        draws: other places for the fault: a key, and the values to choose from.
        world_size: number of ranks.
        timeout_s: seconds after which the cell is stopped.
    """

    name: str
    source: str
    code: str
    cause: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()
    draws: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    world_size: int = 2
    timeout_s: float = 10.0

    def drawn(self, seed: int) -> Program:
        """Return the program with a random place for its fault. The seed and the name determine the place."""
        draw = random.Random(f"{seed} {self.name}")
        rank = draw.randrange(2)
        values = {"rank": str(rank), "other": str(1 - rank), "step": str(draw.randint(1, 3))}
        values |= {"layer": draw.choice(("0", "2")), "part": draw.choice(("weight", "bias"))}
        own = {key: draw.choice(choices) for key, choices in self.draws.items()}

        def put(text: str) -> str:
            return string.Template(string.Template(text).safe_substitute(own)).safe_substitute(values)

        return replace(self, code=put(self.code), cause=tuple(map(put, self.cause)), wrong=tuple(map(put, self.wrong)))


def read(table: str) -> list[Program]:
    """Read a table. Its sections are programs: lines of facts, and a code block."""
    text = (Path(__file__).parent / f"{table}.md").read_text()
    programs = []
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        name, _, rest = section.partition("\n")
        if rest.count("\n```") != 2:
            raise ValueError(f"{table}.md, {name!r}: a program is one block of code, between two lines of ```")
        facts, _, code = rest.partition("```python\n")
        lines = re.findall(r"^- ([$\w ]+): (.*)$", facts, flags=re.MULTILINE)
        programs.append(
            Program(
                name=name.strip(),
                source="".join(value.strip("<>") for key, value in lines if key == "based on"),
                code=code.partition("\n```")[0],
                cause=tuple(value[1:-1] for key, value in lines if key == "cause"),
                wrong=tuple(value[1:-1] for key, value in lines if key == "false"),
                world_size=next((int(value) for key, value in lines if key == "ranks"), 2),
                draws={key[1:]: tuple(re.findall("`([^`]*)`", value)) for key, value in lines if key[0] == "$"},
            )
        )
    return programs


_LIBRARIES = {
    "accelerate": "https://github.com/huggingface/accelerate",
    "lightning": "https://github.com/Lightning-AI/pytorch-lightning",
    "torchmetrics": "https://github.com/Lightning-AI/torchmetrics",
    "transformers": "https://github.com/huggingface/transformers",
    "torch": "https://github.com/pytorch/pytorch",
}


def of_libraries() -> list[Program]:
    """Return the programs of `tests/libraries` whose library is installed."""
    folder, programs = Path(__file__).parents[1] / "libraries" / "programs", []
    for path in sorted(folder.glob("*.py")):
        library = path.stem.removeprefix("with_") if path.stem.startswith("with_") else "torch"
        if importlib.util.find_spec(library) is not None:
            start = "import os; os.environ.update({'HF_HUB_OFFLINE': '1', 'TOKENIZERS_PARALLELISM': 'false'})\n"
            programs.append(
                Program(
                    name=f"tests/libraries/programs/{path.name}",
                    source=_LIBRARIES[library],
                    code=start + path.read_text(),
                    world_size=4,
                    timeout_s=120.0,
                )
            )
    return programs
