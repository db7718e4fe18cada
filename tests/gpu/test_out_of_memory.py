"""`%ddp_memory --why` after an out-of-memory error of a GPU. Not run yet: no GPU was available."""

from __future__ import annotations

import pytest

import ddp_notebook
from ddp_notebook.errors import RankError
from ddp_notebook.run.sharding.out_of_memory import QUESTION, why

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

_FILLS = """
model = torch.nn.Linear(1024, 1024, device=device)
kept = []
if rank == 0:
    while True:
        kept.append(model(torch.randn(1 << 17, 1024, device=device)))
"""


def test_a_full_gpu_is_explained():
    with ddp_notebook.start() as session:
        with pytest.raises(RankError, match="out of memory"):
            session.run(_FILLS)
        found = why(session._ask(QUESTION, "out_of_memory"), session.recording)
        session.run("del kept, model; torch.cuda.empty_cache()")
    facts = found.last[0]
    assert facts["requested"] > 0 and facts["activations"]["model"] > 1 << 29
    assert 0 <= facts["gpu"]["free"] < facts["gpu"]["total"]
    assert "The GPU has " in str(found)
