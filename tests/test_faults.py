"""Cells that once blocked a session forever."""

from __future__ import annotations

import pytest

from ddp_notebook.errors import RankError, UsageError

ODD_ERRORS = {
    "frozen": "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass E(Exception): x: int = 1\nraise E()",
    "exceptions is None": "class E(Exception): exceptions = None\nraise E()",
    "no text": "class E(Exception):\n    def __str__(self): raise ValueError('no text')\nraise E()",
    "a group": "raise ExceptionGroup('many', [ValueError(1), KeyError(2)])",
    "data that is no JSON": "display({'text/plain': 'x', (1, 2): 3}, raw=True)",
}


@pytest.mark.parametrize("code", ODD_ERRORS.values(), ids=ODD_ERRORS)
def test_whatever_a_cell_raises_it_ends(session, code):
    with pytest.raises(RankError):
        session.run(code, timeout_s=20)
    assert session.run("dist.barrier()", timeout_s=20).ok


def test_code_that_is_no_text_is_refused(session):
    for code in (b"1 + 1", 5, None):
        with pytest.raises(UsageError, match=f"code must be text, .*, got {type(code).__name__}"):
            session.run(code)
    assert session.run("pass").ok


def test_a_forked_child_may_display_and_may_not_ask(session):
    code = (
        "import multiprocessing as mp\nfrom IPython.display import HTML\n"
        "def child():\n"
        "    display(HTML('x'))\n"
        "    try: input('who? ')\n"
        "    except EOFError as error: print(error)\n"
        "process = mp.get_context('fork').Process(target=child); process.start(); process.join(20)\nprocess.exitcode"
    )
    result = session.run(code, timeout_s=30)
    assert result[0].result == "0"
    assert result[0].stdout.splitlines()[-2:] == [
        "<IPython.core.display.HTML object>",
        "input() does not work in a process forked from a rank",
    ]
    assert session.run("display(1)", timeout_s=20).ok


def test_results_keep_the_last_form_of_a_display(session):
    result = session.run(
        "from IPython.display import HTML\nhandle = display(HTML('first'), display_id=True)\n"
        "for i in range(100): handle.update(HTML(str(i)))"
    )
    assert [data["text/html"] for data in result[0].displays] == ["99"]


def test_the_next_cell_reports_the_death_of_an_idle_rank(make_session_alone, capsys):
    """The last test: it replaces the module's session."""
    session = make_session_alone(2)
    future = session.submit("import time; time.sleep(1); print('done')", ranks=0)
    import os
    import signal

    os.kill(session.ranks.pids()[1], signal.SIGKILL)
    assert future.result(20)[0].stdout == "done\n"
    result = session.run("rank")
    assert result.ranks == [0]
    assert "rank 1 died: this cell runs on rank 0. %ddp_heal replaces" in capsys.readouterr().err
