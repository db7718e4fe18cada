"""Variables as bytes: cloudpickle, with tensors of a GPU moved to the CPU so that the notebook needs no GPU."""

from __future__ import annotations

import io
from typing import Any

import cloudpickle
import torch


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and obj.device.type != "cpu":
            return obj.detach().cpu().requires_grad_(obj.requires_grad).__reduce_ex__(5)
        return super().reducer_override(obj)


def dumps(value: Any) -> bytes:
    """Pickle a variable. Functions and classes of a cell travel by value.

    Raises:
        TypeError, pickle.PicklingError: the value cannot be pickled.
    """
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(value)
    return buffer.getvalue()
