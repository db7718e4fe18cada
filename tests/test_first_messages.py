"""The first message of a connection or a process, as a line of text."""

from __future__ import annotations

import pytest

from ddp_notebook.messages.encoding import VERSION
from ddp_notebook.messages.first_messages import (
    Admitted,
    OtherVersionError,
    Refused,
    StartCarrier,
    StartSshServer,
    StopKeeper,
    from_line,
    to_line,
)

START = StartSshServer(wire=VERSION, env={"A": "b\nä"}, lease_s=2.5)


def test_a_line_holds_a_message():
    line = to_line(START)
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    assert from_line(line, StartSshServer) == from_line(line.decode(), StartCarrier, StartSshServer) == START


def test_a_message_of_another_version_names_both_versions():
    other = to_line(StartSshServer(wire=VERSION + 1, env={}, lease_s=1.0))
    for line in (other, other.replace(b'"lease_s"', b'"lease"')):  # with other fields too
        with pytest.raises(OtherVersionError, match=f"version {VERSION + 1} .* version {VERSION}:"):
            from_line(line, StartSshServer)


@pytest.mark.parametrize(
    "line",
    [b"", b"{}\n", b"\xff\n", b'{"env": {}, "lease_s": 1.0}\n', b'["StartSshServer", {}]\n', to_line(Admitted())],
)
def test_another_line_is_refused_and_not_shown(line):
    with pytest.raises(ValueError, match=r"^expected the message StartSshServer of version \d+, got another line$"):
        from_line(line, StartSshServer)


def test_secrets_are_not_in_errors():
    line = to_line(StopKeeper(secret="hidden"))
    with pytest.raises(ValueError, match="expected") as raised:
        from_line(line, Refused)
    assert "hidden" not in str(raised.value) and "hidden" not in str(raised.value.__cause__)
