"""The lessons in Chromium: the browser shows the result of NumPy for any choice, on 2, 3 and 4 ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Locator, expect

from ddp_notebook.lessons.algorithms import plans
from ddp_notebook.lessons.collectives import theory
from tests.browser.jupyterlab import JupyterLab, open_notebook
from tests.browser.test_jupyterlab import write_notebook
from tests.conftest import wait_until
from tests.lessons.test_algorithms import by_hand as algorithm_by_hand
from tests.lessons.test_algorithms import sent_in_steps
from tests.lessons.test_collectives import by_hand

STOP = 7  # the last cell
PICTURES = STOP - 1  # one remaining picture for each lesson

# The numbers in a table's cells, by row and column.
NUMBERS = """root => [...root.querySelectorAll('table.ddpl-grid tbody tr:not(.ddpl-arrow)')].map(row =>
  [...row.querySelectorAll('td')].map(td => [...td.querySelectorAll('.ddpl-cell')].map(
    one => one.value ?? one.querySelector('span')?.textContent ?? one.textContent)))"""


class Lesson:
    """One lesson on the page."""

    def __init__(self, lab: JupyterLab, cell: int) -> None:
        self.root: Locator = lab._cell(cell).locator(".ddpl")
        expect(self.root).to_be_visible(timeout=20_000)

    @property
    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = self.root.evaluate("root => root.ddpLesson.state()")
        return found

    @property
    def inspect(self) -> dict[str, Any]:
        found: dict[str, Any] = self.root.evaluate("root => root.ddpLesson.inspect()")
        return found

    @property
    def numbers(self) -> list[list[list[str]]]:
        found: list[list[list[str]]] = self.root.evaluate(NUMBERS)
        return found

    def idle(self) -> None:
        expect(self.root).to_have_attribute("aria-busy", "false", timeout=20_000)
        assert self.state.get("error", "") == ""

    def choose(self, label: str, value: str) -> None:
        self.root.get_by_label(label, exact=True).select_option(value)
        self.idle()

    def press(self, name: str) -> None:
        self.root.get_by_role("button", name=name, exact=True).click()
        self.idle()


@pytest.mark.long
@pytest.mark.browser
@pytest.mark.timeout(600)  # chromium may have to be installed first
@pytest.mark.parametrize("size", [3, *(pytest.param(size, marks=pytest.mark.long) for size in (2, 4))])
def test_what_is_drawn_is_what_numpy_says(tmp_path, size):
    path = tmp_path / "lessons.ipynb"
    write_notebook(
        path,
        [
            f"%load_ext ddp_notebook\nfrom ddp_notebook import lessons\n%ddp_start {size} --backend gloo",
            "lessons.collective('all_reduce')",
            "lessons.algorithm('ring all_reduce')",
            "lessons.point_to_point('blocking')",
            "lessons.rpc('calls')",
            "lessons.product()",
            "lessons.mesh()",
            "%ddp_stop",
        ],
    )
    with open_notebook(path) as lab:
        for cell in range(STOP):
            lab.run_cell(cell)
            lab.wait_until_done(cell)
        explorer, stepper, scene, remote, product, mesh = (Lesson(lab, cell) for cell in range(1, STOP))
        predict(explorer, size)
        every_collective(explorer, size)
        wrong_use(explorer)
        every_algorithm(stepper, size)
        messages(scene)
        calls_to_other_ranks(remote, size)
        matrices_in_pieces(product, size)
        training_on_a_mesh(mesh, size)
        lab.run_cell(STOP)
        lab.wait_until_done(STOP)
        # The remaining pictures need no kernel.
        expect(lab.page.locator(".ddpl")).to_have_count(0, timeout=20_000)
        expect(lab.page.locator(".jp-OutputArea-output img")).to_have_count(PICTURES)
        lab.page.keyboard.press("Control+s")
        wait_for_saved(path)


def wait_for_saved(path: Path) -> None:
    def pictures() -> list[dict[str, Any]]:
        try:
            cells = json.loads(path.read_text())["cells"]
        except json.JSONDecodeError:  # it is being written
            return []
        data = [out.get("data", {}) for cell in cells for out in cell["outputs"]]
        return [one for one in data if "image/png" in one]

    wait_until(lambda: len(pictures()) == PICTURES, what="the pictures are not in the saved notebook")
    saved = path.read_text()
    assert "application/vnd.jupyter.widget-view+json" not in saved, "no 'model not found'"


def predict(explorer: Lesson, size: int) -> None:
    """Edit an input, then predict one cell correctly by typing, one correctly by adding inputs, and one incorrectly."""
    cells = explorer.root.locator("tbody tr").first.locator("input")
    cells.nth(0).fill("7")
    cells.nth(0).press("Tab")
    guesses = explorer.root.locator("input.ddpl-guess")
    total = 7 + sum(10**rank for rank in range(1, size))
    guesses.nth(0).fill(str(total))
    guesses.nth(1).fill("5")
    guesses.nth(4).focus()  # rank 1, element 0
    for rank in range(size):
        explorer.root.get_by_role("button", name=f"of rank {rank}").click()
    assert guesses.nth(4).input_value() == str(total)

    explorer.press("Run on the ranks")
    assert explorer.root.locator(".ddpl-right").count() == 0, "not before it is revealed"
    reveal = explorer.root.get_by_role("button", name="Reveal")
    expect(reveal).to_be_focused()
    explorer.root.page.keyboard.press("Enter")

    assert explorer.root.locator(".ddpl-right").count() == 2
    wrong = explorer.root.locator(".ddpl-false")
    assert wrong.count() == 1
    assert "predicted wrong: 5" in (wrong.get_attribute("aria-label") or "")
    expect(explorer.root.locator(".ddpl-verdict")).to_have_text("2 of 3 cells right. NumPy computes the same numbers.")
    assert [float(x) for x in explorer.numbers[1][0]] == [total, *(k * (10**size - 1) / 9 for k in (2, 3, 4))]


def every_collective(explorer: Lesson, size: int) -> None:
    """On 3 ranks, as in `make test`, with few reductions; on 2 and 4 with all of them."""
    for op in theory.OPS:
        explorer.choose("collective", op)
        dtypes = ("float32", "int64") if size != 3 or op == "all_reduce" else ("float32",)
        for dtype in dtypes if op in theory.REDUCING else ("",):
            if dtype:
                explorer.choose("dtype", dtype)
            legal = theory.legal_reduce_ops(dtype) if dtype else ("",)
            some = legal if dtype == "float32" else legal[-3:]  # for integers the bitwise ones
            for reduce_op in some[-1:] if size == 3 else some:
                if reduce_op:
                    explorer.choose("reduce op", reduce_op)
                run_and_compare(explorer, op)
        if op in theory.REDUCING:
            explorer.choose("dtype", "float32")
    explorer.choose("collective", "broadcast")
    explorer.choose("root", str(size - 1))
    run_and_compare(explorer, "broadcast")
    explorer.choose("collective", "all_to_all")
    sizes = explorer.root.get_by_label("elements a chunk (one number, or one for each receiver)")
    sizes.fill(",".join(str(1 + rank % 3) for rank in range(size)))
    sizes.press("Enter")
    explorer.idle()
    run_and_compare(explorer, "all_to_all")
    if size > 2:
        explorer.choose("collective", "all_gather")
        explorer.root.get_by_role("checkbox", name="1").uncheck()
        explorer.idle()
        run_and_compare(explorer, "all_gather")
        explorer.root.get_by_role("checkbox", name="1").check()
        explorer.idle()


def run_and_compare(explorer: Lesson, op: str) -> None:
    explorer.press("Run on the ranks")
    state, (before, after) = explorer.state, explorer.numbers
    assert state["op"] == op and state["agrees"] is True
    if op == "barrier":
        assert all(float(one[0].split()[0]) >= 40 * (len(after) - 1) - 1 for one in after), after
        return
    inputs = {rank: [float(x) for x in one] for rank, one in enumerate(before)}
    ranks, sizes = state["group"], state["sizes"]
    call = SimpleNamespace(
        op=op,
        ranks=ranks,
        root=state["root"],
        peer=state["peer"],
        reduce_op=state["reduce_op"],
        chunk_sizes=sizes if len(sizes) > 1 else sizes * len(ranks),
    )
    for rank, wanted in by_hand(SimpleNamespace(call=call, inputs=inputs)).items():  # type: ignore[arg-type]
        drawn = [float(x) for x in after[rank]]
        assert np.allclose(drawn, wanted, rtol=1e-3), (op, state["reduce_op"], rank, drawn, wanted)


def wrong_use(explorer: Lesson) -> None:
    explorer.choose("collective", "all_reduce")
    explorer.root.locator("summary").click()
    explorer.choose("what is wrong", "size")
    explorer.press("Try it on the ranks")
    expect(explorer.root.locator(".ddpl-told")).to_contain_text("is not the same on all ranks")
    explorer.choose("what is wrong", "missing rank")
    explorer.press("Try it on the ranks")
    expect(explorer.root.locator(".ddpl-told")).to_contain_text("waiting in all_reduce")
    run_and_compare(explorer, "all_reduce")


def every_algorithm(stepper: Lesson, size: int) -> None:
    """On 3 ranks one of each kind."""
    for name in plans.ALGORITHMS if size != 3 else ("halving and doubling", "parameter server", "ring reduce_scatter"):
        stepper.choose("algorithm", name)
        sizes = [2, 1, 3, 0][:size]
        field = stepper.root.get_by_label("elements of each chunk", exact=True)
        field.fill(", ".join(map(str, sizes)))
        field.press("Enter")
        stepper.idle()
        steps = stepper.state["steps"]
        for _ in range(steps):
            stepper.press("Step ▶")
        state = stepper.state
        assert state["taken"] == steps == plans.steps(name, size)
        digits = [chunk + 1 for chunk, length in enumerate(sizes) for _ in range(length)]
        inputs = {rank: [10.0**rank * digit for digit in digits] for rank in range(size)}
        wanted = algorithm_by_hand(name, sizes, inputs)
        ends = np.cumsum([0, *sizes])
        for chunk, row in enumerate(stepper.numbers):
            for rank in range(size):
                if name == "ring reduce_scatter" and rank != chunk:
                    continue
                mine = wanted[rank] if name == "ring reduce_scatter" else wanted[rank][ends[chunk] : ends[chunk + 1]]
                drawn = [float(x) for x in row[rank][0].split() if x not in ("empty", "·")]
                assert drawn == sorted(set(mine.tolist())), (name, chunk, rank)  # equal numbers are drawn once
        links = {(src, dst): nbytes for src, dst, nbytes in state["states"][-1]["links"]}
        assert links == {link: 4 * n for link, n in sent_in_steps(name, sizes).items()}
        expect(stepper.root).to_contain_text("✓ On every link exactly the bytes that theory says.")
        for nbytes in links.values():
            expect(stepper.root.locator(".ddpl-bytes", has_text=f"{nbytes} B").first).to_be_attached()
    stepper.root.get_by_role("button", name="Compare with").click()
    stepper.idle()
    expect(stepper.root).to_contain_text("✓ All ranks have what dist.reduce_scatter(y, chunks) gives.")
    stepper.root.get_by_label("step", exact=True).press("Home")
    expect(stepper.root.locator(".ddpl-rule")).to_contain_text("Start. Next: rank 0 sends")


def messages(scene: Lesson) -> None:
    expect(scene.root.locator(".ddpl-said")).to_contain_text("rank 0 waited")
    assert scene.root.locator(".ddpl-part-waiting").count() >= 1
    assert scene.root.locator(".ddpl-message-arrow").count() == 1
    scene.choose("scene", "race")
    # On a busy machine all data is sent before the sender changes anything, as in any race.
    expect(scene.root.locator(".ddpl-said")).to_contain_text(re.compile(r"\b(50|0)% changed"))
    assert scene.root.locator(".ddpl-changed").count() == 128
    scene.choose("scene", "deadlock")
    expect(scene.root.locator(".ddpl-message")).to_contain_text("rank 0: waiting in send")
    assert scene.root.locator(".ddpl-stuck").count() == 2


def calls_to_other_ranks(remote: Lesson, size: int) -> None:
    """Guess incorrectly, run, step with keys, reveal; then another program, whose references are deleted one by one."""
    arrows, bars = remote.root.locator(".ddps-sent-call"), remote.root.locator(".ddps-runs")
    expect(remote.root.locator(".ddps-sequence")).not_to_be_visible()
    remote.root.get_by_role("radio", name="the rank that calls it").check()
    remote.press("Run on the ranks")
    assert arrows.count() == 1 and bars.count() == 0, "the first call is on its way"
    expect(remote.root.get_by_role("button", name="Step ▶", exact=True)).to_be_focused()
    for _ in range(3):
        remote.root.page.keyboard.press(".")
    assert remote.inspect["at"] == 4
    remote.root.page.keyboard.press(",")
    assert remote.inspect["at"] == 3
    assert remote.root.get_by_text("Not 'the rank that calls it'").count() == 0, "not before it is revealed"
    remote.root.get_by_role("button", name="Reveal").click()
    calls = remote.state["calls"]
    assert arrows.count() == bars.count() == len(calls) == 3 * (size - 1)
    assert remote.root.locator(".ddps-answer").count() == len(calls)
    box = remote.root.bounding_box()
    assert box is not None and box["height"] < 950, "its buttons and its picture are on one screen"
    verdict = remote.root.locator(".ddpl-verdict")
    expect(verdict).to_contain_text("Not 'the rank that calls it': rank 0, who has the agent")
    assert remote.root.locator(".ddps-owner").count() == len(remote.state["references"])
    remote.root.locator("summary", has_text="All calls in a table").click()
    assert remote.root.locator(".ddps-calls tbody tr").count() == len(calls)

    remote.choose("program", "rrefs")
    expect(remote.root.locator(".ddps-sequence")).not_to_be_visible()
    remote.root.get_by_role("radio", name="4", exact=True).check()
    remote.press("Run on the ranks")
    remote.root.get_by_label("step", exact=True).press("End")
    expect(verdict).to_contain_text("You were right: 4")
    owned = remote.state["references"]
    assert remote.root.locator(".ddps-owner").count() == len(owned) == 2
    assert remote.root.locator(".ddps-owner.ddps-gone").count() == sum(one["deleted"] is not None for one in owned)


# The numbers of the matrices; "" if the chosen rank does not hold them.
ELEMENTS = """root => [...root.querySelectorAll('.ddpl-matrix svg')].map(one =>
  [...one.querySelectorAll('.ddpl-element text')].map(text => text.textContent))"""


def matrices_in_pieces(product: Lesson, size: int) -> None:
    """Guess incorrectly, run, show the pieces of one rank, choose an element with keys; then pieces that do not fit."""
    product.choose("A", "Shard(1)")
    product.choose("B", "Shard(0)")
    assert product.root.locator(".ddpl-matrix").count() == 3, "nothing is put together yet"
    product.root.get_by_role("radio", name="all_gather", exact=True).check()
    product.press("Run on the ranks")
    expect(product.root.locator(".ddpl-verdict")).to_contain_text(
        "Not 'all_gather': all_reduce; every rank has a summand"
    )
    state = product.state
    a, b, *by_rank, whole = product.root.evaluate(ELEMENTS)
    rows, inner = state["matrices"][0]["shape"]
    wanted = np.array(a, float).reshape(rows, inner) @ np.array(b, float).reshape(inner, rows)
    assert np.array(whole, float).reshape(rows, rows).tolist() == wanted.tolist()
    together = [np.array(one, float).reshape(rows, rows) for one in by_rank]
    assert len(together) == size and np.sum(together, axis=0).tolist() == wanted.tolist(), "a summand for each rank"
    summands = []
    for rank in range(size):
        product.choose("look at", str(rank))
        a, _, c, whole = product.root.evaluate(ELEMENTS)
        assert sum(one != "" for one in a) == rows * inner // size and "" not in whole
        summands.append(np.array(c, float).reshape(rows, rows))
    assert np.sum(summands, axis=0).tolist() == wanted.tolist()

    rule = product.root.locator(".ddpl-rule")
    expect(rule).to_contain_text(f"Element (0, 0) is row 0 of A times column 0 of B, {inner} products.")
    product.root.locator(".ddpl-matrices").focus()
    for key in ("ArrowDown", "ArrowRight", "ArrowRight", "ArrowUp", "ArrowUp"):
        product.root.page.keyboard.press(key)
    expect(rule).to_contain_text("Element (0, 2) is row 0 of A")
    expect(rule).to_contain_text(f"rank {size - 1} can make {inner // size}: summands.")
    assert product.root.locator(".ddpl-chosen").count() == 2 * inner + 2

    product.choose("B", "Shard(1)")
    expect(rule).to_contain_text(f"No rank has both factors of {inner - inner // size} of them")
    product.press("Run on the ranks")
    expect(product.root).to_contain_text("to multiply at all, all_gather: the pieces of A and B did not fit")
    assert product.state["agrees"] is True


def training_on_a_mesh(mesh: Lesson, size: int) -> None:
    """HSDP in one row, then tensor parallel down a column, then a batch per rank, which is wrong in a row."""
    mesh.choose("mesh", "1")
    assert mesh.root.locator(".ddpl-moved").count() == 0, "nothing has run yet"
    mesh.root.get_by_role("radio", name="along the row").check()
    mesh.press("Train on the ranks")
    expect(mesh.root.locator(".ddpl-verdict")).to_contain_text("You were right: along the row")
    mine = [one for one in mesh.state["calls"] if one["rank"] == 0]
    assert mesh.root.locator(".ddpl-went-row").count() == len(mine) > 0
    assert mesh.root.locator(".ddpl-went-column").count() == 0
    mesh.choose("what is sent", "all-gather of parameters")
    others = [one for one in mine if one["purpose"] != "all-gather of parameters"]
    assert mesh.root.locator(".ddpl-went-row.ddpl-others").count() == len(others) > 0
    mesh.choose("look at", str(size - 1))
    expect(mesh.root.locator(".ddpl-moved caption")).to_have_text(f"What rank {size - 1} moves in one step")

    mesh.choose("training", "TP and FSDP")
    mesh.choose("mesh", str(size))
    mesh.press("Train on the ranks")
    assert mesh.root.locator(".ddpl-along-column").count() == 1 and mesh.root.locator(".ddpl-along-row").count() == 0
    state = mesh.state
    assert state["answer"] == "down the column" and state["same"] is True
    mesh.choose("mesh", "1")
    mesh.root.get_by_role("checkbox").check()
    mesh.idle()
    mesh.press("Train on the ranks")
    after = mesh.state
    assert after["same"] is False
    expect(mesh.root).to_contain_text("%ddp_check says: ")
    expect(mesh.root).to_contain_text("got different inputs")
