"""Output is sent no faster than Jupyter Server passes it on. Jupyter Server drops the output above its limits and adds
a message to the cell."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from jupyter_client.session import Session
from jupyter_server.services.kernels.connection.channels import ZMQChannelsWebsocketConnection

from ddp_notebook.run.output import message_rate, rate_limiter
from ddp_notebook.run.output.rate_limiter import RateLimiter

# The defaults of Jupyter Server, https://jupyter-server.readthedocs.io/en/latest/other/full-config.html. They are
# repeated here as numbers, so that a test fails if the rates of the rate limiter change.
BYTES_PER_S, MESSAGES_PER_S, WINDOW_S = 1_000_000, 1000, 3.0
LINE = "step 12 loss 0.123 " + "é" * 20 + "\n"


class Clock:
    """A replacement for the module `time` in the rate limiter."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class FrontEnd:
    """A sink that serialises messages as the kernel does, and counts them as Jupyter Server does."""

    can_update = is_live = True
    is_captured = False

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._session = Session(key=b"key")
        self._window: deque[tuple[float, int]] = deque()
        self._bytes = 0  # bytes in the current window
        self._texts: list[tuple[str, str]] = []
        self.most_bytes = self.most_messages = 0  # the maxima over all windows
        self.bytes_of_text = self.displays = 0
        self.last = ""  # the last text

    def write(self, stream: str, text: str) -> None:
        self._texts.append((stream, text))

    def flush(self, stream: str) -> None:
        text = "".join(text for its, text in self._texts if its == stream)
        self._texts = [one for one in self._texts if one[0] != stream]
        if text:
            self.last = text
            self.bytes_of_text += self._send("stream", {"name": stream, "text": text})

    def publish(self, data: dict[str, Any], metadata: dict[str, Any], display_id: str | None, update: bool) -> None:
        self.displays += 1
        self._send("display_data", {"data": data, "metadata": metadata, "transient": {"display_id": display_id}})

    def clear(self, wait: bool) -> None:
        self._send("clear_output", {"wait": wait})

    def fail(self, error: BaseException) -> None:
        raise error

    def _send(self, kind: str, content: dict[str, Any]) -> int:
        parts = self._session.serialize(self._session.msg(kind, content, parent={"msg_id": "x" * 36}))
        nbytes = sum(map(len, parts)) if kind == "stream" else 0  # other messages count only as messages
        self._window.append((self._clock.now, nbytes))
        self._bytes += nbytes
        while self._window[0][0] <= self._clock.now - WINDOW_S:
            self._bytes -= self._window.popleft()[1]
        self.most_bytes = max(self.most_bytes, self._bytes)
        self.most_messages = max(self.most_messages, len(self._window))
        return nbytes


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    for module in (rate_limiter, message_rate):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(rate_limiter, "FRONT_END", message_rate.MessageRate())
    return clock


def test_these_are_the_limits_of_jupyter_server():
    limits = ZMQChannelsWebsocketConnection.class_traits()
    names = ("iopub_data_rate_limit", "iopub_msg_rate_limit", "rate_limit_window")
    assert [limits[name].default_value for name in names] == [BYTES_PER_S, MESSAGES_PER_S, WINDOW_S]


@pytest.mark.parametrize("streams", [("stdout",), ("stdout", "stderr")])
def test_a_flood_of_text_leaves_as_fast_as_jupyter_takes_it(clock, streams):
    front_end = FrontEnd(clock)
    shown, until = RateLimiter(front_end), clock.now + 10.0
    while clock.now < until:  # writes 4 MB a second
        for stream in streams:
            shown.write(stream, LINE * (40_000 // len(LINE.encode()) // len(streams)))
        shown.flush(clock.now)
        clock.now += 0.01
    assert front_end.most_bytes <= BYTES_PER_S * WINDOW_S
    assert front_end.most_messages <= MESSAGES_PER_S * WINDOW_S
    assert front_end.bytes_of_text > 0.7 * BYTES_PER_S * 10.0, "not much slower either"


def test_a_flood_of_displays_leaves_as_fast_as_jupyter_takes_it(clock):
    front_end = FrontEnd(clock)
    shown, until = RateLimiter(front_end), clock.now + 4.0
    while clock.now < until:
        if not shown.is_full:
            for _ in range(30):
                shown.show({"text/plain": "x"})
        shown.write("stdout", "text between\n")
        shown.flush(clock.now)
        clock.now += 0.01
    assert front_end.most_messages <= MESSAGES_PER_S * WINDOW_S
    assert front_end.displays > 0.6 * MESSAGES_PER_S * 4.0


def test_the_rest_of_a_cell_leaves_as_fast_as_jupyter_takes_it(clock):
    """A cell ends when all its output is shown."""
    front_end = FrontEnd(clock)
    shown = RateLimiter(front_end)
    for _ in range(100):
        shown.write("stdout", LINE * 1000)
    shown.drain()
    assert front_end.most_bytes <= BYTES_PER_S * WINDOW_S
    assert front_end.bytes_of_text > 100 * 1000 * len(LINE)


def test_after_a_press_of_stop_the_end_of_the_text_follows_soon(clock):
    front_end = FrontEnd(clock)
    shown = RateLimiter(front_end)
    for at in range(300):
        shown.write("stdout", LINE * 1000)
        if at % 10 == 0:
            shown.flush(clock.now)
            clock.now += 0.05
    shown.write("stdout", "the end\n")
    pressed = clock.now
    shown.drain(is_stopped=lambda: True)
    assert clock.now - pressed < 0.5
    assert front_end.most_bytes <= BYTES_PER_S * WINDOW_S
    assert front_end.last.endswith("the end\n")


def test_one_long_text_leaves_in_pieces(clock):
    front_end = FrontEnd(clock)
    shown = RateLimiter(front_end)
    shown.write("stdout", "\x1b[1m" * 1_000_000)  # each escape character becomes six bytes
    shown.drain()
    assert front_end.most_bytes <= BYTES_PER_S * WINDOW_S
    assert front_end.bytes_of_text > 9_000_000
