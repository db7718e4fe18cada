"""The module, or other place, that made the first bad value of a repeated forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from ddp_notebook.records.words import bad_elements as counts
from ddp_notebook.stdlib import re, threading

_MOST_NODES = 200_000
_WRAPPERS = re.compile(r"\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(\.|$)")
_MOST_SAMPLES = 8
NEVER = 1 << 23  # more than the values that are checked; exact in float32
_BACKWARD_FROM = 1 << 22


class Origin(NamedTuple):
    """The place that made a bad value.

    Args:
        place: "input", "parameters", "forward", "loss", "backward" or "" if it is not known.
        name: name of the module, or of the parameters; "" for the model itself.
        kind: class of the module.
        details: words about the values, or why the place is not known.
        order: number of values that were checked before the first bad one, in a forward and its backward.
    """

    place: str
    name: str = ""
    kind: str = ""
    details: str = ""
    order: int = NEVER


def clean_name(name: str) -> str:
    """Return the name of a module or parameter without the names of wrappers.

    Example:
        >>> clean_name("layers.0._fsdp_wrapped_module.up._orig_mod")
        'layers.0.up'
    """
    return _WRAPPERS.sub("", name).rstrip(".")


def kind_of(module: torch.nn.Module) -> str:
    """Return the name of the class of a module, which `fully_shard` replaces by a derived one."""
    kinds = [kind.__name__ for kind in type(module).__mro__]
    return kinds[0].removeprefix("FSDP") if "FSDPModule" in kinds else kinds[0]


def is_bad(tensor: torch.Tensor, *, nans_only: bool) -> bool:
    """Return whether a tensor has NaN, or with `nans_only=False` NaN or infinite values."""
    if tensor.is_meta or not (tensor.is_floating_point() or tensor.is_complex()) or tensor.layout is not torch.strided:
        return False
    found = tensor.detach()
    found = found.isnan() if nans_only else ~found.isfinite()
    return bool(found.any())


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a value, with the local parts of DTensors, and without those of other classes."""
    found: list[torch.Tensor] = []
    for one in tree_leaves(value):
        plain: Any = one.to_local() if hasattr(one, "to_local") else one
        if type(plain).__name__ == "AsyncCollectiveTensor":
            plain = plain.wait()
        if type(plain) in (torch.Tensor, torch.nn.Parameter):
            found.append(plain)
    return found


def bad_input(values: Sequence[Any], *, nans_only: bool) -> str:
    """Describe the first bad tensor in the arguments of a forward; "" if there is none.

    Example:
        >>> bad_input([torch.ones(2), torch.tensor([[1.0], [torch.nan]])], nans_only=True)
        'argument 1 has 1 of 2 elements that are not finite, in sample 1 of 2'
    """
    for at, value in enumerate(values):
        for one in tensors_of(value):
            if is_bad(one, nans_only=nans_only):
                bad = ~one.detach().isfinite()
                where = ""
                if one.ndim > 1:
                    rows = bad.flatten(1).any(1).nonzero().flatten().tolist()
                    which = ", ".join(map(str, rows[:_MOST_SAMPLES])) + ", ..." * (len(rows) > _MOST_SAMPLES)
                    where = f", in sample{'s' * (len(rows) > 1)} {which} of {len(bad)}"
                return f"argument {at} has {int(bad.sum()):,} of {bad.numel():,} elements that are not finite{where}"
    return ""


def describe(tensor: torch.Tensor) -> str:
    """Return the counts of bad elements.

    Example:
        >>> describe(torch.tensor([torch.nan, 1.0, torch.inf]))
        '1 NaN and 1 infinite of 3 elements'
    """
    one = tensor.detach()
    return counts(int(one.isnan().sum()), int(one.isinf().sum()), one.numel())


class _First(NamedTuple):
    """The first values of one kind: where they were made, and the kinds of bad values that were there before."""

    origin: Origin
    given: frozenset[str]


class _Firsts:
    """The first NaN and the first infinite value of a forward or backward."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._by_kind: dict[str, _First] = {}
        self.checked = _BACKWARD_FROM if place == "backward" else 0  # number of checked values

    def add_input(self, details: str, made: frozenset[str]) -> None:
        """Add bad values in the input of the model. Infinite ones may be right, as in a mask."""
        for one in made:
            self._by_kind[one] = _First(Origin("input", details=details), frozenset())

    def add(self, name: str, kind: str, details: str, given: frozenset[str], made: frozenset[str]) -> None:
        """Add bad values that were made.

        Args:
            name, kind: name and class of the module.
            details: words about the values.
            given, made: kinds of bad values that the module got, and that it has made.
        """
        for one in made - given:
            self._by_kind.setdefault(one, _First(Origin(self._place, name, kind, details, self.checked), given))

    def origin(self, *, nans_only: bool) -> Origin | None:
        """Return the place of the first NaN, or of the first bad value; None if there was none."""
        kinds = [NAN] if nans_only else [INFINITE, NAN]
        made = [self._by_kind[one] for one in kinds if one in self._by_kind]
        if not made:
            return None
        found = next((one for one in made if one.origin.place != "input"), made[0])
        if found.origin.place == "input":
            return found.origin
        words = "what it got was finite"
        if found.given:
            words = f"what it got had {' and '.join(sorted(found.given))}"
            before = self._by_kind.get(INFINITE)
            if INFINITE in found.given and before is not None and before.origin.place == "input":
                words += f"; the input of the model had them: {before.origin.details}"
            elif INFINITE in found.given and before is not None and before.origin != found.origin:
                words += (
                    f"; the {self._place} of {title_of(before.origin)} made the first of those: {before.origin.details}"
                )
        order = min(one.origin.order for one in self._by_kind.values())
        return found.origin._replace(details=f"{found.origin.details}; {words}", order=order)


NAN, INFINITE = "NaN", "infinite values"


def title_of(origin: Origin) -> str:
    """Return the name of a module with its class.

    Example:
        >>> title_of(Origin("forward", "layers.0", "Linear")), title_of(Origin("forward", "", "Net"))
        ('layers.0 (Linear)', 'Net')
    """
    return f"{origin.name} ({origin.kind})" if origin.name and origin.kind else origin.name or origin.kind


def kinds_in(values: Any) -> frozenset[str]:
    """Return the kinds of bad values in some tensors.

    Example:
        >>> sorted(kinds_in([torch.tensor([torch.nan, 1]), torch.tensor(torch.inf)]))
        ['NaN', 'infinite values']
    """
    kinds = set()
    for one in tensors_of(values):
        if is_bad(one, nans_only=False):
            kinds |= {NAN} if is_bad(one, nans_only=True) else set()
            kinds |= {INFINITE} if bool(one.detach().isinf().any()) else set()
    return frozenset(kinds)


class ForwardSearch:
    """Finds the modules of a forward that make the first NaN and the first infinite value.

    Args:
        model: the model.
        check: called before each module; it may raise.
    """

    def __init__(self, model: torch.nn.Module, check: Callable[[], None]) -> None:
        self._names = {id(module): clean_name(name) for name, module in model.named_modules()}
        self._check = check
        self._open: list[tuple[torch.nn.Module, frozenset[str]]] = []  # modules with the kinds of their inputs
        self._firsts = _Firsts("forward")
        # First and last numbers of the autograd nodes that each module's forward has made, innermost modules first.
        self._nodes: list[tuple[int, int, torch.nn.Module]] = []
        self._thread = threading.get_ident()

    def origin(self, *, nans_only: bool) -> Origin | None:
        """Return the module that made the first NaN, or the first bad value; None if none did."""
        return self._firsts.origin(nans_only=nans_only)

    def around_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper for `torch.nn.Module.__call__`."""

        def __call__(module: torch.nn.Module, *args: Any, **named: Any) -> Any:
            if threading.get_ident() != self._thread or id(module) not in self._names:
                return original(module, *args, **named)
            self._check()
            self._firsts.checked += 1
            given = kinds_in((args, named))
            if not self._open and given:
                self._firsts.add_input(bad_input([*args, *named.values()], nans_only=False), given)
            if self._open:
                outer, its = self._open[-1]
                self._add(outer, f"in its own code before it calls {self._title(module)}", its, given)
            self._open.append((module, given))
            begin = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
            out = original(module, *args, **named)
            self._firsts.checked += 1
            self._open.pop()
            self._nodes.append((begin, torch.autograd._get_sequence_nr(), module))  # type: ignore[attr-defined]
            if made := kinds_in(out) - given:
                bad = next(one for one in tensors_of(out) if is_bad(one, nans_only=False))
                self._add(module, f"its output has {describe(bad)}", given, made)
            return out

        return __call__

    def _add(self, module: torch.nn.Module, details: str, given: frozenset[str], made: frozenset[str]) -> None:
        self._firsts.add(self._names[id(module)], kind_of(module), details, given, made)

    def _title(self, module: torch.nn.Module) -> str:
        return title_of(Origin("", self._names[id(module)], kind_of(module)))

    def module_of(self, number: int) -> tuple[str, str]:
        """Return name and class of the innermost module whose forward has made an autograd node."""
        for begin, end, module in self._nodes:
            if begin <= number < end:
                return self._names[id(module)], kind_of(module)
        return "", ""


class BackwardSearch:
    """Finds the autograd nodes that make the first NaN and the first infinite value.

    Args:
        forward: the search in the forward.
        check: called before each node; it may raise.
    """

    def __init__(self, forward: ForwardSearch, check: Callable[[], None]) -> None:
        self._forward, self._check = forward, check
        self._firsts = _Firsts("backward")

    def origin(self, *, nans_only: bool) -> Origin | None:
        """Return the module whose node made the first NaN, or the first bad value; None if none did."""
        return self._firsts.origin(nans_only=nans_only)

    def watch(self, outputs: Iterable[torch.Tensor]) -> None:
        """Register a hook at each node of the graph of these tensors."""
        seen: set[Any] = set()
        waiting = [one.grad_fn for one in outputs]
        while waiting and len(seen) < _MOST_NODES:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if not node.name().endswith("AccumulateGrad"):
                node.register_hook(self._hook(node.name(), node._sequence_nr()))
            waiting += [following for following, _ in node.next_functions]

    def _hook(self, name: str, number: int) -> Callable[[Any, Any], None]:
        def look(inputs: Any, outputs: Any) -> None:
            self._check()
            self._firsts.checked += 1
            if made := kinds_in(inputs):
                module, kind = self._forward.module_of(number)
                bad = next(one for one in tensors_of(inputs) if is_bad(one, nans_only=False))
                details = f"{name} returned a gradient with {describe(bad)}"
                self._firsts.add(module, kind, details, kinds_in(outputs), made)

        return look
