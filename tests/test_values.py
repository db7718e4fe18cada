"""Values between the notebook process and its ranks."""

from __future__ import annotations

import io
import os
import signal
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from ddp_notebook.errors import DDPNotebookError, UsageError
from ddp_notebook.messages.ranks import Pull, Pulled
from ddp_notebook.rank.variables.values import describe
from ddp_notebook.run.values.values_by_rank import RankValues
from ddp_notebook.wire import bulk, shared_memory
from ddp_notebook.wire.buffers import join
from ddp_notebook.wire.bulk import pickled, unpickled
from tests.conftest import wait_until

LARGE = "torch.arange(30_000.0)"  # does not fit into a message


# ---- what is said about a value


@pytest.mark.parametrize(
    ("value", "line"),
    [
        (torch.arange(6.0).reshape(2, 3), "tensor float32 (2, 3) on cpu: min 0 mean 2.5 max 5"),
        (torch.tensor(1.5), "tensor float32 () on cpu: 1.5"),
        (torch.zeros(0, 3), "tensor float32 (0, 3) on cpu: empty"),
        (torch.tensor([1.0, float("nan"), 3.0]), "tensor float32 (3,) on cpu: min 1 mean 2 max 3, 1 NaN"),
        (torch.full((4,), float("nan")), "tensor float32 (4,) on cpu: all 4 NaN"),
        (torch.ones(3, dtype=torch.bfloat16), "tensor bfloat16 (3,) on cpu: min 1 mean 1 max 1"),
        (torch.tensor([1, 2]), "tensor int64 (2,) on cpu: min 1 mean 1.5 max 2"),
        (torch.tensor([True, False]), "tensor bool (2,) on cpu: min 0 mean 0.5 max 1"),
        (torch.ones(2).to(torch.float8_e4m3fn), "tensor float8_e4m3fn (2,) on cpu: min 1 mean 1 max 1"),
        (torch.zeros(2, dtype=torch.complex64), "tensor complex64 (2,) on cpu"),
        (torch.zeros(2, device="meta"), "tensor float32 (2,) on meta"),
        (torch.nn.Parameter(torch.ones(2)), "parameter float32 (2,) on cpu: min 1 mean 1 max 1"),
        (np.arange(3), "array int64 (3,): min 0 mean 1 max 2"),
        (np.array(["a"]), "array <U1 (1,)"),
        (3, "3"),
        ({"w": torch.zeros(2)}, "{'w': tensor float32 (2,) on cpu}"),
        ([np.zeros(2)], "[array float64 (2,)]"),
        (torch.nn.Linear(1, 1), "Linear(in_features=1, out_features=1, bias=True)"),
        (object(), "<object object>"),
        ("a\nb", r"'a\nb'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_value_in_one_line(value, line):
    assert describe(value) == line


def test_the_line_of_a_long_value_is_short():
    assert len(describe(list(range(100_000)))) < 100
    assert len(describe("x" * 100_000)) < 100
    assert "bytes object" in describe(type("bytes", (), {})())
    raw = bytes(200_000_000)
    began_s = time.thread_time()
    assert describe(raw) == describe(bytes(1000)) and len(describe([raw, {1: bytearray(100)}])) < 200
    assert time.thread_time() - began_s < 0.1, "four characters were made of each byte"


def test_equal_lines_are_folded():
    values = RankValues({2: 0, 0: 7, 1: 0}, {0: "seven", 1: "zero", 2: "zero"})
    assert repr(values) == "[0] seven\n[1-2] zero"
    assert repr(RankValues({0: "a\nb", 1: "a\nb"})) == r"[0-1] 'a\nb'"
    assert repr(RankValues({})) == "<RankValues of no rank>"


def test_it_is_a_mapping():
    values = RankValues({1: "b", 0: "a"})
    assert values == {0: "a", 1: "b"} and {0: "a", 1: "b"} == values  # noqa: SIM300
    assert values != {0: "a"}
    assert list(values) == [0, 1] and len(values) == 2 and list(values.values()) == ["a", "b"]
    with pytest.raises(KeyError):
        values[2]


# ---- plots


def test_scalars_are_bars():
    figure = RankValues({0: 1, 3: torch.tensor(-2.0)}).plot()
    (axes,) = figure.axes
    heights = [bar.get_height() for bar in axes.patches]  # type: ignore[attr-defined]  # they are Rectangles
    assert heights == [1.0, -2.0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "3"]


def test_vectors_are_lines():
    figure = RankValues({0: torch.ones(3, dtype=torch.bfloat16), 1: np.arange(4)}).plot()
    (axes,) = figure.axes
    assert [np.asarray(line.get_ydata()).tolist() for line in axes.lines] == [[1, 1, 1], [0, 1, 2, 3]]
    assert axes.get_legend_handles_labels()[1] == ["rank 0", "rank 1"]


@pytest.mark.slow
def test_matrices_are_maps_on_one_scale():
    figure = RankValues({0: torch.full((2, 3), -4.0), 1: torch.tensor([[1.0, float("nan")]])}).plot()
    assert isinstance(figure, Figure)
    images = [image for axes in figure.axes[:2] for image in axes.images]
    assert [axes.get_title() for axes in figure.axes[:2]] == ["rank 0", "rank 1"]
    assert [image.get_clim() for image in images] == [(-4.0, 4.0)] * 2
    figure.savefig(io.BytesIO())


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "nothing to plot"),
        ({0: "word"}, "rank 0: values .* got 'word' \\(str\\)"),
        ({0: torch.zeros(1, dtype=torch.complex64)}, "rank 0: values .* got tensor.* \\(Tensor\\)"),
        ({0: torch.zeros(2, 2, 2)}, "values in a plot must be 0-D to 2-D, got 3-D"),
        ({0: 1, 1: [1, 2], 2: 3}, r"must have the same number of dimensions, got 0-D on \[0,2\], 1-D on \[1\]"),
    ],
)
def test_what_cannot_be_plotted(values, words):
    with pytest.raises(UsageError, match=words):
        RankValues(values).plot()


# ---- bytes


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3),
        torch.arange(6.0).reshape(2, 3).T,
        torch.tensor(3),
        torch.zeros(0, 2),
        torch.ones(3, dtype=torch.bfloat16),
        torch.eye(3).to_sparse(),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(2, requires_grad=True) * 2,
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(1).expand(5),
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.ones(4, 3, dtype=torch.bfloat16)[::2, 1:],
        torch.ones(3).to(torch.float8_e5m2),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch 2.11 warns once, at the first sparse tensor
def test_a_tensor_survives(tensor):
    came = unpickled(bytearray(b"".join(join(pickled(tensor)))))
    assert type(came) is type(tensor) and came.dtype == tensor.dtype and came.shape == tensor.shape
    assert came.requires_grad == tensor.requires_grad
    assert came.to_dense().tolist() == tensor.to_dense().tolist()
    came.detach().zero_() if not came.is_sparse else None  # a received tensor is writable


def test_of_a_view_only_its_part_is_sent():
    assert sum(map(len, join(pickled(torch.zeros(1_000_000)[:10])))) < 1000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool])
def test_the_memory_of_a_tensor_is_not_copied(dtype):
    tensor = torch.zeros(1000, 10, dtype=dtype)
    address = np.frombuffer(pickled({"x": tensor})[1][0], np.uint8).ctypes.data
    assert address == tensor.data_ptr()
    data = bytearray(b"".join(join(pickled({"x": tensor}))))
    start = np.frombuffer(data, np.uint8).ctypes.data
    assert start <= unpickled(data)["x"].data_ptr() < start + len(data)


def test_large_text_and_bytes_and_read_only_arrays_survive():
    fixed = np.arange(3)
    fixed.flags.writeable = False
    value = {"text": "é" * 100_000, "bytes": bytes(300_000), "array": bytearray(b"x" * 100_000), "fixed": fixed}
    came = unpickled(bytearray(b"".join(join(pickled(value)))))
    assert came.pop("fixed").tolist() == [0, 1, 2]
    assert came == {name: one for name, one in value.items() if name != "fixed"}


def test_a_value_is_weighed_without_being_copied():
    class Holder:
        def __init__(self, inside) -> None:
            self.inside = inside

    tensor = torch.zeros(1, 1).expand(1000, 1_000_000)  # 4 GB without memory
    assert 8e9 < bulk.weigh([Holder(tensor), np.broadcast_to(np.float32(0), (1000, 1_000_000))]) < 8.001e9
    assert bulk.weigh([tensor, tensor]) < 4.001e9, "it would be sent once"
    assert 1000 < bulk.weigh(b"x" * 1000) < 1100
    with pytest.raises(TypeError, match="lock"):
        bulk.weigh(np.array([threading.Lock()]))


# ---- pull


@pytest.mark.long
def test_pull_gives_a_mapping_that_tells_of_the_rank(session):
    session.run("x = torch.full((2,), float(rank))\nsame = 'one'")
    x = session.pull("x")
    assert isinstance(x, RankValues)
    assert (
        repr(x)
        == "[0] tensor float32 (2,) on cpu: min 0 mean 0 max 0\n[1] tensor float32 (2,) on cpu: min 1 mean 1 max 1"
    )
    assert repr(session["same"]) == "[0-1] 'one'"
    x[0].add_(1)
    assert session["x"][0].tolist() == [0.0, 0.0], "it is a copy"


def test_pull_from_some(session):
    session.run("if rank == 1: only = 5")
    assert session.pull("only", ranks="-1") == {1: 5}
    with pytest.raises(DDPNotebookError, match=r"^rank 0: undefined variable 'only'$"):
        session["only"]
    with pytest.raises(UsageError, match="rank 7 does not exist"):
        session.pull("only", ranks=7)


@pytest.mark.parametrize("name", ["a.b", "", "for", 0])
def test_no_name_of_a_variable(session, name):
    with pytest.raises(UsageError, match="the name of a variable must be"):
        session[name]
    with pytest.raises(UsageError, match="the name of a variable must be"):
        session[name] = 1


def test_push_requires_names_and_a_timeout_must_be_a_number(session):
    with pytest.raises(UsageError, match=r"^push needs names and values, push\(x=1\) or push\({'x': 1}\), got 1$"):
        session.push(1)
    with pytest.raises(UsageError, match=r"^timeout must be a number of seconds, e.g. timeout=60, got '5'"):
        session.run("1", timeout_s="5")


def test_what_the_notebook_cannot_unpickle_is_named(session):
    session.run(
        "import sys, types\nmodule = sys.modules['only_there'] = types.ModuleType('only_there')\n"
        "exec('class Odd: pass', module.__dict__)\nodd = module.Odd()"
    )
    words = "^rank 0: 'odd', <only_there.Odd object>, cannot be unpickled here: ModuleNotFoundError: .*'only_there'"
    with pytest.raises(DDPNotebookError, match=words):
        session["odd"]


def test_what_is_above_the_limit_is_pulled_on_demand(session):
    session.run("from ddp_notebook.wire import bulk; bulk.MOST_BYTES = 1_000_000\nbig = [torch.zeros(500_000)]")
    try:
        words = r"ranks 0-1: 'big' \(list\) has \d\.\d MB, more than 1\.0 MB: .*--force"
        with pytest.raises(DDPNotebookError, match=words):
            session.pull("big")
        assert session.pull("big", force=True)[1][0].shape == (500_000,)
    finally:
        session.run("bulk.MOST_BYTES = 10**9")


# ---- push


def test_push_small_and_large(session):
    large = torch.arange(1_000_000.0)
    session.push(small={"a": [1, 2]}, large=large)
    result = session.run("small['a'], large.shape, float(large.sum()) == float(torch.arange(1_000_000.0).sum())")
    assert [result[rank].result for rank in (0, 1)] == ["([1, 2], torch.Size([1000000]), True)"] * 2
    session.run("large.add_(1)")
    assert float(large[0]) == 0.0
    assert session.pull("large")[1][0] == 1


def test_push_to_some_and_by_a_mapping(session):
    session["y"] = 0
    session.push({"y": 1, "ranks": [1]}, ranks=1)
    assert session["y"] == {0: 0, 1: 1}
    assert session.pull("ranks", ranks=1) == {1: [1]}


@pytest.mark.parametrize("make", ["torch.tensor([rank])", LARGE + " + rank"])
def test_each_rank_gets_its_own(session, make):
    session.run(f"mine = {make}")
    session["back"] = RankValues({rank: value + 10 for rank, value in session["mine"].items()})
    session.run("right = torch.equal(back, mine + 10)")
    assert session["right"] == {0: True, 1: True}


def test_a_rank_that_has_no_value_is_named(session):
    with pytest.raises(UsageError, match="'z' has values for rank 0, but none for rank 1"):
        session["z"] = RankValues({0: 1})
    session.push(z=RankValues({0: 1}), ranks=0)
    assert session.pull("z", ranks=0) == {0: 1}


def test_a_function_and_a_class_travel_by_value_both_ways(session):
    session.run("class Box:\n    def __init__(self, x): self.x = x\ndef box(x): return Box(2 * x)")
    box = session["box"][0]
    session["box_again"] = box
    session.run("unboxed = box_again(4).x")
    assert box(3).x == 6 and session["unboxed"] == {0: 8, 1: 8}


def test_what_cannot_be_pushed_is_named(session, monkeypatch):
    lock = threading.Lock()
    with pytest.raises(DDPNotebookError, match=r"^'a' \(lock\) cannot be pickled: cannot pickle"):
        session.push(a=lock)
    with pytest.raises(DDPNotebookError, match=r"^rank 1: 'a' \(lock\) cannot be pickled"):
        session["a"] = RankValues({0: 1, 1: lock})
    monkeypatch.setattr(bulk, "MOST_BYTES", 1_000_000)
    with pytest.raises(UsageError, match=r"'c': 2\.0 GB are more than 1\.0 MB: send it with --force") as error:
        session["c"] = torch.zeros(1).expand(500_000_000)
    assert "rank" not in str(error.value)


def test_what_a_rank_cannot_unpickle_is_named(session):
    with pytest.raises(DDPNotebookError, match=r"^ranks 0-1: 'd' could not be set: ZeroDivisionError"):
        session["d"] = _Fails()


class _Fails:
    def __reduce__(self):
        return divmod, (1, 0)


# ---- shared memory

ON_RANK = """
from ddp_notebook.rank.engine import RankEngine
from ddp_notebook.wire import shared_memory
import os, resource
"""


@contextmanager
def counted(monkeypatch):
    """Record the transfers over the network: `fetch` and `put`."""
    moves: list[str] = []
    with monkeypatch.context() as patch:
        for what in ("fetch", "put"):
            move = getattr(bulk.BulkFetcher, what)

            def counting(*args, move=move, what=what):
                moves.append(what)
                return move(*args)

            patch.setattr(bulk.BulkFetcher, what, counting)
        yield moves


def test_large_values_use_shared_memory_both_ways(session, monkeypatch):
    session.run(f"{ON_RANK}there = {LARGE}.to(torch.bfloat16) + rank")
    with counted(monkeypatch) as moves:
        there = session.pull("there")
        session.push(again=there, one=torch.ones(100_000))
    assert moves == []
    assert session.run("torch.equal(again, there), float(one.sum())")[1].result == "(True, 100000.0)"
    wait_until(lambda: held(session) == ["0", "0"], what="the ranks forget it")
    there[0].zero_()
    session.run("one[0] = rank + 5")
    assert [int(value[0]) for value in session["one"].values()] == [5, 6], "each rank has its own"


@pytest.mark.parametrize("where", ["the notebook", "a rank", "a rank with a limit"])
def test_without_shared_memory_values_go_over_the_wire(session, monkeypatch, where):
    session.run(f"{ON_RANK}there = {LARGE} + rank\nlimit = resource.getrlimit(resource.RLIMIT_FSIZE)")
    if where == "the notebook":
        monkeypatch.setattr(shared_memory, "IS_POSSIBLE", False)
    elif where == "a rank":
        session.run("shared_memory.IS_POSSIBLE = False", ranks=1)
    else:
        session.run("resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))", ranks=1)
    try:
        with counted(monkeypatch) as moves:
            there = session.pull("there")
            session.push(again=there)
        # The limit applies to files that a rank writes, so the rank still opens files of the notebook process.
        expected = {"the notebook": ["fetch"] * 2 + ["put"] * 2, "a rank": ["fetch", "put"]}.get(where, ["fetch"])
        assert moves == expected
        assert session.run("torch.equal(again, there)")[1].result == "True"
        assert session.pull("there", safe=True)[1][0] == 1
    finally:
        session.run("shared_memory.IS_POSSIBLE = True; resource.setrlimit(resource.RLIMIT_FSIZE, limit)")
    wait_until(lambda: held(session) == ["0", "0"], what="the ranks forget it")


# ---- without pickle


def test_safe_values_arrive_and_others_are_named(session):
    session.run(
        f"from dataclasses import dataclass\n@dataclass\nclass Point: x: int\nodd = {{'p': [Point(1)]}}\n"
        f"fine = {{'w': {LARGE}.to(torch.bfloat16), 'n': [1, None, 'a'], 2: torch.tensor(rank)}}"
    )
    came = session.pull("fine", safe=True)
    assert (came[1]["n"], int(came[1][2]), came[0]["w"].dtype) == ([1, None, "a"], 1, torch.bfloat16)
    words = r"^ranks 0-1: 'odd' \(dict\) cannot be sent safely: odd\['p'\]\[0\] is a Point; send dataclasses"
    with pytest.raises(DDPNotebookError, match=words):
        session.pull("odd", safe=True)
    assert session["odd"][0]["p"][0].x == 1


HOSTILE = """
from ddp_notebook.wire import bulk
from ddp_notebook.wire import shared_memory
from ddp_notebook.wire.buffers import join
import pickle, os
from dataclasses import replace
class Bomb:
    def __reduce__(self): return os.mkdir, (folder,)
def forged(answer): return answer
def hostile(request, *_):
    from ddp_notebook.messages.ranks import Pulled
    agent.send(forge(Pulled(request=request, about="it\x1b[2J", data=b"", nbytes=10)))
agent = RankEngine.instance()._rank.agent
RankEngine.instance()._rank._answer, honest = hostile, RankEngine.instance()._rank._answer
"""
FORGERIES = {
    "a pickle": "replace(a, data=pickle.dumps(Bomb()))",
    "a pickle in parts": "replace(a, data=b''.join(join([[pickle.dumps(Bomb())]])))",
    "nothing": "a",
    "half of it": "replace(a, data=b''.join(join([[b'[1]'], [bytes(1000)]]))[:500])",
    "a size below zero": "replace(a, nbytes=-5, transfer=1)",
    "a size that is text": "replace(a, nbytes='10', transfer=1)",
    "a terabyte": "replace(a, nbytes=10**12, transfer=agent.bulk.hold(bytes(10)))",
    "a part of another size": "replace(a, nbytes=70_000, transfer=agent.bulk.hold(bytes(90_000)))",
    "a short transfer": "replace(a, nbytes=90_000, transfer=agent.bulk.hold(bytes(70_000)))",
    "a text as a transfer": "replace(a, transfer='1')",
    "memory of another name": "replace(a, nbytes=10, transfer=agent.bulk.hold(bytes(10)), memory=[1, 2, 'x'])",
    "memory that is no list": "replace(a, memory='/etc/passwd')",
    "another answer": "__import__('ddp_notebook.messages.ranks').messages.ranks.Pushed(request=a.request)",
    "an error that is a number": "replace(a, error=5)",
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_reply_of_a_rank_only_causes_an_error(session, tmp_path, forgery):
    folder = tmp_path / "made"
    session.run(
        f"{ON_RANK}folder = {str(folder)!r}\nfine = 1\n{HOSTILE}\nforge = lambda a: {FORGERIES[forgery]}", ranks=1
    )
    try:
        with pytest.raises(DDPNotebookError, match="rank 1"):
            session.pull("fine", safe=True)
        assert not folder.exists()
    finally:
        session.run("RankEngine.instance()._rank._answer = honest", ranks=1)
    assert session.pull("rank", safe=True) == {0: 0, 1: 1}


def test_a_rank_does_not_answer_for_another(session):
    session.run(f"{ON_RANK}fine = rank")
    session.run(
        "from ddp_notebook.messages.ranks import Pulled\nagent = RankEngine.instance()._rank.agent\n"
        "for n in range(1, 3000): agent.send(Pulled(request=n, error='forged'))",
        ranks=1,
    )
    assert session.pull("fine", 0) == {0: 0}
    questions = session._parts.exchange._questions
    future = questions.ask(0, lambda n: Pull(request=n, name="fine"))
    questions.on_answer(1, Pulled(request=max(questions._open), error="forged"))
    assert not questions.wait_for(0, future).error


# ---- interrupts


@contextmanager
def interrupted_in(monkeypatch, what: str):
    """Interrupt a transfer at its start."""
    move = getattr(bulk.BulkFetcher, what)

    def pressed(self, *args, **kwargs):
        os.kill(os.getpid(), signal.SIGINT)
        return move(self, *args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(bulk.BulkFetcher, what, pressed)
        yield


def held(session) -> list[str | None]:
    result = session.run("bulk_ = RankEngine.instance()._rank.agent.bulk; len(bulk_._held) + len(bulk_._put)")
    return [result[rank].result for rank in (0, 1)]


@pytest.mark.parametrize("what", ["fetch", "put"])
def test_an_interrupted_transfer_leaves_nothing(session, monkeypatch, what):
    monkeypatch.setattr(
        shared_memory, "IS_POSSIBLE", False
    )  # otherwise values take the shared memory, and not a transfer
    session.run("from ddp_notebook.rank.engine import RankEngine\nlarge = torch.zeros(5_000_000)")
    with interrupted_in(monkeypatch, what):
        if what == "fetch":
            session.pull("large")
        else:
            session["large"] = torch.ones(5_000_000)
    wait_until(lambda: held(session) == ["0", "0"], what="the ranks forget it")
    assert session.run("float(large.sum())")[0].result == "0.0"
    session["large"] = torch.ones(500_000)
    assert session["large"][1].sum() == 500_000


def test_an_answer_that_comes_after_the_interrupt_is_dropped(session):
    """The ranks pickle the value after the caller has stopped waiting."""
    session.run(
        "from ddp_notebook.rank.engine import RankEngine\nimport time\nclass Slow:\n"
        "    def __getstate__(self): time.sleep(0.5); return {'x': torch.zeros(1_000_000)}\nslow = Slow()"
    )
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        session.pull("slow")
    timer.join()
    wait_until(lambda: held(session) == ["0", "0"], what="the ranks forget it")


def test_a_cell_that_pulls_in_a_thread(session):
    session["t"] = torch.zeros(100_000)
    came = []
    thread = threading.Thread(target=lambda: came.append(session["t"]))
    thread.start()
    thread.join(10)
    assert came[0][1].shape == (100_000,)


# ---- magics


@pytest.fixture(scope="module")
def ranks(kernel):
    """Start two ranks in a kernel, each with a tensor `x`."""
    reply = kernel.run("%ddp_start 2", timeout_s=120)
    assert reply.status == "ok", reply.traceback
    kernel.run("%%on_all_ranks\nx = torch.arange(3.0) + rank")
    yield kernel
    kernel.run("%ddp_stop")


@pytest.mark.long
def test_pull_in_a_notebook(ranks):
    line = "tensor float32 (3,) on cpu: min {} mean {} max {}\n"
    ranks.run("import torch")  # a pull that imports torch first takes seconds and shows its progress
    reply = ranks.run("%ddp_pull x")
    assert reply.stdout == "[0] " + line.format(0, 1, 2) + "[1] " + line.format(1, 2, 3), reply
    assert reply.displays == []
    assert ranks.run("x[1].tolist()").displays[0]["text/plain"] == "[1.0, 2.0, 3.0]"
    assert ranks.run("%ddp_pull x --ranks -1 --as y").stdout == "[1] " + line.format(1, 2, 3)
    assert ranks.run("list(y)").displays[0]["text/plain"] == "[1]"
    assert ranks.run("%ddp_pull nope").evalue == "ranks 0-1: undefined variable 'nope'"
    reply = ranks.run("x = 'of the notebook'\n%ddp_pull x y --ranks 1")  # the ranks have no y yet
    assert reply.stdout == "" and reply.evalue == "rank 1: undefined variable 'y'"
    assert ranks.run("print(x)").stdout == "of the notebook\n"
    ranks.run("%%on_all_ranks\ny = rank")
    assert ranks.run("%ddp_pull x y --ranks 1").stdout == "x:\n[1] " + line.format(1, 2, 3) + "y:\n[1] 1\n"
    assert ranks.run("dict(x), dict(y)").displays[0]["text/plain"] == "({1: tensor([1., 2., 3.])}, {1: 1})"
    assert "--as takes one variable, got 2" in ranks.run("%ddp_pull x y --as z").evalue
    assert ranks.run("%ddp_pull x --safe").stdout == "[0] " + line.format(0, 1, 2) + "[1] " + line.format(1, 2, 3)
    assert "'torch' (module) cannot be sent safely: torch is a module; " in ranks.run("%ddp_pull torch --safe").evalue
    assert "usage: %ddp_pull NAME ... [--ranks 0,2-3]" in ranks.run("%ddp_pull").evalue
    assert "such as 'x', got 'a-b'" in ranks.run("%ddp_pull x --as a-b").evalue


def test_push_in_a_notebook(ranks):
    ranks.run("a, b = 1, [2]\ndef plus(x): return x + a\nclass Point: pass\np = Point()")
    reply = ranks.run("%ddp_push a b plus p --ranks 0-1")
    assert (reply.status, reply.stdout, reply.displays) == ("ok", "", []), reply
    assert ranks.run("%%on_all_ranks\nplus(b[0]), type(p).__name__").stdout == "[0-1] (3, 'Point')\n"
    assert ranks.run("%ddp_push a --ranks 5").ename == "UsageError"
    reply = ranks.run("%ddp_push nope")
    assert (reply.ename, reply.evalue[:35]) == ("UsageError", "the notebook has no variable 'nope'")


@pytest.mark.long
def test_values_that_were_pulled_go_back_to_their_ranks(ranks):
    ranks.run("%ddp_pull x --as back")
    ranks.run("%ddp_push back")
    assert ranks.run("%%on_all_ranks\nassert torch.equal(back, x)").status == "ok"


def test_a_plot_is_shown_once(ranks):
    reply = ranks.run("import ddp_notebook\nddp_notebook.current()['x'].plot()")
    assert ["image/png" in data for data in reply.displays] == [True], reply
