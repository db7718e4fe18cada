"""Adds cause and fix to errors of torch that the catalogue contains."""

from __future__ import annotations

from ddp_notebook.rank.hooks import Feature
from ddp_notebook.rank.torch_errors import catalogue


class TorchErrors(Feature):
    """Translates errors of torch. Torch's own text stays."""

    def explain(self, error: BaseException) -> str:
        return catalogue.explain(error)


FEATURE = TorchErrors
