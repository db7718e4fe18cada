"""Wrong arguments of the public API: one sentence names the argument, and the session still works."""

from __future__ import annotations

import pytest

import ddp_notebook
from ddp_notebook import RecordOptions, UsageError

# Calls of functions that need no session, and the beginning of the error message.
_WITHOUT_SESSION = {
    "start(n=2)": "start() has no argument 'n'; did you mean world_size?",
    "start(world=2)": "start() has no argument 'world'; did you mean world_size?",
    "start(2, gpu='none')": "start() has no argument 'gpu'; did you mean gpus?",
    "start(2, backends='gloo')": "start() has no argument 'backends'; did you mean backend?",
    "start(2, 'gloo')": "start() takes only world_size without a name, got 2 values; write others by name, as backend",
    "start(2, nonsense=1)": "start() has no argument 'nonsense'; its arguments are world_size, backend, gpus,",
    "start(2, gpus=5)": "gpus must be text, a sequence or None, got 5",
    "start(2, hosts=5)": "--hosts must name hosts, got 5; write names of your ~/.ssh/config",
    "check(n=2)": "check() has no argument 'n'; did you mean world_size?",
    "check(2, nonsense=1)": "check() has no argument 'nonsense'; its arguments are world_size, backend,",
    "load(5)": "path must be text or a path, got 5",
    "load()": "load(): missing a required argument: 'path'",
    "attach_session('x', tke_over=True)": "attach_session() has no argument 'tke_over'; did you mean take_over?",
    "Ssh(5)": "--hosts must name hosts, got 5; write names of your ~/.ssh/config",
    "Ssh('gpu1', sync=5)": "--sync must be a folder, e.g. --sync ., got 5",
}
_OF_SESSION = {
    "session.pull('rank', sfe=True)": "pull() has no argument 'sfe'; did you mean safe?",
    "session.pull('rank', rank=1)": "pull() has no argument 'rank'; did you mean ranks?",
    "session.pull('rank', report=5)": "report must be a function, got 5",
    "session.stop(5)": "stop() takes no value without a name, got 1 values",
    "session.peek(5)": "expression must be text, got 5",
    "session.report([])": "cell must be a whole number or None, got []",
    "session.record(vlues=1)": "record() has no argument 'vlues'",
    "session.trace(5)": "path must be text or a path, got 5",
    "session.trace('a\\0b')": "path must end in a valid file name such as run.npz, got 'a\\x00b'",
    "session.trace('\\ud800')": "path must end in a valid file name such as run.npz, got '\\ud800'",
    "session.trace('x' * 300)": "path must end in a valid file name such as run.npz, got 'xxx",
    "session.recording.save('')": "path must end in a valid file name such as run.npz, got ''",
    "session.recording.collectives(since='x')": "since must be a whole number, got 'x'",
    "session.files.fetch('a', to='b\\0')": "to must be a folder name without null characters, got 'b\\x00'",
    "session.ranks.heal(names=5)": "names must be",
    # The ranks could not read a message with a value of another type, and the cell would never end.
    "session.run('rank', execution_count='x')": "execution_count must be a whole number or None, got 'x'",
    "session.submit('rank', execution_count='x')": "execution_count must be a whole number or None, got 'x'",
    "session.run('rank', file=5)": "file must be text, got 5",
    "session.run('rank', fold='no')": "fold must be True, False or None, got 'no'",
    "session.run('rank', record=RecordOptions(full_bytes='x'))": "RecordOptions: full_bytes must be a whole number",
    "session.run('rank', record=RecordOptions(watch=[5]))": "RecordOptions: watch must be names of variables, got (5,)",
}


@pytest.mark.parametrize("call", _WITHOUT_SESSION)
def test_a_wrong_argument_of_a_function_is_named(call):
    with pytest.raises(UsageError) as refused:
        eval(f"ddp_notebook.{call}")
    assert str(refused.value).startswith(_WITHOUT_SESSION[call])


@pytest.mark.parametrize("call", _OF_SESSION)
def test_a_wrong_argument_of_a_method_is_named(session, call):
    with pytest.raises(UsageError) as refused:
        eval(call, {"session": session, "RecordOptions": RecordOptions})
    assert str(refused.value).startswith(_OF_SESSION[call])


def test_the_ranks_go_on_after_all_of_them(session):
    assert session.run("rank", quiet=True)[1].result == "1"


def test_an_error_of_the_users_own_function_stays_as_it_is(session):
    def report(_):
        raise TypeError("mine")

    session.run("x = torch.zeros(3_000_000)", quiet=True)
    with pytest.raises(TypeError, match="mine"):
        session.pull("x", report=report)


def test_a_cell_ends_where_it_cannot_begin(session):
    """A cell may have added an observer to the shell, which raises at the beginning of each later cell. The traceback
    must contain only frames of IPython and the user."""
    observer = "left = [1, 2]\ndef bad(_):\n    if left: left.pop(); raise ValueError('mine')\n"
    session.run(f"{observer}get_ipython().observe(bad, 'execution_count')", quiet=True)
    for number in (90, 80):
        with pytest.raises(ddp_notebook.RankError, match="ValueError: mine") as failed:
            session.run("rank", quiet=True, execution_count=number, timeout_s=20)
        assert "runner.py" not in "".join(failed.value.tracebacks[0])
    assert session.run("get_ipython().unobserve_all()\nrank", quiet=True, execution_count=91)[1].result == "1"
