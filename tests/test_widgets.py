"""Widgets that cells create on ranks, as a front end displays and changes them, on the newest ipykernel and on 6.31."""

from __future__ import annotations

import queue
import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.kernels import Reply

COMM_TYPES = ("comm_open", "comm_msg", "comm_close")
VIEW = "application/vnd.jupyter.widget-view+json"
SLIDERS = """%%on_all_ranks
import ipywidgets as widgets
from IPython.display import display
slider, copy = widgets.IntSlider(value=rank), widgets.IntText()
slider.observe(lambda change: setattr(copy, "value", 10 * change["new"]), "value")
display(slider)
"""


@dataclass
class FrontEnd:
    """A front end that runs cells and keeps the iopub messages, as its widget manager does."""

    kernel: Any
    messages: list[dict[str, Any]] = field(default_factory=list)
    models: dict[str, dict[str, Any]] = field(default_factory=dict)  # state by comm id
    buffers: dict[str, list[bytes]] = field(default_factory=dict)
    closed: set[str] = field(default_factory=set)

    def run(self, code: str, timeout_s: float = 60.0) -> Reply:
        """Run a cell that must succeed, and read all messages until it has ended."""
        asked, reply, until = self.kernel.start(code), Reply(), time.monotonic() + timeout_s
        idle = False
        while not idle:
            message = self.read(until - time.monotonic())
            if message["parent_header"].get("msg_id") == asked:
                reply.read(message)
                idle = message["msg_type"] == "status" and message["content"]["execution_state"] == "idle"
        answer = self.kernel.client.get_shell_msg(timeout=10)
        reply.status = answer["content"]["status"]
        assert reply.status == "ok", reply.traceback
        return reply

    def read(self, timeout_s: float = 10.0) -> dict[str, Any]:
        """Read and return the next message of iopub."""
        message = self.kernel.client.get_iopub_msg(timeout=max(0.1, timeout_s))
        self.messages.append(message)
        content, kind = message["content"], message["msg_type"]
        if kind in COMM_TYPES:
            comm_id, data = content["comm_id"], content["data"]
            if kind == "comm_close":
                self.closed.add(comm_id)
            elif kind == "comm_open" or data.get("method") == "update":
                self.models.setdefault(comm_id, {}).update(data.get("state", {}))
            if message["buffers"]:
                self.buffers[comm_id] = [bytes(buffer) for buffer in message["buffers"]]
        return message

    def read_until(self, condition, timeout_s: float = 10.0) -> None:
        """Read messages until the condition holds."""
        until = time.monotonic() + timeout_s
        while not condition():
            try:
                self.read(until - time.monotonic())
            except queue.Empty:
                names = {comm_id: model.get("_model_name") for comm_id, model in self.models.items()}
                raise AssertionError(f"not within {timeout_s:g} s; models: {names}") from None

    def say(
        self,
        comm_id: str,
        data: dict[str, Any],
        buffers: list[bytes] | None = None,
        msg_type: str = "comm_msg",
        **more: Any,
    ) -> str:
        """Send a change by the user to a widget. The kernel does not reply. Return the message id."""
        session, channel = self.kernel.client.session, self.kernel.client.shell_channel
        content = {"comm_id": comm_id, "data": data, **more}
        return str(session.send(channel.socket, msg_type, content, buffers=buffers)["header"]["msg_id"])

    def set(self, comm_id: str, buffer_paths: Any = (), buffers: list[bytes] | None = None, **state: Any) -> None:
        """Change the state of a widget."""
        self.say(comm_id, {"method": "update", "state": state, "buffer_paths": list(buffer_paths)}, buffers)

    def of(self, model_name: str, **state: Any) -> list[str]:
        """Return the comm ids of the open models with this name and state, oldest first."""
        wanted = {"_model_name": model_name, **state}
        return [c for c, m in self.models.items() if c not in self.closed and wanted.items() <= m.items()]


@pytest.fixture(scope="module")
def front_end(kernel):
    """Create a front end whose kernel has two ranks."""
    made = FrontEnd(kernel)
    made.run("%ddp_start 2")
    return made


@pytest.mark.long
def test_a_slider_is_opened_before_its_view_is_displayed(front_end):
    front_end.messages.clear()
    reply = front_end.run(SLIDERS)

    views = [m for m in front_end.messages if m["msg_type"] == "display_data" and VIEW in m["content"]["data"]]
    models = [view["content"]["data"][VIEW]["model_id"] for view in views]
    assert sorted(front_end.models[model]["value"] for model in models) == [0, 1], "one slider a rank"
    assert len(reply.displays) == 2
    for view, model in zip(views, models, strict=True):
        [opened] = [m for m in front_end.messages if m["msg_type"] == "comm_open" and m["content"]["comm_id"] == model]
        assert front_end.messages.index(opened) < front_end.messages.index(view)
        assert opened["content"]["target_name"] == "jupyter.widget"
        assert opened["content"]["data"]["state"]["_model_name"] == "IntSliderModel"
        assert opened["metadata"]["version"].startswith("2.")
        assert opened["parent_header"]["msg_id"] == view["parent_header"]["msg_id"], "of the cell that made it"


def test_the_next_cell_reads_the_new_value_of_a_moved_slider(front_end):
    front_end.run(SLIDERS)
    slider = front_end.of("IntSliderModel", value=1)[-1]
    for value in range(2, 30):  # the next cell follows immediately
        front_end.set(slider, value=value)
        assert f"[1] {value}" in front_end.run("%%on_all_ranks\nslider.value").stdout
    assert len(front_end.of("IntTextModel", value=290)) == 1, "what the callback has changed came back"


def test_a_button_and_what_its_callback_prints_shows_and_raises(front_end):
    front_end.run(
        """%%on_all_ranks --ranks 0
import ipywidgets as widgets
from IPython.display import HTML, display
def click(_):
    print("printed by the callback")
    display(HTML("shown by the callback"))
    handle.update("after")
    button.description = "clicked"
    raise ValueError("raised by the callback")
handle = display("before", display_id=True)
button = widgets.Button(description="click")
button.on_click(click)
display(button)"""
    )
    [button] = front_end.of("ButtonModel", description="click")
    front_end.messages.clear()
    front_end.say(button, {"method": "custom", "content": {"event": "click"}})
    front_end.read_until(lambda: front_end.models[button]["description"] == "clicked")
    front_end.read_until(lambda: any(m["msg_type"] == "update_display_data" for m in front_end.messages))
    reply = front_end.run("%%on_all_ranks --ranks 0\nbutton.description")
    assert "[0] (between cells) printed by the callback" in reply.stdout
    assert "[0] (between cells) <IPython.core.display.HTML object>" in reply.stdout
    assert "ValueError" in reply.stderr and "raised by the callback" in reply.stderr


def test_a_stop_ends_an_endless_callback_with_the_next_cell(front_end):
    front_end.run(
        """%%on_all_ranks --ranks 0
import ipywidgets as widgets
def spin(_):
    spinner.description = "spins"
    while True: pass
spinner = widgets.Button(description="spin")
spinner.on_click(spin)"""
    )
    [spinner] = front_end.of("ButtonModel", description="spin")
    front_end.say(spinner, {"method": "custom", "content": {"event": "click"}})
    front_end.read_until(lambda: front_end.models[spinner]["description"] == "spins")
    message = front_end.kernel.start("%%on_all_ranks\nprint('ran')")
    front_end.kernel.wait_for_text("[1] ran")
    front_end.kernel.interrupt()
    reply = front_end.kernel.finish(message, timeout_s=10)
    assert reply.ename == "KeyboardInterrupt"
    assert "KeyboardInterrupt" in reply.stderr, "of the callback"
    front_end.kernel.run("pass")  # wait until an older ipykernel no longer aborts messages after a failed cell
    assert "[0-1] again" in front_end.run("%%on_all_ranks\nprint('again')").stdout


def test_an_error_of_a_callback_is_shown_after_a_stopped_cell(front_end):
    front_end.run(
        """%%on_all_ranks --ranks 0
import ipywidgets as widgets
def fail(_):
    failing.description = "failed"
    raise ValueError("raised after the stop")
failing = widgets.Button(description="fail")
failing.on_click(fail)"""
    )
    [failing] = front_end.of("ButtonModel", description="fail")
    message = front_end.kernel.start("%%on_all_ranks --ranks 0\nprint('runs')\nwhile True: pass")
    front_end.kernel.wait_for_text("runs")
    front_end.kernel.interrupt()
    assert front_end.kernel.finish(message, timeout_s=10).ename == "KeyboardInterrupt"
    front_end.say(failing, {"method": "custom", "content": {"event": "click"}})
    front_end.read_until(lambda: front_end.models[failing]["description"] == "failed")
    assert "raised after the stop" in front_end.run("%%on_all_ranks --ranks 0\nfailing.description").stderr


def test_a_callback_waits_for_the_cells_awaits(front_end):
    front_end.run("%%on_all_ranks\nimport asyncio\nlog = []")
    front_end.run(SLIDERS + "slider.observe(lambda change: log.append('callback'), 'value')")
    sliders = front_end.of("IntSliderModel")[-2:]
    front_end.run("import ddp_notebook\nsession = ddp_notebook.current()")
    code = "log.append('begin'); await asyncio.sleep(0.5); log.append('end')"
    front_end.run(f'future = session.submit("{code}")')
    for slider in sliders:
        front_end.set(slider, value=50)
    front_end.run("future.result(20)")
    assert front_end.run("%%on_all_ranks\nlog").stdout == "[0-1] ['begin', 'end', 'callback']\n"


def test_buffers_survive_both_ways(front_end):
    front_end.run(
        "%%on_all_ranks --ranks 0\nimport ipywidgets as widgets\n"
        "image = widgets.Image(value=bytes(range(256)) * 4000, format='png')"
    )
    [image] = front_end.of("ImageModel")
    assert front_end.buffers[image] == [bytes(range(256)) * 4000]
    front_end.run("%%on_all_ranks --ranks 0\nimage.value = b'\\n\\x1e\\x00'")
    assert front_end.buffers[image] == [b"\n\x1e\x00"]
    front_end.set(image, [["value"]], [b"\x00\nfrom the browser\xff" * 10000])
    reply = front_end.run("%%on_all_ranks --ranks 0\nbytes(image.value[:19]), len(image.value)")
    assert reply.stdout == "[0] (b'\\x00\\nfrom the browser\\xff', 190000)\n"


def test_numbers_of_numpy_are_numbers(front_end):
    front_end.run(
        "%%on_all_ranks --ranks 0\nimport numpy, traitlets, ipywidgets as widgets\n"
        "class Mine(widgets.DOMWidget):\n    some = traitlets.Any(numpy.int64(3)).tag(sync=True)\nmine = Mine()"
    )
    assert front_end.of("DOMWidgetModel", some=3)


def test_a_bar_of_tqdm_on_every_rank(front_end):
    reply = front_end.run(
        "%%on_all_ranks\nfrom tqdm.notebook import tqdm\nimport time\n"
        "for _ in tqdm(range(20), desc=f'rank{rank}'): time.sleep(0.01)"
    )
    assert sum(VIEW in data for data in reply.displays) == 2
    bars = front_end.of("FloatProgressModel", max=20.0)
    assert [front_end.models[bar]["value"] for bar in bars] == [20.0, 20.0], "when the cell has ended"
    assert [front_end.models[bar]["bar_style"] for bar in bars] == ["success", "success"]
    texts = [model["value"] for model in front_end.models.values() if model["_model_name"] == "HTMLModel"]
    for rank in range(2):
        assert any(f"rank{rank}" in text for text in texts)
    assert sum("20/20" in text for text in texts) == 2


def test_a_thread_moves_a_widget_between_cells_and_a_handle_too(front_end):
    front_end.run(
        "%%on_all_ranks\nimport threading, ipywidgets as widgets\nfrom IPython.display import display\n"
        "late = widgets.IntText(description='late')\nhandle = display(f'rank {rank} waits', display_id=True)\n"
        "go = threading.Event()\n"
        "def later():\n    go.wait(20); late.value = rank + 5; handle.update(f'rank {rank} has moved')\n"
        "thread = threading.Thread(target=later); thread.start()"
    )
    front_end.messages.clear()
    front_end.run("%%on_all_ranks\nthreading.Timer(0.3, go.set).start()")
    front_end.read_until(lambda: len(front_end.of("IntTextModel", value=5)) == 1, 5)
    front_end.read_until(lambda: len(front_end.of("IntTextModel", value=6)) == 1, 5)
    updates = lambda: [m["content"] for m in front_end.messages if m["msg_type"] == "update_display_data"]  # noqa: E731
    front_end.read_until(lambda: len(updates()) == 2, 5)
    assert {update["transient"]["display_id"][:5] for update in updates()} == {"rank0", "rank1"}
    assert "has moved" in updates()[0]["data"]["text/plain"]


def test_a_later_cell_updates_a_display(front_end):
    front_end.messages.clear()
    shown = front_end.run(
        "%%on_all_ranks\nfrom IPython.display import display\nh = display(f'rank {rank}: one', display_id=True)"
    )
    assert len(shown.displays) == 2
    front_end.run("%%on_all_ranks\nh.update(f'rank {rank}: two')")
    for message in front_end.messages:
        if message["msg_type"] == "update_display_data":
            shown.read(message)
    assert [data["text/plain"] for data in shown.displays] == ["'rank 0: two'", "'rank 1: two'"]


def test_a_closed_widget_is_closed_in_the_front_end(front_end):
    front_end.run(SLIDERS)
    first, second = front_end.of("IntSliderModel")[-2:]
    front_end.run("%%on_all_ranks\nslider.close()")
    assert {first, second} <= front_end.closed
    front_end.set(first, value=9)  # the message has no receiver
    assert front_end.run("%%on_all_ranks\nrank").status == "ok"


def load_again(front_end, sliders: list[str]) -> list[int]:
    """Request the states as JupyterLab does, and return the values.

    JupyterLab requests all states in one message. If this is refused, it requests each state, and accepts only the
    reply to its own request.
    """
    control = f"control-of-new-page-{len(front_end.messages)}"
    front_end.say(control, {}, msg_type="comm_open", target_name="jupyter.widget.control")
    front_end.read_until(lambda: control in front_end.closed)
    front_end.messages.clear()
    asked = {front_end.say(slider, {"method": "request_state"}): slider for slider in sliders}

    def answers() -> dict[str, dict[str, Any]]:
        told = [m for m in front_end.messages if m["msg_type"] == "comm_msg"]
        return {m["parent_header"]["msg_id"]: m["content"] for m in told if m["parent_header"]["msg_id"] in asked}

    front_end.read_until(lambda: len(answers()) == len(sliders))
    assert {asked_by: content["comm_id"] for asked_by, content in answers().items()} == asked
    return [content["data"]["state"]["value"] for content in answers().values()]


def test_a_page_that_is_loaded_again_finds_the_widgets(front_end):
    """A rank that runs a job cannot answer. Yet the page must get all states, because it shows no widget before."""
    front_end.run(SLIDERS)
    sliders = front_end.of("IntSliderModel")[-2:]
    front_end.set(sliders[1], value=7)
    front_end.run("%%on_all_ranks\nslider.max = 12")
    value = sorted([7, front_end.models[sliders[0]]["value"]])
    assert sorted(load_again(front_end, sliders)) == value
    front_end.run("%%on_all_ranks --background\nimport time\nwhile True: time.sleep(0.1)")
    assert sorted(load_again(front_end, sliders)) == value
    front_end.run("%ddp_interrupt")


def test_stop_leaves_widgets_on_the_page(front_end):
    """This must be the last test."""
    front_end.run(SLIDERS)
    sliders = set(front_end.of("IntSliderModel"))
    assert front_end.run("%ddp_stop").stdout == "stopped 2 ranks\n"
    assert sliders and not sliders & front_end.closed
    assert len(load_again(front_end, list(sliders))) == len(sliders)
    front_end.set(min(sliders), value=9)  # the message has no receiver
    assert front_end.run("print('on')").stdout == "on\n"
