"""The monitor as HTML in a real kernel: when it replaces a widget, how often it is redrawn, and which outputs stay."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from tests.test_widgets import VIEW
from tests.widgets.test_display import OWN_BUNDLE, Browser, finish, make_subshell, sent_s

SET_UP = """%%on_all_ranks
import time
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
TRAINS = """%%on_all_ranks
for step in range({steps}):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    log(loss=loss, **{{"<b>&": step}})
    time.sleep(0.05)
"""
MONITOR_2 = "import ddp_notebook\nddp_notebook.current().monitor(2)"

# Stop the session of an earlier test if one is running.
STOP = "from ddp_notebook import session\nif (running := session.current()) is not None: running.stop()"


@pytest.fixture(scope="module")
def page(kernel):
    """Create a front end in which no widget answers, and two ranks with a model."""
    made = Browser(kernel, answers=False, subshell=make_subshell(kernel.client))
    made.run(OWN_BUNDLE)
    made.run("%ddp_start 2")
    made.run(SET_UP)
    return made


@pytest.fixture(autouse=True)
def only_its_own_messages(page):
    page.messages.clear()


def drawn(page: Browser) -> list[tuple[float, str]]:
    """Return each HTML of the monitor, with the time at which it was sent."""
    return [
        (sent_s(message), message["content"]["data"]["text/html"])
        for message in page.messages
        if message["msg_type"] in ("display_data", "update_display_data")
        and "ddp-html" in message["content"]["data"].get("text/html", "")
    ]


def displays(page: Browser) -> list[dict[str, Any]]:
    """Return the contents of the new displays."""
    return [message["content"] for message in page.messages if message["msg_type"] == "display_data"]


def test_a_widget_that_does_not_answer_becomes_html_in_its_place(page):
    reply = page.run(TRAINS.format(steps=100))

    assert len(page.monitors()) == 1
    [shown] = [one for one in displays(page) if VIEW in one["data"]]
    began_s = next(m for m in page.messages if m["msg_type"] == "display_data" and m["content"] is shown)
    redraws = drawn(page)
    assert 1.9 < redraws[0][0] - sent_s(began_s) < 3.5, "after 2 s"
    assert 3 <= len(redraws) <= 12
    assert all(len(html.encode()) <= 20_000 for _, html in redraws)
    took_s = redraws[-1][0] - redraws[0][0]
    assert len(redraws) <= 2 * took_s + 2, "at most two a second, and one at the end"
    [one] = reply.displays
    assert set(one) == {"text/html", "text/plain"}, "one view, and no widget"
    assert "recorded" in one["text/html"]
    assert re.match(r"In \[\d+\]: 2 ranks, 100 steps, loss", one["text/plain"])
    assert "&lt;b&gt;&amp;" in one["text/html"] and "<b>&" not in one["text/html"]
    assert "<script" not in one["text/html"] and "http" not in one["text/html"]


def test_the_next_cell_has_html_from_the_beginning(page):
    reply = page.run(TRAINS.format(steps=50))

    assert page.monitors() == []
    redraws = [html for _, html in drawn(page)]
    assert 'class="chip running">running' in redraws[0] and re.search(r"In \[\d+\] is running", redraws[0])
    assert len(redraws) > 2
    assert redraws[-1] == reply.displays[-1]["text/html"]
    assert len(set(redraws)) == len(redraws), "none that changes nothing"


@pytest.mark.long
def test_a_hang_is_told(page):
    failed = page.kernel.start(
        "%%on_all_ranks --timeout 6\nlog(loss=1.0)\nif rank == 0: dist.barrier()\nelse: time.sleep(60)"
    )
    page.read_until(lambda: any("No progress" in html for _, html in drawn(page)), 20)
    html = drawn(page)[-1][1]
    assert "not arrived at barrier" in html and "rank 1 is at cell line 3" in html
    assert "<td>waiting</td>" in html
    assert finish(page, failed).status == "error"


def is_last_step(html: str) -> bool:
    return 'class="chip idle">idle' in html and re.findall(r"<td[^>]*>(\d+)</td>", html).count("49") == 2


@pytest.mark.long
def test_the_monitor_is_redrawn_under_cells_and_then_settles(page):
    first = page.run("%ddp_monitor")
    assert page.monitors() == [] and "ddp-html" in first.displays[0]["text/html"]
    page.messages.clear()
    page.run(TRAINS.format(steps=50))
    [under] = displays(page)
    assert "ddp-html" in under["data"]["text/html"], "under the cell, which may be far from it"
    assert len(drawn(page)) >= 6
    page.read_until(lambda: is_last_step(drawn(page)[-1][1]))  # the last rows of the ranks arrive after the cell
    until = time.monotonic() + 15
    while True:
        count = len(drawn(page))
        page.run("1 + 1")
        time.sleep(0.7)  # a redraw after the cell would have happened in this time
        page.run("1 + 1")
        if len(drawn(page)) == count:
            break
        # The numbers of the run are computed at most once a second, so a redraw may come later.
        assert time.monotonic() < until, "it is redrawn although nothing has changed"

    page.messages.clear()
    page.run(MONITOR_2)
    (_, old), (_, new) = drawn(page)
    assert "recorded" in old and "100 steps" not in old, "the one before is frozen"
    assert " In [" in new and "recorded" in new


def test_the_numbers_of_a_run_are_current_at_the_end_of_its_cell(page):
    """The numbers are computed at most once a second, so the first check after the cell may be too early for new
    ones."""
    page.run("%ddp_monitor")
    page.run("from ddp_notebook.widgets import live_status\nlive_status._PERIOD_S = 2.0")
    page.messages.clear()
    page.run(TRAINS.format(steps=12))
    page.read_until(lambda: drawn(page) and "mean of steps 2 to 11" in drawn(page)[-1][1])  # no further cell runs
    shown = drawn(page)[-1][1]
    page.run("import ddp_notebook\nlive_status._PERIOD_S = 1.0")
    page.run("print(ddp_notebook.current().recording.runs()[-1].per_step)")
    [per_step] = re.findall(r"[\d.]+ m?s/step", shown)
    assert per_step in "".join(m["content"]["text"] for m in page.messages if m["msg_type"] == "stream")
    page.run(MONITOR_2)  # closes the live monitor


@pytest.mark.long
def test_an_idle_kernel_replaces_a_widget_until_it_answers(page):
    page.run("%ddp_restart")  # a session that does not know yet that no widget answers
    shown = page.run("%ddp_monitor").displays
    assert VIEW in shown[0] and len(page.monitors()) == 1
    page.read_until(lambda: drawn(page) != [])
    assert "idle" in drawn(page)[0][1] and "ddp-html" in drawn(page)[0][1]
    page.run(SET_UP)

    # The widget answers late: no second view appears, and the next view is a widget.
    replaced = last_monitor(page)
    page.tell(replaced, {"kind": "here", "last": True})
    page.read_until(lambda: page.heard(replaced) != [])
    page.run("from ddp_notebook.widgets import under_cell\nunder_cell._AFTER_S = 60.0")  # the cell gets no view
    page.messages.clear()
    page.run(TRAINS.format(steps=20))
    page.run("under_cell._AFTER_S = 1.0")
    assert page.monitors() == [] and displays(page) == [], "the HTML of %ddp_monitor is the view"
    assert "%ddp_monitor shows one with all panels" in drawn(page)[-1][1]

    page.messages.clear()
    page.answers = True
    page.run("%ddp_monitor")
    assert len(page.monitors()) == 1 and replaced in page.closed
    assert "ddp-html" in drawn(page)[0][1], "what stood there before has stayed"
    page.messages.clear()
    page.run(TRAINS.format(steps=80))
    assert drawn(page) == [] and len(page.monitors()) == 1, "a small one, which a page hides that shows the other"
    page.run("%ddp_stop")


def last_monitor(page: Browser) -> str:
    """Return the comm id of the widget that was replaced last."""
    return [name for name, state in page.models.items() if "Monitor" in state.get("_anywidget_id", "")][-1]


@pytest.mark.long
def test_off_shows_nothing_and_html_no_widget(page):
    page.run(STOP)
    page.run("%ddp_start 2 --live off")
    page.run(SET_UP)
    page.run(TRAINS.format(steps=30))
    assert drawn(page) == [] and displays(page) == []
    page.run("%ddp_stop")

    page.run("%ddp_start 2 --live html")
    page.run(SET_UP)
    page.messages.clear()
    page.run(TRAINS.format(steps=40))
    assert page.monitors() == [] and len(drawn(page)) >= 2
    page.messages.clear()
    page.run("%ddp_monitor")
    page.run("%ddp_stop")
    assert page.monitors() == []
    assert "stopped" not in drawn(page)[-1][1] and "recorded" in drawn(page)[-1][1]


@pytest.mark.long
def test_a_quiet_cell_has_no_view_and_a_script_keeps_a_picture(page):
    page.run(STOP)
    page.run("%ddp_start 2 --live html")
    page.run(SET_UP)
    page.messages.clear()
    page.run(TRAINS.replace("%%on_all_ranks", "%%on_all_ranks --quiet").format(steps=40))
    assert drawn(page) == [] and displays(page) == []

    reply = finish(page, page.kernel.client.execute(TRAINS.format(steps=40), allow_stdin=False))
    assert reply.displays == []
    reply = finish(page, page.kernel.client.execute(MONITOR_2, allow_stdin=False))
    assert [set(shown) for shown in reply.displays] == [{"image/png", "text/plain"}]
    page.run("%ddp_stop")
