"""Detection of the front end: the thread in which the kernel reads answers shows when views can answer."""

from __future__ import annotations

import threading
import time

import pytest

from ddp_notebook.widgets import frontend_probe
from ddp_notebook.widgets.frontend_probe import ANSWER_S, FrontendProbe


@pytest.fixture(autouse=True)
def nothing_is_known_before(monkeypatch):
    monkeypatch.setattr(frontend_probe, "_before", "")


def beside(call):
    """Call it in a separate thread, as a subshell does."""
    found = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


def test_a_reply_in_another_thread_is_handled_while_a_cell_runs():
    view = FrontendProbe()
    assert repr(view) == "<FrontendProbe: not known yet>"
    assert beside(view.heard) == "now" == view.when
    assert repr(view) == "<FrontendProbe: now>"


def test_a_reply_in_the_main_thread_is_handled_after_the_cell():
    view = FrontendProbe()
    assert view.heard() == "" and view.is_there, "JupyterLab may not have its subshell yet"
    assert view.heard(is_last=True) == "after the cell"
    assert repr(view) == "<FrontendProbe: after the cell>"


def test_a_late_main_thread_reply_keeps_the_earlier_result():
    view = FrontendProbe()
    beside(view.heard)
    assert view.heard() == "" and repr(view) == "<FrontendProbe: now>"
    assert view.heard(is_last=True) == "after the cell", "another front end, which never sends beside it"


def test_a_view_is_overdue_after_its_time_until_one_answers():
    view = FrontendProbe()
    now_s = time.monotonic()
    assert not view.is_overdue(now_s)
    assert repr(view) == "<FrontendProbe: not known yet>"
    assert view.is_overdue(now_s - ANSWER_S - 0.1)
    assert repr(view) == "<FrontendProbe: no view has answered>"
    assert view.is_overdue(now_s), "and so are the next ones"
    view.heard()
    assert not view.is_overdue(now_s - 100) and repr(view) == "<FrontendProbe: not known yet>"


def test_the_next_session_knows_what_this_one_has_found():
    assert not FrontendProbe().is_there
    beside(FrontendProbe().heard)
    later = FrontendProbe()
    assert later.is_there and later.when == "now" and not later.is_overdue(0.0)
