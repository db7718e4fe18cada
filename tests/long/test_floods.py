"""Every kind of flood: one press ends it within a second, memory stays bounded, and the ranks continue."""

from __future__ import annotations

import time

import nbformat
import pytest
from nbclient import NotebookClient

from tests.conftest import wait_until
from tests.floods import FLOODS, code_of, run_raw, stop
from tests.keep.conftest import kill, notebook, runtime  # noqa: F401  # fixtures
from tests.long.watching import SUM as SUM_OF_FOUR
from tests.long.watching import expect_sums, start_ranks

pytestmark = [pytest.mark.long, pytest.mark.alone]
MOST_S = 1.0
MOST_MIB = 150  # largest growth of a process


@pytest.fixture(scope="module")
def ranks(kernel):
    assert kernel.run("%ddp_start 2").status == "ok"
    return kernel


@pytest.fixture
def begun(tmp_path):
    return tmp_path / "begun"


@pytest.mark.parametrize("name", FLOODS)
def test_one_press_ends_it(ranks, begun, name):
    stopped = stop(ranks, code_of(name, begun), begun)
    print(f"{name}: {stopped.took_s:.2f} s, {stopped.messages} messages, {stopped.grown_mib:.0f} MiB more")

    assert stopped.took_s < MOST_S and stopped.grown_mib < MOST_MIB, stopped
    assert stopped.ename == "KeyboardInterrupt" and "the cell was stopped" in stopped.evalue
    assert "no answer" not in stopped.evalue and "interrupted at" in stopped.evalue
    after = ranks.run("%%on_all_ranks\nrank")
    assert after.status == "ok" and after.stdout.endswith("[0] 0\n[1] 1\n")


def test_four_ranks_that_flood_in_four_ways(make_kernel, begun):
    kernel = make_kernel()
    start_ranks(kernel)
    names = ["widget values", "custom messages", "prints", "displays"]
    bodies = "\n".join(
        f"if rank == {rank}:\n" + "".join(f"    {line}\n" for line in code_of(name, begun, "").splitlines())
        for rank, name in enumerate(names)
    )
    stopped = stop(kernel, "%%on_all_ranks\n" + bodies, begun)
    assert stopped.took_s < MOST_S and stopped.grown_mib < MOST_MIB, stopped
    expect_sums(kernel.run(SUM_OF_FOUR))


@pytest.mark.parametrize("name", ["widget values", "custom messages", "displays", "prints"])
def test_a_job_that_floods_is_interrupted(ranks, begun, name):
    begun.unlink(missing_ok=True)
    run_raw(ranks, code_of(name, begun, "%%on_all_ranks --background"))
    wait_until(begun.exists, 20)
    time.sleep(1)
    began = time.monotonic()
    run_raw(ranks, "%ddp_interrupt")
    after = run_raw(ranks, "%%on_all_ranks\nprint('rank', rank)")
    assert after.ename == "" and after.at_s - began < 2 * MOST_S


@pytest.mark.parametrize("name", ["widget values", "custom messages", "displays", "prints"])
def test_a_front_end_that_reads_nothing_for_a_while(ranks, begun, name):
    stopped = stop(ranks, code_of(name, begun), begun, silent_s=8.0)
    assert stopped.took_s < 2 * MOST_S and stopped.grown_mib < MOST_MIB, stopped
    assert stopped.ename == "KeyboardInterrupt"
    assert run_raw(ranks, "%%on_all_ranks\npass").ename == ""


def test_in_a_notebook_that_a_program_executes(begun):
    """nbclient and papermill interrupt the kernel once when the time of a cell is over, and continue."""
    document = nbformat.v4.new_notebook()
    sources = [
        "%load_ext ddp_notebook\n%ddp_start 2",
        code_of("widget values", begun),
        "%%on_all_ranks\nrank",
        "%ddp_stop",
    ]
    document.cells = [nbformat.v4.new_code_cell(source) for source in sources]
    client = NotebookClient(document, kernel_name="python3", timeout=30, interrupt_on_timeout=True, allow_errors=True)
    with client.setup_kernel():
        client.execute_cell(document.cells[0], 0)
        client.timeout = 4
        began = time.monotonic()
        client.execute_cell(document.cells[1], 1)
        assert time.monotonic() - began < 4 + 2 * MOST_S
        client.timeout = 30
        client.execute_cell(document.cells[2], 2)
        client.execute_cell(document.cells[3], 3)
    # The line of a late rank is a display.
    shown = "".join(output.get("text") or output["data"]["text/plain"] for output in document.cells[2].outputs)
    assert "[0] 0" in shown and "[1] 1" in shown
    [state] = [
        model["state"]["value"]
        for model in document.metadata.get("widgets", {})
        .get("application/vnd.jupyter.widget-state+json", {})
        .get("state", {})
        .values()
        if model["model_name"] == "IntProgressModel"
    ][:1] or [1]
    assert state > 0


@pytest.mark.parametrize("name", ["widget values", "custom messages", "displays", "prints"])
def test_a_kept_session_that_two_notebooks_see(notebook, begun, name):  # noqa: F811
    """One notebook drives and stops the flood, the other only looks.

    Afterwards the driver ends, and the next flood has no notebook: the keeper reads it, and an attaching notebook ends
    it.
    """
    driver = notebook("%ddp_start 2 --keep 1")
    other = notebook()
    assert "This notebook has the monitor" in other.run("%ddp_attach").stdout
    stopped = stop(driver, code_of(name, begun), begun)
    assert stopped.took_s < MOST_S and stopped.grown_mib < MOST_MIB, stopped
    begun.unlink()
    run_raw(driver, code_of(name, begun, "%%on_all_ranks --background"))
    wait_until(begun.exists, 20)
    kill(driver)
    time.sleep(3)
    began = time.monotonic()
    for code in ("%ddp_attach --take-over", "%ddp_interrupt", "%%on_all_ranks\nassert world_size == 2"):
        assert run_raw(other, code).ename == ""
    assert time.monotonic() - began < 20
