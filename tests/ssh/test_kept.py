"""A kept session whose ranks are on a machine reached by ssh."""

from __future__ import annotations

import pytest

from ddp_notebook.registry import entries
from tests.conftest import wait_until
from tests.keep.conftest import kill, notebook, runtime  # noqa: F401  # fixtures


@pytest.mark.long
def test_ranks_over_ssh_go_on_in_another_kernel(ssh, python, notebook):  # noqa: F811
    first = notebook(f"%ddp_start --hosts one:2 --python {python} --keep 1")
    first.start(
        "%%on_all_ranks\nimport time\nfor step in range(40):\n    print('step', step); time.sleep(0.02)\nx = rank"
    )
    first.wait_for_text("step 5")
    kill(first)

    second = notebook()
    begun, rest = second.run("%ddp_attach"), second.run("%ddp_attach --wait")
    assert rest.status == "ok", rest.traceback
    shown = [line for line in begun.stdout.splitlines() if "step " in line]
    assert shown == [f"[0-1] step {step}" for step in range(40)]
    assert second.run("%on_all_ranks x").stdout == "[0] 0\n[1] 1\n"
    assert second.run("import ddp_notebook; ddp_notebook.current()['x']").displays[0]["text/plain"].count("1")
    assert second.run("%ddp_stop").status == "ok"
    wait_until(lambda: not entries.entries(), what="it has ended")
