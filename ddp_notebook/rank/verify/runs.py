"""Compute a step in one of its forms on this rank, always from the same state."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ddp_notebook.rank.group.recorder import Recorder
from ddp_notebook.rank.variables import random_states
from ddp_notebook.rank.verify import noise
from ddp_notebook.rank.verify.copies import Copies
from ddp_notebook.rank.verify.coverage import Coverage
from ddp_notebook.rank.verify.local_model import FullParameters, SyncFlags, stop_sync
from ddp_notebook.rank.verify.model_state import ModelState
from ddp_notebook.rank.verify.noise import Draws
from ddp_notebook.rank.verify.reads import names_read
from ddp_notebook.rank.verify.step import Run, Step, StepError, evaluate, one_process
from ddp_notebook.stdlib import contextlib

_SEED = 1


class _CommunicatesError(Exception):
    """The step of one process has called a collective."""


class Runs:
    """Evaluations of one step on this rank. Each begins with the saved state.

    Args:
        namespace: the user's variables.
        step: the step.
        recorder: collectives of this rank.
        state: the saved state.
        coverage: parameters by name.
        full: complete parameters of sharded models.
        copies: tensors that differ between ranks.

    Attributes:
        silenced: modules without noise in the runs `local`, `nudged` and `together`, see `noise.silence`.
        no_sync: a wrapper averages nothing, because of `no_sync`. `together` sets it.
        calls_compiled: the step calls a compiled function.
    """

    def __init__(
        self,
        namespace: MutableMapping[str, Any],
        step: Step,
        recorder: Recorder,
        state: ModelState,
        coverage: Coverage,
        full: FullParameters,
        copies: Copies,
    ) -> None:
        self._namespace = namespace
        self._step = step
        self._recorder = recorder
        self._state = state
        self._coverage = coverage
        self._full = full
        self._copies = copies
        self._entered: set[int] = set()  # ids of the DDP models whose forward was called
        self.silenced = noise.NOTHING
        self.no_sync = False
        read = names_read(f"{step.before}\n{step.loss}", namespace)
        self.calls_compiled = any(_is_compiled_function(namespace.get(one)) for one in read)
        self._is_compiled = self.calls_compiled or any(map(is_compiled, state.modules))

    @property
    def enters_ddp(self) -> bool:
        """Return whether the step has called the forward of a DDP model of `coverage`."""
        return any(id(one) in self._entered for one in self._coverage.ddp)

    def local(
        self,
        values: Mapping[str, Any],
        *,
        step: Step | None = None,
        common: bool = False,
        nudge: float = 0.0,
        silenced: int | None = None,
        alone: bool = False,
        world_size: int = 1,
        draws: Draws | None = None,
    ) -> Run:
        """Compute a step without communication of the wrappers.

        Args:
            values: the batch by name.
            step: the step; None: that of the ranks.
            common: use the parameters and buffers of rank 0.
            nudge: relative change of the parameters.
            silenced: modules without noise; None: `Runs.silenced`.
            alone: without other ranks: the step sees itself as rank 0, and cannot call collectives.
            world_size: number of ranks that a step alone sees.
            draws: watches the forward passes.

        Raises:
            StepError: the step calls a collective, although it is alone.
        """
        self._state.restore()
        coverage = self._coverage
        stop_sync(coverage)
        with torch.no_grad():
            for tensor, of_first in self._copies.common if common else self._copies.broadcast:
                tensor.copy_(of_first)
        self._full.put(common=common)
        for parameter in coverage.user_hooks().values():
            (parameter._backward_hooks or {}).clear()
        if nudge:
            self._nudge(nudge)
        silenced = self.silenced if silenced is None else silenced
        noise.silence(self._state.modules, silenced)
        before = random_states.current_checksums()
        world = self._one_process(world_size) if alone else contextlib.nullcontext()
        with world, self._eager(), _noting_forward(self._entered):
            weighs = common and not alone
            run = evaluate(step or self._step, self._namespace, coverage, values, weighs=weighs, draws=draws)
        run.drew_random = before != random_states.current_checksums()
        return run

    @contextlib.contextmanager
    def _one_process(self, world_size: int) -> Iterator[None]:
        """Let the step see itself as the first rank, and refuse its collectives."""
        before, self._recorder.instead = self._recorder.instead, refuse_collective
        try:
            with one_process(self._namespace, world_size):
                yield
        except _CommunicatesError as error:
            raise StepError(f"the loss calls {error}, which needs all ranks") from None
        finally:
            self._recorder.instead = before

    def _nudge(self, by: float) -> None:
        """Multiply each parameter by 1 + `by` or 1 - `by`, at random."""
        for name, parameter in sorted(self._coverage.parameters().items()):
            if isinstance(parameter, DTensor):
                continue  # its model takes no part in the step
            generator = torch.Generator().manual_seed(_SEED + len(name))
            with torch.no_grad():
                grows = torch.randint(0, 2, parameter.shape, generator=generator, dtype=torch.uint8)
                own = parameter.detach()
                changed = torch.where(grows.to(own.device, torch.bool), own * (1 + by), own * (1 - by))
                if self._full.has(parameter):
                    parameter.data = changed  # `put` restores it
                else:
                    parameter.copy_(changed)

    @contextlib.contextmanager
    def _eager(self) -> Iterator[None]:
        """Run compiled code eagerly: one process must not compile again for each size of a batch."""
        if self._is_compiled:
            with torch.compiler.set_stance("force_eager"):
                yield
        else:
            yield

    def together(self, values: Mapping[str, Any]) -> Run:
        """Compute the step as in training, with the communication of the wrappers.

        Args:
            values: this rank's part of the batch by name.
        """
        self._state.restore()
        noise.silence(self._state.modules, self.silenced)
        flags = SyncFlags(self._coverage)
        self.no_sync = flags.are_off
        self._state.is_in_step = True
        with _noting_forward(self._entered):
            run = evaluate(self._step, self._namespace, self._coverage, values, syncs=flags.set, is_together=True)
        self._state.is_in_step = False
        return run


def refuse_collective(kernel: Any, _: tuple[Any, ...]) -> Any:
    """Raise an error in place of a collective, which would wait for other ranks."""
    raise _CommunicatesError(kernel.spec.name)


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module was compiled."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def _is_compiled_function(value: object) -> bool:
    return isinstance(value, types.FunctionType) and hasattr(value, "_torchdynamo_orig_callable")


@contextlib.contextmanager
def _noting_forward(entered: set[int]) -> Any:
    """Add the id of each DDP model whose `forward` is called."""
    original = DistributedDataParallel._pre_forward

    def _pre_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        entered.add(id(self))
        return original(self, *args, **kwargs)

    DistributedDataParallel._pre_forward = _pre_forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        DistributedDataParallel._pre_forward = original  # type: ignore[method-assign]
