"""Two hosts whose ranks communicate over a network: namespaces of this machine, which share its clock and files."""

from __future__ import annotations

import contextlib
import io
import os
import random
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest

import ddp_notebook
from ddp_notebook.errors import CellTimeoutError, RankDiedError, RankError, SessionBrokenError
from ddp_notebook.launch.starters.starter import Starter
from tests.conftest import is_within, wait_until
from tests.ssh import namespaces, sshd

pytestmark = pytest.mark.alone  # changes links and addresses of the machine


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    directory = tmp_path_factory.mktemp("network")
    with namespaces.hosts(directory, "a", "b") as made, pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDP_NOTEBOOK_SSH", made.command)
        yield made, sshd.python(directory)


@pytest.fixture(scope="module")
def session(network):
    _, python = network
    with ddp_notebook.start(hosts=ddp_notebook.Ssh("a:1,b:1", python=python), grace_s=0.3) as session:
        yield session


def _sum(session) -> list[str]:
    result = session.run("x = torch.ones(1); dist.all_reduce(x); print(int(x))")
    return [result[rank].stdout for rank in result.ranks]


@pytest.mark.long
def test_they_reach_each_other_by_the_address_that_ssh_has_used(session):
    result = session.run(
        "import os; print(os.environ['MASTER_ADDR'].startswith('10.79.'), os.environ['GLOO_SOCKET_IFNAME'])"
    )
    assert [result[rank].stdout for rank in (0, 1)] == ["True eth0\n"] * 2
    assert _sum(session) == ["2\n"] * 2


@pytest.mark.parametrize(
    "code",
    [
        "dist.recv(torch.ones(1), 1 - rank)",
        "dist.all_reduce(torch.ones(1)) if rank else __import__('time').sleep(60)",
        "dist.new_group([0, 1]) if rank else __import__('time').sleep(60)",
    ],
    ids=["recv", "all_reduce", "new_group"],
)
def test_a_wait_across_hosts_is_freed(session, code):
    with pytest.raises(CellTimeoutError):
        session.run(code, timeout_s=0.3)
    assert _sum(session) == ["2\n"] * 2


def test_calls_that_do_not_fit_are_told_before_data_moves(session):
    with pytest.raises(RankError, match="is not the same on all ranks"):
        session.run("dist.all_reduce(torch.ones(rank + 1))")
    assert _sum(session) == ["2\n"] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_of_either_host_is_replaced(session, rank):
    with pytest.raises(RankDiedError):
        session.run(f"import os\nif rank == {rank}: os.kill(os.getpid(), 9)\ndist.barrier()")
    session.ranks.heal()
    assert _sum(session) == ["2\n"] * 2


# ---- a link is cut, and restored within the lease

STEPS = """
import time
kept = globals().get('kept', 0) + 1
for step in range({steps}):
    x = torch.full((4,), float(rank + 1))
    dist.all_reduce(x)
    print('step', step, int(x[0]), flush=True)
    time.sleep(0.1)
"""


class Clocked(io.StringIO):
    """A text stream that stores the time of each of our messages."""

    def __init__(self) -> None:
        super().__init__()
        self.came_s: dict[str, float] = {}

    def write(self, text: str) -> int:
        for line in text.splitlines():
            self.came_s.setdefault(line, time.monotonic())
        return super().write(text)

    def when(self, words: str) -> float:
        """Return the time of the first line that contains these words."""
        return next(when for line, when in self.came_s.items() if words in line)


@contextlib.contextmanager
def cut_for(made: namespaces.Namespaces, host: str, cut_s: float) -> Iterator[list[float]]:
    """Cut a link after a second, for some time. Yield a list that receives the moment."""
    moment: list[float] = []

    def cut() -> None:
        time.sleep(1.0)
        moment.append(time.monotonic())
        made.cut(host)
        time.sleep(cut_s)
        made.cut(host, is_up=True)

    thread = threading.Thread(target=cut)
    thread.start()
    try:
        yield moment
    finally:
        thread.join()


def _kept(session) -> list[int]:
    kept = session["kept"]
    return [kept[rank] for rank in (0, 1)]


def _goes_through(session, made: namespaces.Namespaces, host: str, cut_s: float, name: str = "") -> tuple[float, float]:
    """Cut off a host during a cell, and check that nothing is lost.

    Return two times in seconds: until a message with the host's name in its session, and from the repair of the link
    to the message that the host is back.
    """
    steps, epoch, name = 25, session.ranks.epoch, name or host
    session.run("kept = 0")
    with cut_for(made, host, cut_s) as moment, contextlib.redirect_stderr(Clocked()) as said:
        result = session.run(STEPS.format(steps=steps))
    for rank in result.ranks:
        assert result[rank].stdout == "".join(f"step {step} 3\n" for step in range(steps))
    newest = int(session.recording.rows("call")["cell"].max())
    calls = session.recording.collectives(op="all_reduce", cell=newest)
    assert Counter(call.rank for call in calls) == dict.fromkeys(result.ranks, steps)
    assert _kept(session) == [1, 1] and session.ranks.epoch == epoch
    told = said.when(f"{name} has sent nothing for") - moment[0] if cut_s > 4 else 0.0
    back = said.when(f"{name} is back after") - moment[0] - cut_s if cut_s > 4 else 0.0
    return told, back


@pytest.mark.long
def test_a_cut_is_told_and_loses_nothing(session, network):
    made, _ = network
    told_s, back_s = _goes_through(session, made, "b", 5.0)
    assert told_s < 5 and back_s < 5


@pytest.mark.long
def test_while_a_host_is_not_heard_no_time_runs_out(session, network):
    """Neither the time limit nor the grace period after a failure on the other host. The host receives pending
    messages."""
    made, _ = network
    session.run("kept = rank + 1")
    with cut_for(made, "b", 5.0), pytest.raises(RankError, match="ZeroDivisionError") as error:
        session.run("import time\ntime.sleep(1 if rank == 0 else 8)\nif rank == 0: 1 / 0", timeout_s=7)
    wait_until(lambda: not session._trouble)
    result = error.value.result
    assert result is not None and result[1].status == "interrupted"
    assert _kept(session) == [1, 2] and _sum(session) == ["2\n"] * 2


@pytest.mark.long
@pytest.mark.parametrize("pressed_s", [1.1, 2.5, 4.5])
def test_a_press_meanwhile_is_heard_when_the_host_is_back(session, network, pressed_s):
    """Also before the silence is noticed: then the host server is queried without an answer.

    The prompt returns 4 s after the press, even if the host is still silent.
    """
    made, _ = network
    session.run("kept = rank + 1")
    code = "import time\ntry:\n  while True: time.sleep(0.1)\nfinally: kept += 10; print('at the end', flush=True)"
    threading.Timer(pressed_s, os.kill, (os.getpid(), signal.SIGINT)).start()
    interrupted = (
        r"rank 0 was interrupted at cell line 3\n  rank 1 has not ended yet|ranks 0,1 were interrupted at cell line 3"
    )
    with cut_for(made, "b", 5.0), pytest.raises(KeyboardInterrupt, match=interrupted):
        session.run(code)
    wait_until(lambda: not session._parts.cells.busy, 15, "rank 1 has not got the press")
    assert _kept(session) == [11, 12] and _sum(session) == ["2\n"] * 2


@pytest.mark.long
def test_large_values_travel_on_after_a_cut(session, network):
    made, _ = network
    session.run("big = torch.arange(20_000_000) + rank")
    with cut_for(made, "b", 5.0):
        time.sleep(0.9)  # this takes longer than the time left until the cut
        assert [int(session.pull("big", rank)[rank][-1]) for rank in (1, 0)] == [20_000_000, 19_999_999]


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10))
def test_fifty_cuts_lose_nothing(session, network, seed):
    made, _ = network
    lengths = random.Random(seed)
    for _ in range(5):
        told_s, back_s = _goes_through(session, made, lengths.choice("ab"), lengths.uniform(3.0, 10.0))
        assert told_s < 5, "of the cut"
        assert back_s < 11, "as long again, at most: TCP waits twice as long each time"


@pytest.mark.long
def test_a_cut_of_half_the_lease_loses_nothing(network):
    """A host receives nothing for longer than the cut, because TCP waits. Its messages are acknowledged."""
    made, _ = network
    with _start_alone(network, lease_s=8) as session:
        for host in "abab":
            _goes_through(session, made, host, 5.0)


# ---- a host is lost

PLACE = """
import os
x = torch.ones(1); dist.all_reduce(x)
names = ('LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'GROUP_RANK', 'GROUP_WORLD_SIZE')
print(int(x), globals().get('kept'), *(os.environ[name] for name in names))
"""
FOREVER = "import time\nwhile True: dist.all_reduce(torch.ones(1)); time.sleep(0.05)"


def _start_alone(network, *, lease_s=30.0, **options):
    """Start a session that replaces the module's session."""
    if (running := ddp_notebook.current()) is not None:
        running.stop()
    return ddp_notebook.start(
        hosts=ddp_notebook.Ssh("a:1,b:1", python=network[1], lease_s=lease_s), grace_s=0.3, **options
    )


def _soon(do: Callable[[str], None], host: str) -> list[float]:
    """Call a function with a host in half a second. Return a list that receives the moment."""
    moment: list[float] = []

    def strike() -> None:
        moment.append(time.monotonic())
        do(host)

    threading.Timer(0.5, strike).start()
    return moment


def _places(session) -> list[str]:
    result = session.run(PLACE)
    return [result[rank].stdout.strip() for rank in result.ranks]


@pytest.mark.long
@pytest.mark.parametrize(
    ("host", "rank", "after"),
    [
        ("a", 0, ["2 None 1 2 0 1", "2 41 0 2 0 1"]),  # has the store, and thus the address of the group
        pytest.param("b", 1, ["2 40 0 2 0 1", "2 None 1 2 0 1"], marks=pytest.mark.long),
    ],
)
def test_a_host_is_lost_and_its_ranks_go_elsewhere(network, host, rank, after):
    made, _ = network
    with _start_alone(network, lease_s=5) as session:
        assert _places(session) == ["2 None 0 1 0 2", "2 None 0 1 1 2"]
        session.run("kept = rank + 40")
        try:
            moment = _soon(made.cut, host)
            why = f"{host} was lost: it has sent nothing for 5 s"
            with contextlib.redirect_stderr(Clocked()) as said, pytest.raises(RankDiedError, match=why):
                session.run(FOREVER)
            lost_s = time.monotonic() - moment[0]
            assert said.when(f"{host} has sent nothing for") - moment[0] < 5 and lost_s < 6.5
            assert session.is_running and session.status().rows[rank].state == "died"
            assert session.run("print(kept)")[1 - rank].stdout == f"{41 - rank}\n"
            began = time.monotonic()
            _, went = session.ranks.heal()
            assert went == f"rank {rank} is on {'ab'[1 - rank]} now" and is_within(time.monotonic() - began, 3)
            assert session.recording.hosts == (), "all are on one machine"
            assert _places(session) == after
            wait_until(lambda: not made.started(host), 10.0, "the host ends all, with its lease")
        finally:
            made.cut(host, is_up=True)
        assert _places(session) == after


@pytest.mark.long
def test_a_host_that_is_not_heard_is_given_up_by_who_asks_for_it(network):
    made, _ = network
    with _start_alone(network) as session:
        session.run("kept = rank + 40")
        made.cut("b")
        try:
            wait_until(lambda: session.status().rows[1].state.startswith("b has sent nothing for "), 10.0)
            with pytest.raises(SessionBrokenError, match=r"b has sent nothing .* %%on_ranks 0 runs without it"):
                session.run("1")
            assert session.run("print(kept)", ranks=0)[0].stdout == "40\n"
            assert session._trouble.startswith("b has sent nothing for ")
            began = time.monotonic()
            assert session.ranks.heal()[1] == "rank 1 is on a now" and is_within(time.monotonic() - began, 3)
            assert _places(session) == ["2 40 0 2 0 1", "2 None 1 2 0 1"]
        finally:
            made.cut("b", is_up=True)
        wait_until(lambda: not made.started("b"), 15.0, "what was given up is told to end")
        assert _places(session) == ["2 40 0 2 0 1", "2 None 1 2 0 1"]


@pytest.mark.long
@pytest.mark.parametrize("number", range(20))
def test_a_host_that_is_killed_is_told(network, number):
    made, _ = network
    with _start_alone(network) as session:
        session.run("kept = rank + 40")
        host = "ab"[number % 2]
        moment = _soon(made.kill, host)
        with pytest.raises(RankDiedError, match=f"{host} was lost: the host server on {host} ended, or the connection"):
            session.run(FOREVER)
        assert time.monotonic() - moment[0] < 5
        session.ranks.heal()
        assert _places(session)[1 - number % 2].startswith(f"2 {41 - number % 2} ")


# ---- hosts that call in


class InNamespaces(Starter):
    """Starts an outpost on each host."""

    words = "namespaces"

    def __init__(self, made: namespaces.Namespaces) -> None:
        self.tasks = len(made.links)
        self._made = made
        self._started: list[subprocess.Popen[bytes]] = []

    @property
    def address(self) -> str:
        return self._made.address

    def start(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        for number, namespace in enumerate(self._made.links.values()):
            task = {"SLURM_PROCID": str(number), "SLURM_NTASKS": str(self.tasks)}
            self._started.append(
                subprocess.Popen(["ip", "netns", "exec", namespace, *command], env={**os.environ, **env, **task})
            )

    def trouble(self, *, now: bool = False) -> str:
        return ""

    def end(self) -> None:
        for one in self._started:
            one.terminate()
            one.wait()


@pytest.mark.long
def test_an_outpost_is_heard_and_lost_as_other_hosts_are(network, monkeypatch):
    made, _ = network
    if (running := ddp_notebook.current()) is not None:
        running.stop()
    monkeypatch.setattr("ddp_notebook.launch.starters.choice.choose", lambda _: InNamespaces(made))
    with ddp_notebook.start(slurm=ddp_notebook.Slurm("", lease_s=9), grace_s=0.3) as session:
        name = session._hosts.all[1].name  # type: ignore[attr-defined]
        told_s, back_s = _goes_through(session, made, "b", 5.0, name)
        assert told_s < 5 and back_s < 5
        session.run("kept = rank + 40")
        moment = _soon(made.cut, "b")
        try:
            with pytest.raises(RankDiedError, match=f"{name} was lost: it has sent nothing for 9 s"):
                session.run(FOREVER)
            assert time.monotonic() - moment[0] < 10.5
            session.ranks.heal()
            assert _places(session) == ["2 40 0 2 0 1", "2 None 1 2 0 1"]
            wait_until(lambda: not made.started("b"), 10.0, "the host ends all, with its lease")
        finally:
            made.cut("b", is_up=True)
        assert _places(session) == ["2 40 0 2 0 1", "2 None 1 2 0 1"]
