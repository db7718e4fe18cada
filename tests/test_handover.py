"""Values from one rank to others, by a broadcast among them."""

from __future__ import annotations

MEET = """
from ddp_notebook.rank.variables.handover import Handover
handover = Handover(dist.distributed_c10d._get_default_store(), "meeting", number=rank, size=world_size)
"""
GIVE = """
model = torch.nn.Linear(300, 200)
optimizer = torch.optim.Adam(model.parameters())
model(torch.ones(1, 300)).sum().backward()
optimizer.step()
odd = {"empty": torch.ones(0), "half": torch.ones(2, dtype=torch.bfloat16), "turned": torch.ones(3, 2).t()}
handover.give({"model": model, "optimizer": optimizer, "odd": odd})
try:
    handover.give(__import__("threading").Lock())
except TypeError:
    handover.refuse()
handover.close()
before = model.weight.sum().item()
before
"""
TAKE = """
taken = handover.result()
model, optimizer, odd = taken.values()
assert optimizer.param_groups[0]["params"][0] is model.weight and optimizer.state[model.weight]["step"] == 1
assert odd["turned"].shape == (2, 3) and odd["half"].dtype == torch.bfloat16 and odd["empty"].shape == (0,)
before = model.weight.sum().item()
model(torch.ones(1, 300)).sum().backward()
optimizer.step()  # what was taken can be written to
try:
    handover.result()
except RuntimeError as error:
    refused = str(error)
handover.close()
before
"""


def test_an_optimizer_comes_with_its_model(session):
    session.run(MEET, quiet=True)
    code = f"if rank == 0:\n{_indented(GIVE)}\nelse:\n{_indented(TAKE)}\nbefore"
    result = session.run(code, quiet=True, timeout_s=30)
    assert result[0].result == result[1].result
    assert session.pull("refused", 1)[1] == "the source rank could not send its variables"
    assert session.run("x = torch.ones(1); dist.all_reduce(x); int(x)", quiet=True, timeout_s=30)[1].result == "2"


def test_a_pickle_that_another_process_has_sent_is_not_read(session, tmp_path):
    """Rank 0 acts like a process that has taken its place in gloo, but does not know the key of the handover."""
    marker = tmp_path / "marker"
    code = f"""
from ddp_notebook.rank.variables.handover import Handover
class Planted:
    def __reduce__(self):
        return open, ({str(marker)!r}, "w")
handover = Handover(dist.distributed_c10d._get_default_store(), "forged", number=rank, size=world_size)
if rank == 0:
    handover._key = bytes(32)
    handover.give(Planted())
else:
    try:
        handover.result()
    except RuntimeError as error:
        print(error)
handover.close()
"""
    assert "did not come from this session, and was dropped" in session.run(code, timeout_s=30)[1].stdout
    assert not marker.exists()


def _indented(code: str) -> str:
    return code.replace("\n", "\n    ")
