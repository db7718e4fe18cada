"""What to do about errors on ranks whose own words do not say it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

_UNDEFINED = re.compile(r"^NameError: name '(\w+)' is not defined")
_ADVICE = (  # torch's words, and what to do
    (
        re.compile(r"not compiled with CUDA|no NVIDIA driver|No CUDA GPUs are available|_cuda_setDevice"),
        "These ranks have no GPU: write `device` where it says cuda, `.to(device)` for `.cuda()`, and no set_device. "
        "`device` is each rank's own GPU where there is one.",
    ),
    (
        re.compile(r"device_ids .*type='cpu'"),
        "The model is on the CPU: leave device_ids out, or move it with .to(device) where that is a GPU.",
    ),
    (
        re.compile(r"Default process group has not been initialized"),
        "It was destroyed on these ranks: dist.init_process_group() on all of them forms it again.",
    ),
)


def advice(errors: Iterable[str], names_here: Collection[str]) -> str:
    """What to do about the errors of a cell; "": they say it themselves, or nothing is known.

    Args:
        errors: `"NameError: name 'x' is not defined"`.
        names_here: the variables that the notebook has.

    Example:
        >>> advice(["NameError: name 'x' is not defined"], {"x": 1})
        "The notebook has 'x': %ddp_push x sends it to the ranks."
    """
    errors = list(errors)
    known = [text for words, text in _ADVICE if any(words.search(error) for error in errors)]
    names = sorted({found[1] for error in errors if (found := _UNDEFINED.match(error))} & set(names_here))
    if names:
        known.append(
            f"The notebook has {' and '.join(map(repr, names))}: %ddp_push {' '.join(names)} sends it to the ranks."
        )
    return "\n".join(known)
