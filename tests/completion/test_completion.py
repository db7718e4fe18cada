"""Tab and Shift-Tab in cells of ranks, as front ends request them from a kernel."""

import time

import pytest

from tests.conftest import is_within, wait_until

SETUP = """%%on_all_ranks --quiet
from torch import nn
import time
class Net(nn.Module):
    '''A net of mine.'''
    def __init__(self):
        super().__init__()
        self.layer_one = nn.Linear(2, 2)
    def forward_all(self, x, scale=2):
        '''Forward of all.'''
        return x
    @property
    def danger(self):
        return dist.all_reduce(torch.ones(1))
my_model = Net()
if rank == 1: only_there = 3
"""


class Front:
    """Requests of a front end, with the messages that answer them."""

    def __init__(self, kernel):
        self.kernel, self.client = kernel, kernel.client
        self.last_s = self.first_s = 0.0  # time of the last answer, and of the first one after the start

    def ask(self, code, kind="complete", timeout_s=10.0):
        """Return the content of the reply to a request with the cursor at the end. Cells may go on."""
        began_s = time.perf_counter()
        asked = getattr(self.client, kind)(code, len(code))
        while True:
            message = self.client.get_shell_msg(timeout=timeout_s)
            if message["parent_header"].get("msg_id") == asked:
                self.last_s, self.asked = time.perf_counter() - began_s, asked
                return message["content"]

    def names(self, code):
        return self.ask(code)["matches"]


@pytest.fixture(scope="module")
def front(kernel):
    kernel.run("%ddp_start 2 --hang-after off")
    one = Front(kernel)
    assert one.names("%%on_all_ranks\nworld_si") == ["world_size"], "the first one after a start"
    one.first_s = one.last_s
    kernel.run(SETUP)
    return one


def reads_while_busy(kernel):
    return "7." in kernel.run("import ipykernel; print(ipykernel.__version__)").stdout[:2]


def test_names_come_from_the_ranks(front):
    content = front.ask("%%on_all_ranks\nx = my_model.layer_one.we")
    assert content["matches"] == ["weight"]
    assert content["metadata"]["_jupyter_types_experimental"][0]["type"] == "Parameter"
    assert (content["cursor_start"], content["cursor_end"]) == (38, 40)
    assert front.names("%%on_ranks 1\nonly_") == ["only_there"]
    assert front.names("%%on_ranks 0\nonly_") == []
    assert front.names("%%ddp_twice\nmy_mo") == ["my_model"]
    assert front.names("%ddp_memory my_mo") == ["my_model"]
    assert front.names("%ddp_whos my_mo") == ["my_model"] and front.names("%ddp_whos en") == []
    assert front.names("%ddp_verify F.mse_loss(my_mo") == ["my_model"]
    assert front.names("%%on_all_ranks --ranks 1 --quiet\nonly_") == ["only_there"]
    assert front.names("%on_all_ranks my_mo") == ["my_model"]
    assert front.names("%%on_all_ranks\nlocal = torch.ones(1)\nlocal.requires_grad_") == ["requires_grad_"]
    assert "--quiet" in front.ask("%%on_all_ranks --qui", timeout_s=60.0)["matches"], "options of the magic"
    of_notebook = front.ask("my_mo", timeout_s=60.0)["matches"]
    assert "my_model" not in of_notebook, "a plain cell runs in the notebook"


def test_requests_of_vscode(front):
    """VS Code requires a type and positions for each name. It requests help for a text that it shortens wrongly.

    Source: `provideCompletionItemsFromKernel` and `generateInspectRequestMessage` of vscode-jupyter
    """
    cell = "%%on_all_ranks\ny = my_model.layer_one.we"
    content = front.ask(cell)
    types = content["metadata"]["_jupyter_types_experimental"]
    assert content["status"] == "ok" and content["matches"] == [one["text"] for one in types] == ["weight"]
    assert [(one["start"], one["end"]) for one in types] == [(content["cursor_start"], content["cursor_end"])]
    column = len("y = my_model.layer_one.")
    help_ = front.ask(cell[:column] + "weight", "inspect")
    assert help_["status"] == "ok" and not help_["found"]


def test_names_under_auto(front, kernel):
    kernel.run("%ddp_auto on")
    try:
        assert front.names("my_mo") == ["my_model"]
        assert front.names("%%local\nmy_mo") == []
    finally:
        kernel.run("%ddp_auto off")


def test_help_comes_from_the_ranks(front):
    content = front.ask("%%on_all_ranks\nmy_model.forward_all(x, ", "inspect")
    assert content["found"]
    assert content["data"]["text/plain"].startswith("Signature: forward_all(x, scale=2)\nDocstring: Forward of all.\n")
    assert not front.ask("%%on_all_ranks\nnowhere", "inspect")["found"]
    assert front.ask("len", "inspect")["found"], "the notebook's own help"


def test_a_property_with_a_collective_is_not_called(front, kernel):
    assert front.names("%%on_all_ranks\nmy_model.danger.") == []
    assert not front.ask("%%on_all_ranks\nmy_model.danger", "inspect")["found"]
    reply = kernel.run("%%on_all_ranks --timeout 20\nt = torch.ones(1)\ndist.all_reduce(t)\nprint(t.item())")
    assert reply.stdout == "[0-1] 2.0\n"


def test_its_thread_cannot_start_an_operation(front, kernel):
    code = """%%on_all_ranks --timeout 20
import gc, threading
recorder = next(one for one in gc.get_objects() if type(one).__name__ == "Recorder")
def refused():
    recorder.refused_threads.add(threading.get_ident())
    for start in (lambda: dist.all_reduce(torch.ones(1)), lambda: dist.send(torch.ones(1), 1 - rank)):
        try: start()
        except RuntimeError as error: print(error)
    recorder.refused_threads.discard(threading.get_ident())
thread = threading.Thread(target=refused); thread.start(); thread.join()
print([one.name for one in threading.enumerate() if one.ident in recorder.refused_threads])
"""
    reply = kernel.run(code)
    assert "must not start an operation of a group, here a collective" in reply.stdout
    assert "must not start an operation of a group, here a send" in reply.stdout
    assert "['ddp-completion']" in reply.stdout


BUSY = {
    "wait": "if rank == 0: time.sleep(3)\ndist.barrier()",
    "loop": "end = time.time() + 3\nwhile time.time() < end: pass",
}


@pytest.mark.parametrize("body", BUSY)
def test_names_while_the_kernel_waits_for_a_cell(front, kernel, body):
    if not reads_while_busy(kernel):
        pytest.skip("ipykernel 6 reads requests in the main thread")
    cell = kernel.start(f"%%on_all_ranks --quiet\nprint('begun')\n{BUSY[body]}")
    try:
        time.sleep(0.5)
        took = []
        for _ in range(5):
            assert front.names("%%on_all_ranks\nmy_model.forward_a") == ["forward_all"]
            took.append(front.last_s)
        assert "Forward" in front.ask("%%on_all_ranks\nmy_model.forward_all", "inspect")["data"]["text/plain"]
        statuses = statuses_of(front, cell)
        assert statuses[-2:] == ["idle", "busy"], "idle for the request, while the status bar stays busy"
        assert is_within(sorted(took)[2], 0.15)
    finally:
        reply = finish(front, cell)
    assert reply["content"]["status"] == "ok"


def statuses_of(front, cell):
    """Return the states of the last request, before those of the cell's end."""
    found = []

    def read():
        message = front.client.get_iopub_msg(timeout=5)
        if message["msg_type"] == "status" and message["parent_header"].get("msg_id") == front.asked:
            found.append(message["content"]["execution_state"])
        return len(found) >= 3

    wait_until(read, 10)
    return found


def finish(front, cell):
    while True:
        message = front.client.get_iopub_msg(timeout=20)
        is_of_cell = message["parent_header"].get("msg_id") == cell
        if is_of_cell and message["content"].get("execution_state") == "idle":
            break
    while True:
        message = front.client.get_shell_msg(timeout=20)
        if message["parent_header"].get("msg_id") == cell:
            return message


def test_known_names_while_code_in_c_holds_the_gil(front, kernel):
    if not reads_while_busy(kernel):
        pytest.skip("ipykernel 6 reads requests in the main thread")
    assert "forward_all" in front.names("%%on_all_ranks\nmy_model.")
    cell = kernel.start("%%on_all_ranks --quiet\nsum(range(60_000_000))")
    time.sleep(0.4)
    assert front.names("%%on_all_ranks\nmy_model.forward_a") == ["forward_all"]
    assert is_within(front.last_s, 0.3)
    finish(front, cell)


def test_after_stop_the_kernel_answers_itself(front, kernel):
    kernel.run("%ddp_stop")
    assert kernel.run("my_local = 1").status == "ok"
    assert "my_local" in front.names("my_loca")
    left = kernel.run(
        "import threading; print([t.name for t in threading.enumerate() if t.name.startswith('ddp-completion')])"
    )
    assert left.stdout.strip() == "[]"
    kernel.run("%ddp_start 2")
    assert front.names("%%on_all_ranks\nworld_si") == ["world_size"]
    kernel.run("%ddp_stop")


def test_the_first_and_later_answers_are_fast(front):
    assert is_within(front.first_s, 0.05)
