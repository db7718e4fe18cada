"""Right programs, random faults and random stops under `%ddp_verify`."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import pytest

from tests.verify_programs import FAULTS, LOSS, RIGHT, SETUP, STATE

pytestmark = pytest.mark.long
_BATCH = ["x", "y"]


def test_right_programs_have_no_finding(session):
    found = {}
    for number, (code, loss, options) in enumerate(RIGHT):
        session.run(SETUP + code, quiet=True)
        result = session.verify(loss, _BATCH, **options)
        if not result.is_right:
            found[number, code, loss] = repr(result)
    assert len(RIGHT) >= 60 and found == {}


def test_faults_have_the_right_cause(session):
    chosen = random.Random(7)
    noticed, wrong = 0, {}
    cases = [chosen.choice(FAULTS["sharded" if number < 12 else "ddp"]) for number in range(40)]
    for number, (cause, code, loss) in enumerate(cases):
        places = {"R": str(chosen.randrange(2)), "P": chosen.choice(["0.weight", "0.bias", "3.weight", "3.bias"])}
        for name, value in places.items():
            code = code.replace(f"<{name}>", value)
        session.run(SETUP + code, quiet=True)
        result = session.verify(loss, _BATCH)
        noticed += not result.is_right
        if [one.cause for one in result.findings][:1] != [cause]:
            wrong[number, cause, code] = repr(result)
    assert noticed == 40 and wrong == {}


@pytest.mark.parametrize("model", ["DDP(net(norm=True))", "sharded()"])
def test_a_stopped_comparison_restores_everything(session, model):
    chosen = random.Random(11)
    code = f"{SETUP}model = {model}\ncounter = [1]\n{LOSS}.backward()\nopt = torch.optim.SGD(model.parameters(), 0.1)\n"
    # The model takes long enough for a stop in each of its runs.
    slow = "model.register_forward_hook(lambda *_: __import__('time').sleep(0.02))\n"
    session.run(code + slow + STATE, quiet=True)
    loss = f"(counter.append(1), {LOSS})[1]"
    began = time.monotonic()
    session.verify(loss, _BATCH)
    lasts_s = time.monotonic() - began
    stopped, changed = 0, []
    for number in range(25):
        before = session.run("digest()", quiet=True)
        timer = threading.Timer(chosen.random() * lasts_s, os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            session.verify(loss, _BATCH)
            timer.join()
            time.sleep(0.01)
        except KeyboardInterrupt:
            stopped += 1
        timer.join()
        after = session.run("digest()", quiet=True, timeout_s=30)
        if any(before[rank].result != after[rank].result for rank in (0, 1)):
            changed.append(number)
        session.run(f"opt.zero_grad(); {LOSS}.backward(); opt.step()", quiet=True, timeout_s=30)
    assert changed == [] and stopped > 5
