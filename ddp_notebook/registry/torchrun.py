"""Registry entry of a rank of a torchrun job, created from the environment variables that torchrun sets.

Source: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ddp_notebook.records.words import list_ranks
from ddp_notebook.registry.identities import Identity, identity

NAME_VARIABLE = "DDP_NOTEBOOK_NAME"  # name of the job for users
OUTPUT_VARIABLE = "DDP_NOTEBOOK_OUTPUT"  # Unix socket at which a notebook receives the pipes of its job's ranks
_NO_RUNS = ("", "none")  # run ids of jobs without a given id


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEntry:
    """Registry data of one rank of a torchrun job."""

    name: str  # name of the job: "train-3f2a"
    key: str  # the same for all ranks of the job, and unique
    script: str
    arguments: list[str]
    directory: str
    host: str
    rank: int
    world_size: int
    local_rank: int
    restarts: int  # restarts of the job after failures, so far
    most_restarts: int
    shares_store: bool  # torch's agent and all attempts of its workers share one store, which breaks restarts with gloo
    agent: Sequence[float] | None  # process id and start time of the torchrun agent that started this rank
    wire: int  # version of the messages

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> RankEntry:
        """Return the data of `to_json`.

        Raises:
            TypeError: the JSON does not match.
        """
        return cls(**given)


def place(script: str, arguments: list[str], name: str, wire: int) -> RankEntry:
    """Return the registry data of this process.

    Args:
        script: path of the script, or name of a module.
        arguments: arguments of the script.
        name: name of the job; "" to derive it from the script name.
        wire: version of the messages.
    """
    run = os.environ.get("TORCHELASTIC_RUN_ID", "")
    master = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
    key = run if run not in _NO_RUNS else f"{master} {script}"
    stem = script.rpartition(".")[2] if script and not script.endswith(".py") else Path(script).stem
    digest = hashlib.sha256(key.encode()).hexdigest()[:4]
    return RankEntry(
        name=name or os.environ.get(NAME_VARIABLE, "") or f"{stem}-{digest}",
        key=key,
        script=script,
        arguments=arguments,
        directory=os.getcwd(),
        host=socket.gethostname(),
        rank=_number("RANK", 0),
        world_size=_number("WORLD_SIZE", 1),
        local_rank=_number("LOCAL_RANK", 0),
        restarts=_number("TORCHELASTIC_RESTART_COUNT", 0),
        most_restarts=_number("TORCHELASTIC_MAX_RESTARTS", 0),
        shares_store=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        and os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1",
        agent=identity(os.getppid()) if run else None,
        wire=wire,
    )


def launcher(about: Mapping[str, Any]) -> Identity | None:
    """Return the torchrun agent that started a rank; None if there is none.

    Args:
        about: data of the rank's entry, of any version.
    """
    agent = about.get("agent")
    return None if agent is None else (int(agent[0]), float(agent[1]))


def summary(ranks: Sequence[Mapping[str, Any]]) -> str:
    """Describe a job: "train.py --lr 0.1, 2 ranks, here rank 0".

    Args:
        ranks: data of the entries of its ranks, of any version.
    """
    last = ranks[-1]
    size = int(last.get("world_size", len(ranks)))
    here = sorted({int(one.get("rank", 0)) for one in ranks})
    which = "" if len(here) == size else f", here {list_ranks(here)}"
    script = " ".join(map(str, [last.get("script", "?"), *last.get("arguments", [])]))
    return f"{script}, {size} rank{'s' * (size != 1)}{which}"


def _number(variable: str, otherwise: int) -> int:
    try:
        return int(os.environ.get(variable, otherwise))
    except ValueError:
        return otherwise
