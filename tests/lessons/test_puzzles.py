"""Puzzles with a target: naive solutions miss it, good ones reach it, and wrong results are reported first."""

from __future__ import annotations

import linecache

import pytest

from ddp_notebook import api, lessons
from ddp_notebook.errors import UsageError
from ddp_notebook.lessons.questions import puzzle_ranks, puzzles, questions
from ddp_notebook.lessons.questions.answers_file import AnswersFile
from ddp_notebook.lessons.questions.catalogue import PUZZLES
from ddp_notebook.lessons.questions.measures import COLLECTIVES, SENT
from ddp_notebook.lessons.questions.puzzles import Puzzle, Target
from tests.lessons import solutions

pytestmark = pytest.mark.processes


def test_every_puzzle_has_two_solutions():
    assert sorted([*solutions.PAIRS, *solutions.LONG_PAIRS]) == sorted(PUZZLES)


# Before the tests whose session stays for the module.
@pytest.mark.long
@pytest.mark.parametrize("name", solutions.LONG_PAIRS)
def test_a_naive_solution_of_a_long_puzzle_misses_the_target(waiting_host_server, name):
    naive, good, world_size = solutions.LONG_PAIRS[name]
    waiting_host_server()
    with api.start(world_size):
        compare(name, naive, good)


@pytest.mark.parametrize("name", solutions.PAIRS)
def test_a_naive_solution_misses_the_target(session, name):
    compare(name, *solutions.PAIRS[name])


def compare(name, naive, good):
    missed, reached = lessons.check(name, naive), lessons.check(name, good)
    assert not missed and missed.reason.startswith("the result is right. "), missed
    assert reached and PUZZLES[name].why[1:] in reached.reason, reached
    assert ", target at " in missed.reason and ", target at " in reached.reason


def test_a_wrong_result_is_reported_first(session):
    def no_sum(right, seen, loss):
        return right, seen, loss

    verdict = lessons.check("01/one-call", no_sum)
    assert verdict.reason.startswith(
        "the result is wrong: rank 0 has [90.0, 100.0, 12.5] instead of [181.0, 200.0, 37.5], rank 1 has "
    )
    assert verdict.reason.endswith(
        "in the same order. (collective calls: 0, target at most 1; bytes sent: 0 B, target at most 12 B)"
    )
    assert not verdict


def test_failures_are_reported(session):
    def fails(right, seen, loss):
        return right / (seen - seen)

    verdict = lessons.check("01/one-call", fails)
    assert not verdict and "it failed: ZeroDivisionError: float division by zero" in verdict.reason
    assert "it failed: NameError: name 'my_sums' is not defined" in lessons.check("01/one-call", "my_sums").reason
    assert lessons.check("01/one-call", ...).reason == "put your answer in place of the dots"

    def unchanged(right, seen, loss):
        """Return the sums."""
        ...

    def too_short(right, seen, loss):
        return right

    assert lessons.check("01/one-call", unchanged).reason == "put your code in place of the dots"
    assert "it failed: TypeError" in lessons.check("01/one-call", too_short).reason
    with pytest.raises(UsageError, match="give a function"):
        lessons.check("01/one-call", 3)
    with pytest.raises(UsageError, match="give a function"):
        lessons.check("01/one-call", lambda right, seen, loss: 0)


def test_a_solution_may_be_on_the_ranks(session):
    session.run(
        "def on_ranks(x):\n    both = torch.tensor([x, -x])\n    dist.all_reduce(both, dist.ReduceOp.MAX)\n"
        "    return (both[0] + both[1]).item()",
        quiet=True,
    )
    assert lessons.check("02/spread", "on_ranks")


def test_an_unfinished_solution_is_not_kept(session, tmp_path, monkeypatch):
    def unfinished(right, seen, loss):
        ...  # your changes
        return right, seen, loss

    def wrong(right, seen, loss):
        return right, seen, loss

    file = AnswersFile(tmp_path / "answers.json")
    monkeypatch.setattr(questions, "answers_file", lambda: file)
    on_ranks = "class OnRanks:\n    def __init__(self, x): ...\n\ndef negative(x):\n    return -x"
    session.run(on_ranks, quiet=True)
    assert not lessons.check("01/one-call", unfinished) and not lessons.check("02/spread", "OnRanks")
    assert not lessons.check("01/one-call", wrong, keep=False)
    assert file.read() == {}
    assert not lessons.check("01/one-call", wrong) and not lessons.check("02/spread", "negative")
    assert {name: one.guesses[0].answer for name, one in file.read().items()} == {
        "01/one-call": "wrong",
        "02/spread": "negative",
    }


# Hooks of a model with 1,000 parameters, 4 kB of gradients. With two ranks an all-reduce sends as many bytes.
HOOKS = """
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel


def plain(model):
    return model


def half(model):
    model.register_comm_hook(None, fp16_compress_hook)


def half_in_cpp(model):
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)


def one_by_one(model):
    def hook(state, bucket):
        for gradient in bucket.gradients():
            dist.all_reduce(gradient)
        done = Future()
        done.set_result(bucket.buffer())
        return done

    model.register_comm_hook(None, hook)


def in_halves(model):
    def hook(state, bucket):
        part = torch.empty(500)
        dist.reduce_scatter_tensor(part, bucket.buffer())
        dist.all_gather_into_tensor(bucket.buffer(), part)
        done = Future()
        done.set_result(bucket.buffer())
        return done

    model.register_comm_hook(None, hook)
"""
SENT_BY_HOOK = {
    "plain": (1, "4.0 kB"),
    "half": (1, "2.0 kB"),
    "half_in_cpp": (1, "2.0 kB"),
    "one_by_one": (2, "4.0 kB"),
    "in_halves": (2, "4.0 kB"),
}


def test_the_bytes_of_a_communication_hook_count_once(session, monkeypatch):
    """The recording has a row for each bucket of a hook, in addition to those of the hook's collectives."""
    puzzle = Puzzle(
        setup="model = DistributedDataParallel(torch.nn.Linear(99, 10))",
        call="[solution(model), model(torch.ones(1, 99)).sum().backward()]",
        got="1.0",
        wanted="1.0",
        targets=(Target(measure=COLLECTIVES, most=2), Target(measure=SENT, most=1.0)),
        why="",
        hint="",
    )
    monkeypatch.setitem(PUZZLES, "99/hook", puzzle)
    session.run(HOOKS, quiet=True)
    for name, (calls, sent) in SENT_BY_HOOK.items():
        reason = lessons.check("99/hook", name).reason
        assert f"collective calls: {calls}, target at most 2; bytes sent: {sent}, target" in reason, (name, reason)
    assert {one.op for one in session.recording.collectives() if one.op.startswith("comm hook")} != set()


def test_memory_counts_the_part_of_a_distributed_tensor(session):
    code = """
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from ddp_notebook.lessons.questions.puzzle_ranks import TensorMemory

whole = distribute_tensor(torch.zeros(1000), init_device_mesh("cpu", (world_size,)), [Shard(0)])
with TensorMemory() as memory:
    other = whole + 1
peak = memory.peak_bytes
"""
    session.run(code, quiet=True)
    assert set(session["peak"].values()) == {2000}


def test_the_source_of_a_class_of_a_cell_is_found():
    """`inspect.getsource` finds no class of a notebook cell."""
    source = "a = 1\n\nclass Mine:\n    def run(self):\n        return 7\n\nb = 2\n"
    linecache.cache["<cell>"] = len(source), None, source.splitlines(keepends=True), "<cell>"
    names = {"__name__": "__main__"}
    exec(compile(source, "<cell>", "exec"), names)
    assert puzzles._solution(names["Mine"]).source == "class Mine:\n    def run(self):\n        return 7"


def test_memory_counts_tensors_that_live_together():
    import torch

    with puzzle_ranks.TensorMemory() as memory:
        first = torch.zeros(1000)  # 4 kB
        first.add_(1)
        first[:10].mul_(2)
        for _ in range(3):
            torch.zeros(1000)
    assert memory.peak_bytes == 8000
    with puzzle_ranks.TensorMemory() as memory:
        first.add_(1)
    assert memory.peak_bytes == 0, "tensors from before do not count"
