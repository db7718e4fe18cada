"""Views under cells in real kernels: when they appear, the messages that the browser gets, and the outputs that stay.

The tests run on the newest ipykernel and on 6.31.
"""

from __future__ import annotations

import base64
import copy
import queue
import re
import time
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pytest

from tests.conftest import wait_until
from tests.kernels import Reply
from tests.test_widgets import VIEW, FrontEnd
from tests.widgets.unpacking import unpack

TRAINS = """%%on_all_ranks
import time
for step in range(30):
    x = torch.ones(4)
    dist.all_reduce(x)
    log(loss=1 / (step + 1), step=step)
    time.sleep(0.1)
"""
MONITOR_1 = "import ddp_notebook\nddp_notebook.current().monitor(1)"
OWN_BUNDLE = """
import pathlib, tempfile
from ddp_notebook.widgets import bundles
if not bundles.MONITOR.exists():  # what is drawn is the browser tests' business
    bundles.MONITOR = pathlib.Path(tempfile.mkdtemp()) / "monitor.js"
    bundles.MONITOR.write_text("export default { render({ el }) {} }")
"""


@dataclass
class Browser(FrontEnd):
    """A front end that keeps the messages to monitors, and answers "here" once for each monitor.

    It answers at the first message of a monitor: an earlier answer might find no handler. A real view repeats it until
    the kernel replies.
    """

    answers: bool = True  # without answers the view seems to be missing
    subshell: str | None = None  # takes messages of widgets while a cell runs; JupyterLab creates such a subshell

    def read(self, timeout_s: float = 10.0) -> dict[str, Any]:
        """Return the next message, with a copy of its content, because displaying a message changes it."""
        message = super().read(timeout_s)
        self.messages[-1] = {**message, "content": copy.deepcopy(message["content"])}
        told = message["content"].get("comm_id")
        if self.answers and told in self.monitors() and len(self._said(told)) == 1 and self._said(told, [message]):
            self.tell(told, {"kind": "here", "last": True})
        return message

    def tell(self, comm_id: str, content: dict[str, Any]) -> None:
        """Send a message of a view to the kernel."""
        client = self.kernel.client
        header = {**client.session.msg_header("comm_msg"), **({"subshell_id": self.subshell} if self.subshell else {})}
        of = {"comm_id": comm_id, "data": {"method": "custom", "content": content}}
        client.session.send(client.shell_channel.socket, client.session.msg("comm_msg", of, header=header))

    def told(self, comm_id: str) -> list[tuple[dict[str, Any], bytes]]:
        """Return the messages of the recording to a monitor, oldest first, as header and data."""
        return [(header, data) for header, data in self._said(comm_id) if header["kind"] != "heard"]

    def heard(self, comm_id: str) -> list[str]:
        """Return the value of `answers` in each "heard" message to a monitor."""
        return [header["answers"] for header, _ in self._said(comm_id) if header["kind"] == "heard"]

    def _said(self, comm_id: str, messages: list[dict[str, Any]] | None = None) -> list[tuple[dict[str, Any], bytes]]:
        return [
            (message["content"]["data"]["content"], b"".join(bytes(one) for one in message["buffers"]))
            for message in (self.messages if messages is None else messages)
            if message["msg_type"] == "comm_msg"
            and message["content"]["comm_id"] == comm_id
            and message["content"]["data"].get("method") == "custom"
        ]

    def monitors(self, messages: list[dict[str, Any]] | None = None) -> list[str]:
        """Return the comm ids of the opened monitors, oldest first."""
        return [
            message["content"]["comm_id"]
            for message in (self.messages if messages is None else messages)
            if message["msg_type"] == "comm_open"
            and "Monitor" in message["content"]["data"]["state"].get("_anywidget_id", "")
        ]


@pytest.fixture(scope="module")
def browser(kernel):
    made = Browser(kernel, subshell=make_subshell(kernel.client))
    made.run(OWN_BUNDLE)
    made.run("%ddp_start 2")
    return made


@pytest.fixture(autouse=True)
def only_its_own_messages(browser):
    browser.messages.clear()


@pytest.mark.long
def test_a_logging_cell_shows_a_view_that_becomes_a_picture(browser):
    reply = browser.run(TRAINS)

    [comm_id] = browser.monitors()
    displays = [m for m in browser.messages if m["msg_type"] == "display_data" and VIEW in m["content"]["data"]]
    assert [m["content"]["data"][VIEW]["model_id"] for m in displays] == [comm_id]
    cell = next(m for m in browser.messages if m["msg_type"] == "execute_input")["parent_header"]["msg_id"]
    assert displays[0]["parent_header"]["msg_id"] == cell, "in the cell that runs"
    [shown] = reply.displays
    assert set(shown) == {"image/png", "text/plain"}, "nothing that a saved notebook could not show"
    assert base64.b64decode(shown["image/png"])[:4] == b"\x89PNG"
    assert re.match(r"In \[\d+\]: 2 ranks", shown["text/plain"])
    assert comm_id in browser.closed
    order = [m["msg_type"] for m in browser.messages if m["msg_type"] in ("update_display_data", "comm_close")]
    assert order == ["update_display_data", "comm_close"], "the picture is there before the view goes"


def test_deltas_follow_a_snapshot_without_a_gap(browser):
    browser.run(TRAINS)

    told = browser.told(browser.monitors()[0])
    headers = [header for header, _ in told]
    assert headers[0]["kind"] == "snapshot"
    deltas = [header for header in headers if header["kind"] == "delta"]
    first = headers[0]["seq"]
    assert [header["seq"] for header in deltas] == list(range(first + 1, first + 1 + len(deltas)))
    assert len({header["run"] for header in headers}) == 1
    rows = [row for header, data in told for row in unpack(header, data).get("metric", ())]
    latest = {
        (int(row["rank"]), int(row["step"])): float(row["value"]) for row in rows if row["cell"] == rows[-1]["cell"]
    }
    seen = max(step for _, step in latest)
    assert seen > 20, "to the end, but for what came after the cell"
    assert all(latest[rank, step] == pytest.approx(1 / (step + 1)) for rank in (0, 1) for step in range(seen))


def test_a_short_cell_and_one_that_does_not_log_have_no_view(browser):
    browser.run("%%on_all_ranks\nlog(loss=1.0)")
    browser.run("%%on_all_ranks\nimport time; time.sleep(1.6)")

    assert browser.monitors() == []


def under_it(browser):
    """Return the outputs under the cell, in order."""
    cell = next(m for m in browser.messages if m["msg_type"] == "execute_input")["parent_header"]["msg_id"]
    own = [m for m in browser.messages if m["parent_header"].get("msg_id") == cell]
    return [m for m in own if m["msg_type"] in ("display_data", "stream")]


def test_the_view_stands_above_what_the_cell_prints(browser):
    reply = browser.run(TRAINS.replace("log(loss", "print('at step', step)\n    log(loss"))

    first, *others = under_it(browser)
    assert VIEW in first["content"]["data"], "nothing was printed above it"
    assert not any(VIEW in m["content"].get("data", {}) for m in others)
    assert [int(line.split()[-1]) for line in reply.stdout.splitlines()] == list(range(30)), "in order, none is lost"
    assert [set(shown) for shown in reply.displays] == [{"image/png", "text/plain"}]


def test_lines_of_a_cell_that_needs_no_view_are_all_that_stays(browser):
    reply = browser.run("%%on_all_ranks\nfor step in range(3): print('at step', step); log(loss=step)")

    assert reply.displays == [] and reply.stdout.splitlines() == [f"[0-1] at step {step}" for step in range(3)]


def waited_s(browser, code):
    """Return the seconds from the start of a cell until it displayed "loading"."""
    browser.messages.clear()
    asked = browser.kernel.start(code)
    browser.read_until(
        lambda: "loading" in browser.messages[-1]["content"].get("text", "") if browser.messages else False
    )
    began = next(m for m in browser.messages if m["msg_type"] == "execute_input")
    found = sent_s(browser.messages[-1]) - sent_s(began)
    assert finish(browser, asked).displays == []
    return found


def test_only_lines_of_a_cell_that_may_train_wait_for_its_view(browser):
    says = "%%on_all_ranks\nimport time; print('loading', flush=True); time.sleep({})"
    assert waited_s(browser, says.format(0.4)) < 0.4
    assert 0.9 < waited_s(browser, says.format("1.4") + "\nif rank > 1: log(loss=1)") < 1.4, "it has none so far"


def test_monitor_shows_all_until_it_is_replaced(browser):
    first = browser.run("%ddp_monitor")
    [one] = browser.monitors()
    assert VIEW in first.displays[0]
    browser.run(TRAINS)
    _, small = browser.monitors()
    assert small in browser.closed and one not in browser.closed, "a small one stood under the cell while it ran"
    states = [header["state"] for header, _ in browser.told(one) if "state" in header]
    assert "running" in states

    browser.messages.clear()
    browser.run("%ddp_monitor")
    [two] = browser.monitors()
    updates = [m["content"]["data"] for m in browser.messages if m["msg_type"] == "update_display_data"]
    assert "image/png" in updates[0]
    assert one in browser.closed
    assert two not in browser.closed


def test_a_run_of_before_is_brought_back(browser):
    shown = browser.run("import ddp_notebook\nprint(ddp_notebook.current().recording.prompts[1])").stdout
    [number] = re.findall(r"\d+", shown)
    reply = browser.run(f"%ddp_monitor {number}")
    comm_id = browser.monitors()[-1]
    assert VIEW in reply.displays[0]
    assert reply.displays[0]["text/plain"].endswith(f", In [{number}]>"), "where widgets are not shown"

    header, data = browser.told(comm_id)[0]
    assert (header["kind"], header["only"], header["state"]) == ("snapshot", 1, "recorded")
    metrics = unpack(header, data)["metric"]
    assert set(metrics["cell"]) == {1}
    assert len(metrics) == 60

    asked = browser.kernel.start("%ddp_monitor 777")
    failed = browser.kernel.finish(asked)
    assert re.search(r"In \[777\] was not recorded; the latest recorded cells: (In \[\d+\](, )?)+$", failed.evalue)


@pytest.mark.long
def test_a_view_of_a_finished_cell_does_not_replace_a_new_view(browser):
    browser.run(MONITOR_1)
    [old] = browser.monitors()
    for _ in range(2):
        browser.messages.clear()
        reply = browser.run(TRAINS)
        [under] = browser.monitors()
        told = browser.told(under)
        cells = {int(row["cell"]) for header, data in told for row in unpack(header, data).get("metric", ())}
        assert cells == {told[0][0]["only"]}
        assert set(reply.displays[-1]) == {"image/png", "text/plain"}
        assert old not in browser.closed

    browser.run("%ddp_monitor")
    assert old in browser.closed
    metrics = unpack(*browser.told(browser.monitors()[-1])[0])["metric"]
    assert {1, *cells} <= set(metrics["cell"].tolist()), "of all cells again"


def test_a_view_that_says_hello_is_told_everything(browser):
    browser.run("%ddp_monitor")
    comm_id = browser.monitors()[-1]
    browser.messages.clear()

    browser.say(comm_id, {"method": "custom", "content": {"kind": "hello"}})
    browser.read_until(lambda: any(header["kind"] == "snapshot" for header, _ in browser.told(comm_id)))


def test_requests_are_answered(browser):
    browser.run("%ddp_monitor")
    comm_id = browser.monitors()[-1]
    header, data = browser.told(comm_id)[0]
    span = [row for row in unpack(header, data)["span"] if row["op"]][-1]
    asks: dict[str, dict[str, Any]] = {
        "spans": {"t0": float(span["start"]) - 1, "t1": float(span["end"]) + 1, "ranks": [int(span["rank"])]},
        "values": {name: int(span[name]) for name in ("cell", "group", "number", "op")},
        "metrics": {},
        "nonsense": {},
    }
    for what, of in asks.items():
        browser.say(comm_id, {"method": "custom", "content": {"kind": "ask", "request": what, "what": what, **of}})

    def answers() -> dict[str, Any]:
        return {h["request"]: (h, d) for h, d in browser.told(comm_id) if h["kind"] == "answer"}

    browser.read_until(lambda: len(answers()) == len(asks))
    found = {what: unpack(*answer) for what, answer in answers().items() if "tables" in answer[0]}
    assert int(span["call"]) in found["spans"]["span"]["call"].astype(int)
    assert set(found["spans"]["span"]["rank"]) == {int(span["rank"])}
    assert {(int(row["rank"]), int(row["side"])) for row in found["values"]["value"]} == {
        (rank, side) for rank in (0, 1) for side in (0, 1)
    }
    assert found["values"]["value"]["first"][0][:4].tolist() in ([1.0] * 4, [2.0] * 4)
    assert len(found["metrics"]["metric"]) > 100
    assert "nonsense" in answers()["nonsense"][0]["error"]


def test_interrupt_ends_the_cell_where_the_kernel_hears_it(browser):
    hears_at_once = browser.subshell is not None
    when = "now" if hears_at_once else "after the cell"
    browser.run("%ddp_monitor")
    comm_id = browser.monitors()[-1]
    browser.read_until(lambda: browser.heard(comm_id) == [when])
    browser.run("%ddp_monitor")
    comm_id = browser.monitors()[-1]
    header, _ = browser.told(comm_id)[0]
    assert header["notes"]["answers"] == when, "known from the view before"

    asked = browser.kernel.start("%%on_all_ranks\nimport time; time.sleep(4)")
    browser.read_until(lambda: any(header.get("state") == "running" for header, _ in browser.told(comm_id)))
    began = time.monotonic()
    browser.tell(comm_id, {"kind": "interrupt", "request": 1})
    reply = finish(browser, asked)

    assert (reply.ename == "KeyboardInterrupt") == hears_at_once
    assert (time.monotonic() - began < 2.5) == hears_at_once
    said = [header.get("said") for header, _ in browser.told(comm_id) if header["kind"] == "answer"]
    if hears_at_once:
        assert said == ["interrupted"]
    else:
        browser.read_until(
            lambda: (
                [h.get("said") for h, _ in browser.told(comm_id) if h["kind"] == "answer"]
                == ["no cell runs on the ranks"]
            )
        )


def test_the_saved_picture_is_updated_after_each_recorded_cell(browser):
    """Test this also for a short cell, and soon after a cell whose picture was slow to draw."""
    browser.run("%ddp_monitor")
    browser.run("import ddp_notebook")
    for step in range(3):
        browser.run("%%on_all_ranks\nfor step in range(4):\n    log(loss=1 / (step + 1), step=step)")
        label = browser.run("print([*ddp_notebook.current().recording.prompts.values()][-1])").stdout.strip()
        assert re.fullmatch(r"In \[\d+\]", label)
        begin = f"{label}: 2 ranks, loss 1"
        began = time.monotonic()
        browser.read_until(lambda begin=begin: any(said.startswith(begin) for said in saved(browser)))
        assert time.monotonic() - began < 5, f"renewal {step}"


def saved(browser: Browser) -> list[str]:
    """Return the texts of the pictures that a saved notebook contains in place of its monitors."""
    contents = [m["content"]["data"] for m in browser.messages if m["msg_type"] == "update_display_data"]
    return [data["text/plain"] for data in contents if "ddpm-still" in data.get("text/html", "")]


def test_where_nobody_can_type_nobody_looks(browser):
    """nbclient runs a notebook without input. A widget would stay in the file for ever, with all its JavaScript."""
    for code in (TRAINS, MONITOR_1):
        reply = finish(browser, browser.kernel.client.execute(code, allow_stdin=False))
        assert reply.status == "ok"
    assert browser.monitors() == []
    assert [set(shown) for shown in reply.displays] == [{"image/png", "text/plain"}]


def test_stop_makes_the_last_view_static(browser):
    browser.run("%ddp_monitor")
    comm_id = browser.monitors()[-1]
    browser.messages.clear()
    browser.run("%ddp_stop")

    updates = [m["content"]["data"] for m in browser.messages if m["msg_type"] == "update_display_data"]
    picture, behind = updates[-2:]
    assert set(picture) == {"image/png", "text/plain"} and behind == {"text/plain": "", "text/html": ""}
    assert comm_id in browser.closed
    assert browser.told(comm_id)[-1][0]["state"] == "stopped"


def test_a_recording_remains_after_the_stop_until_the_next_start(browser, tmp_path):
    browser.run("import ddp_notebook\nsession = ddp_notebook.start(2, reuse=True)")
    browser.run("%%on_all_ranks\nfor _ in range(30):\n    dist.all_reduce(torch.ones(4))")
    browser.run("%ddp_stop")

    def failed(code: str) -> str:
        return finish(browser, browser.kernel.client.execute(code)).evalue

    line = "the ranks are gone; the recording remains (2 ranks, gloo)"
    said = browser.run("%ddp_report").stdout.splitlines()
    assert said[0] == line and "60 communication calls" in said[1], said
    assert re.fullmatch(
        r"In \[777\] was not recorded; the latest recorded cells: In \[\d+\]", failed("%ddp_monitor 777")
    )
    browser.messages.clear()
    assert browser.run("%ddp_monitor").stdout == f"{line}\n"
    [comm_id] = browser.monitors()
    assert browser.told(comm_id)[0][0]["state"] == "recorded"
    assert browser.run(f"%ddp_trace {tmp_path}/run.json").stdout.startswith(f"{line}\n{tmp_path}/run.json: ")
    assert (
        "start them with %ddp_start 4. %ddp_report, %ddp_monitor and %ddp_trace still show what the last ranks"
        in failed("%ddp_status")
    )

    browser.run("%ddp_start 2")
    assert comm_id in browser.closed
    assert "the ranks are gone" not in browser.run("%ddp_report").stdout
    browser.run("%ddp_stop")


def make_subshell(client: Any) -> str | None:
    """Create a subshell, as JupyterLab does for widgets. Return its id, or None if the kernel supports none."""
    if "kernel subshells" not in client.kernel_info(reply=True, timeout=30)["content"].get("supported_features", ()):
        return None
    message = client.session.msg("create_subshell_request", {})
    client.control_channel.send(message)
    while True:
        answer = client.get_control_msg(timeout=10)
        if answer["parent_header"].get("msg_id") == message["header"]["msg_id"]:
            return answer["content"].get("subshell_id")


def sent_s(message: dict[str, Any]) -> float:
    """Return the time at which a message was sent. jupyter_client leaves dates as text if another library has set
    this."""
    date = message["header"]["date"]
    return (datetime.fromisoformat(date) if isinstance(date, str) else date).timestamp()


def finish(browser: Browser, asked: str) -> Reply:
    reply, idle = Reply(), False
    while not idle:
        message = browser.read(30)
        if message["parent_header"].get("msg_id") == asked:
            reply.read(message)
            idle = message["msg_type"] == "status" and message["content"]["execution_state"] == "idle"
    while True:
        try:
            answer = browser.kernel.client.get_shell_msg(timeout=10)
        except queue.Empty:
            raise AssertionError("the cell has no reply") from None
        if answer["parent_header"].get("msg_id") == asked:
            reply.status, reply.ename = answer["content"]["status"], answer["content"].get("ename", "")
            reply.evalue = answer["content"].get("evalue", "")
            return reply


MONITOR = "from ddp_notebook.widgets import Monitor\nMonitor(session)"
THREADS = "import threading\nprint(sum(one.name == 'ddp-monitor' for one in threading.enumerate()))"


@pytest.mark.long
def test_user_monitors_share_one_thread_and_know_the_cell_state(browser):
    browser.run("import ddp_notebook\nsession = ddp_notebook.start(2, reuse=True)")
    browser.run(MONITOR)
    [made] = browser.monitors()
    for _ in range(2):  # repeat the cell that creates the monitor
        browser.run(MONITOR)
    # The thread of an earlier test's session may end a moment later.
    wait_until(lambda: browser.run(THREADS).stdout == "1\n", what="several threads for one session")

    def states() -> list[str]:
        return [header["state"] for header, _ in browser.told(made) if "state" in header]

    assert states()[0] == "idle"
    browser.run(TRAINS)
    assert "running" in states()
    browser.read_until(lambda: states()[-1] == "idle")
    browser.say(made, {"method": "custom", "content": {"kind": "interrupt", "request": 1}})
    browser.read_until(lambda: any(said.get("said") == "no cell runs on the ranks" for said, _ in browser.told(made)))
    browser.run("%ddp_stop")
    assert states()[-1] == "stopped"
    browser.run("Monitor(session)")
    assert browser.run(THREADS).stdout == "0\n", "nothing comes any more"
