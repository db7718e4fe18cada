"""Cells with more output than any front end can process: one press stops them, and the last value is shown."""

from __future__ import annotations

import time

import pytest

from tests.conftest import is_within, wait_until
from tests.floods import code_of, stop
from tests.test_widgets import VIEW, FrontEnd

VALUES = """%%on_all_ranks
import ipywidgets as widgets
from IPython.display import display
bar = widgets.IntProgress(max=20_000, description=f'bar of {rank}'); display(bar)
handle = display('start', display_id=True)
for i in range(20_001): bar.value = i; handle.update(f'{i} of {rank}')
"""
QUICK = [
    "widget values",
    "clear_output",
    "custom messages",
    "text and widgets",
    "a subprocess",
    "a new metric each time",
]
MESSAGES = """%%on_all_ranks
from comm import create_comm
comm = create_comm(target_name='flood')
for i in range(600):
    comm.send({'n': i, 'rank': rank}, buffers=[b'%d' % i])
print('all are sent')
"""


@pytest.fixture(scope="module")
def ranks(kernel):
    assert kernel.run("%ddp_start 2").status == "ok"
    return kernel


@pytest.fixture
def begun(tmp_path):
    return tmp_path / "begun"


@pytest.mark.alone
@pytest.mark.parametrize("name", QUICK)
def test_one_press_ends_a_flood(ranks, begun, name):
    stopped = stop(ranks, code_of(name, begun), begun, after_s=1.5)

    assert is_within(stopped.took_s, 1.0), stopped
    assert stopped.ename == "KeyboardInterrupt"
    assert "ranks 0,1 were interrupted at cell line" in stopped.evalue or stopped.evalue.count("at cell line") == 2
    most_mib = 150 if "metric" in name else 60  # the kernel imports matplotlib for the picture of metrics
    assert stopped.grown_mib < most_mib, stopped
    after = ranks.run("%%on_all_ranks\nrank")
    assert after.status == "ok" and after.stdout.endswith("[0] 0\n[1] 1\n")


@pytest.mark.long
def test_the_last_value_and_the_last_update_are_always_shown(ranks):
    front_end = FrontEnd(ranks)
    began = time.monotonic()
    reply = front_end.run(VALUES)
    models = {model.get("description"): model for model in front_end.models.values()}

    assert [models[f"bar of {rank}"]["value"] for rank in (0, 1)] == [20_000, 20_000]
    assert {"20000 of 0", "20000 of 1"} <= {data["text/plain"].strip("'") for data in reply.displays}
    assert len([data for data in reply.displays if VIEW in data]) == 2
    messages = [one for one in front_end.messages if one["msg_type"] == "comm_msg"]
    assert len(messages) < 100 + 60 * (time.monotonic() - began), "a value that waits is replaced by the next"


def test_custom_messages_all_arrive_in_order_with_their_buffers(ranks):
    front_end = FrontEnd(ranks)
    front_end.run(MESSAGES)
    came = [one for one in front_end.messages if one["msg_type"] == "comm_msg"]
    for rank in (0, 1):
        of_rank = [one for one in came if one["content"]["data"]["rank"] == rank]
        assert [one["content"]["data"]["n"] for one in of_rank] == list(range(600))
        assert [bytes(one["buffers"][0]) for one in of_rank] == [b"%d" % n for n in range(600)]


def test_a_widget_opens_before_its_view_with_values_in_order(ranks):
    front_end = FrontEnd(ranks)
    front_end.run(
        "%%on_all_ranks\nimport ipywidgets as widgets\nfrom IPython.display import display\n"
        "for i in range(30):\n    text = widgets.IntText(value=i)\n    text.value = 100 + i\n    display(text)"
    )
    known: set[str] = set()
    for message in front_end.messages:
        content = message["content"]
        if message["msg_type"] == "comm_open":
            known.add(content["comm_id"])
        elif message["msg_type"] == "comm_msg":
            assert content["comm_id"] in known
        elif message["msg_type"] == "display_data" and VIEW in content["data"]:
            assert content["data"][VIEW]["model_id"] in known
    values = sorted(model["value"] for model in front_end.models.values() if model.get("_model_name") == "IntTextModel")
    assert values == sorted(2 * [100 + i for i in range(30)])


def test_ranks_answer_while_their_cell_floods(ranks, begun):
    """In the background, because a foreground cell blocks the prompt."""
    message = ranks.start(code_of("custom messages", begun, "%%on_all_ranks --background"))
    ranks.finish(message)
    until = time.monotonic() + 20
    while not begun.exists():
        assert time.monotonic() < until
        time.sleep(0.01)

    def answers() -> int:
        reply = ranks.run("%ddp_status")
        assert reply.status == "ok" and "no answer" not in reply.stdout + reply.stderr, reply
        return reply.stdout.count("cell line 5")

    wait_until(lambda: answers() == 2, what="both ranks flood: one may begin before the other")
    assert ranks.run("%ddp_interrupt").status == "ok"
    assert ranks.run("%%on_all_ranks\npass").status == "ok"


@pytest.mark.long
def test_cells_end_while_a_process_prints_lines_in_a_loop(ranks):
    reply = ranks.run("%%on_all_ranks\nimport subprocess\nwriter = subprocess.Popen(['yes'])", timeout_s=60)
    try:
        assert reply.status == "ok"
        for _ in range(2):
            reply = ranks.run("%%on_all_ranks\nprint('alive')", timeout_s=60)
            assert reply.status == "ok" and " y\n" in reply.stdout and "not shown:" in reply.stderr
    finally:
        assert ranks.run("%%on_all_ranks\nwriter.kill()", timeout_s=60).status == "ok"
    assert "alive\n" in ranks.run("%%on_all_ranks\nprint('alive')", timeout_s=60).stdout
