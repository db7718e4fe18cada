"""The notebooks of the lessons: they run from the top without a user, their links are valid, and all are listed.

In `make test` a worker runs its lessons one after the other in one kernel, so that torch, matplotlib and ipykernel are
imported once. Lesson 19 is shortened (`SHORTER`). In `make test-long` each lesson has its full length and its own
kernel, as for a reader. The claims of a lesson (`claims/`) run after its cells.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_output

from tests.kernels import NotebookKernel, Reply
from tests.lessons.claims import Claim, claims_of, is_idle
from tests.lessons.stored_pictures import compare
from tools.picture_texts import RECORD

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(p for p in FOLDER.glob("[0-9][0-9]_*.ipynb") if not p.name.endswith(".executed.ipynb"))
LESSONS = [path for path in NOTEBOOKS if path.name >= "04"]
OF_FOUR = ("07", "15")  # about trees and meshes, which need more than two ranks
MOST_S = {
    "10": 60.0,
    "11": 60.0,
    "12": 60.0,
    "17": 60.0,
    "18": 90.0,
    "19": 90.0,
    "21": 90.0,
    "23": 90.0,
    "27": 60.0,
}  # else 30
_DEPRECATED = re.compile(r".*(?:Future|Deprecation)Warning.*")
_LINK = re.compile(r"\]\(([^)\s]+)\)")


CELL_S = 300.0

# The logs that the two runs of lesson 19 under torchrun leave. `make test` writes only the logs, since these runs start
# thirteen processes that import torch. A part of a log has these numbers: the pid of rank 0, the number of ranks and
# the first step.
LOG = """\
import json

folder = fresh("NAME")
with (folder / "log").open("a") as log:
    for part, (first_pid, world_size, first_step) in enumerate(PARTS):
        for step in range(first_step, first_step + 65):
            for rank in range(world_size):
                row = {"at_s": 1e9 + 5 * part + 0.01 * step, "step": step, "rank": rank}
                log.write(json.dumps(row | {"pid": first_pid + rank, "world_size": world_size}) + "\\n")
"""
KILLED = LOG.replace("NAME", "agent_killed").replace("PARTS", "[(11, 2, 0), (21, 2, 50)]")
MEMBERS = LOG.replace("NAME", "agent_members").replace("PARTS", "[(11, 1, 0), (21, 3, 50), (31, 2, 100)]")
# The cells that `make test` replaces, by the number of the lesson: the first line of each cell, and the new cell.
SHORTER = {
    "19": [
        ('folder = fresh("agent_killed")', KILLED + "said, [of_agent] = [], changes(folder, rank=1)\n"),
        ('folder = fresh("agent_members")', MEMBERS),
    ]
}
# Everything that a lesson leaves in the kernel is undone, so that the next one starts as in a new kernel.
REMEMBER = """\
import os, sys
sys.at_first = list(sys.path), set(sys.modules), dict(os.environ)
"""
BEGIN = """\
%reset -f
import os, sys
sys.path[:] = sys.at_first[0]
for name in set(sys.modules) - sys.at_first[1]:
    if str(getattr(sys.modules[name], "__file__", None) or "").startswith({temporary!r}):
        del sys.modules[name]
os.environ.clear()
os.environ.update(sys.at_first[2], DDP_NOTEBOOK_RANKS="{world_size}")
if "matplotlib.pyplot" in sys.modules:
    sys.modules["matplotlib.pyplot"].close("all")
%reset -f
"""
# The exercises with a kept verdict. A notebook that only runs from the top has none; claims have some.
ANSWERS = "from ddp_notebook.lessons.questions.answers_file import answers_file as _answers_file\n"
KEPT = ANSWERS + "print(*_answers_file().read(), end='')"
FORGET = ANSWERS + "_answers_file().forget(set(_answers_file().read()))"


def start_kernel(short: str = "1") -> NotebookKernel:
    """Start a kernel in which lessons have shortened durations; at full length with `short=""`."""
    kernel = NotebookKernel(env={"DDP_NOTEBOOK_SHORT": short, "DDP_NOTEBOOK_ANSWERS": "shown"}, cwd=str(FOLDER))
    kernel.run("%load_ext ddp_notebook\n%ddp_start 1\n%ddp_stop")  # the host server has started all its processes
    kernel.run(RECORD)
    kernel.run(REMEMBER)
    return kernel


def outputs_of(reply: Reply) -> list[nbformat.NotebookNode]:
    """Return the outputs of a cell in the format of a notebook file."""
    outputs = [new_output("stream", text=reply.stdout)] if reply.stdout else []
    outputs += [new_output("display_data", data=data) for data in reply.displays]
    if reply.status == "error":
        outputs.append(new_output("error", ename=reply.ename, evalue=reply.evalue))
    return outputs


def shorten(notebook: Path, cells: list[nbformat.NotebookNode]) -> None:
    """Replace the cells of a lesson that take the longest, and leave out those with the tag "long"."""
    cells[:] = [cell for cell in cells if "long" not in cell.metadata.get("tags", [])]
    for first_line, source in SHORTER.get(notebook.name[:2], []):
        [cell] = [cell for cell in cells if cell.source.startswith(first_line + "\n")]
        cell.source = source


def check_claims(kernel: NotebookKernel, claims: list[Claim], cell: str, *, with_times: bool) -> None:
    """Run the claims of one cell in the kernel.

    Args:
        with_times: A failed statement about time fails the test; otherwise it is printed.
    """
    for claim in claims:
        if claim.cell != cell:
            continue
        reply = kernel.run(claim.code, CELL_S)
        if reply.status != "ok" and claim.is_about_time and not with_times:
            print(f"after {cell}, on a busy machine: {reply.ename}: {reply.evalue}")
            continue
        assert reply.status == "ok", f"after {cell}:\n{claim.code}\n{reply.traceback[-3000:]}"


def execute_in(
    kernel: NotebookKernel, notebook: Path, world_size: int, *, is_short: bool = True
) -> list[nbformat.NotebookNode]:
    """Run a notebook in a kernel that has run others, with its claims. Return its cells with their outputs."""
    with_times, claims = is_idle(), claims_of(notebook)
    begun = kernel.run(BEGIN.format(temporary=tempfile.gettempdir(), world_size=world_size))
    assert begun.status == "ok", begun
    cells = nbformat.read(notebook, as_version=4).cells
    if is_short:
        shorten(notebook, cells)
    for cell in cells:
        if cell.cell_type == "code":
            reply = kernel.run(cell.source, CELL_S)
            is_expected = reply.status == "ok" or "raises-exception" in cell.metadata.get("tags", [])
            assert is_expected, f"{cell.source}\n{reply.stdout[-1000:]}{reply.stderr[-1000:]}{reply.traceback[-3000:]}"
            warnings = _DEPRECATED.findall(reply.stdout + reply.stderr)
            assert warnings == [], f"a learner sees a warning of a deprecated name:\n{cell.source}"
            cell.outputs = outputs_of(reply)
            if "lessons.check(" in cell.source:
                assert kernel.run(KEPT).stdout == "", f"an unchanged starter counts as a wrong try:\n{cell.source}"
            check_claims(kernel, claims, cell.id, with_times=with_times)
            if any(claim.cell == cell.id for claim in claims):
                kernel.run(FORGET)
    kernel.run("%ddp_stop")  # the first notebook leaves its ranks to its reader
    return cells


def execute(notebook: Path, world_size: int) -> list[nbformat.NotebookNode]:
    """Run a notebook with its claims at its full length in its own kernel. Return its cells with their outputs."""
    with closing(start_kernel(short="")) as kernel:
        return execute_in(kernel, notebook, world_size, is_short=False)


class LessonKernel:
    """The kernel of a worker's lessons. After a failed lesson each further one gets its own kernel."""

    def __init__(self) -> None:
        self.kernel: NotebookKernel | None = start_kernel()

    def execute(self, notebook: Path, world_size: int) -> list[nbformat.NotebookNode]:
        if self.kernel is None:
            with closing(start_kernel()) as kernel:
                return execute_in(kernel, notebook, world_size)
        try:
            return execute_in(self.kernel, notebook, world_size)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self.kernel is not None:
            self.kernel.close()
            self.kernel = None


@pytest.fixture(scope="module")
def lesson_kernel() -> Iterator[LessonKernel]:
    with closing(LessonKernel()) as running:
        yield running


def check_shown(cells: list[nbformat.NotebookNode]) -> None:
    """Check that expected pictures and errors exist, and that no request is unanswered at the end."""
    for cell in cells:
        tags = cell.metadata.get("tags", [])
        outputs = cell.get("outputs", [])
        if "picture" in tags:
            assert any("image/png" in output.get("data", {}) for output in outputs), cell.source
        if "raises-exception" in tags:
            errors = [output.ename for output in outputs if output.output_type == "error"]
            assert errors and set(errors) <= {"RankError", "RankDiedError", "CellTimeoutError"}, (cell.source, errors)
    said = [o.text for c in cells if "summary" in c.metadata.get("tags", []) for o in c.outputs if "text" in o]
    assert "not yet" not in "".join(said)


@pytest.mark.processes
@pytest.mark.timeout(300)  # a dozen processes of one of them import torch
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_lesson_runs(path, lesson_kernel):
    """Every notebook, on two ranks if they suffice. `make test-long` runs all on four ranks, at their full length."""
    cells = lesson_kernel.execute(path, 4 if path.name[:2] in OF_FOUR else 2)
    check_shown(cells)
    compare(path, cells)


@pytest.mark.long
@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_lesson_takes_half_a_minute(path):
    """A lesson with a long training run or a dozen processes that import torch may take a minute and a half."""
    began = time.monotonic()
    check_shown(execute(path, 4))
    assert time.monotonic() - began < MOST_S.get(path.name[:2], 30.0)


# ---- links


def texts() -> Iterator[tuple[str, str]]:
    """Yield name and Markdown of every page and every text cell."""
    for page in sorted(FOLDER.glob("*.md")):
        yield page.name, page.read_text()
    for path in NOTEBOOKS:
        cells = nbformat.read(path, as_version=4).cells
        yield path.name, "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")


def anchors(page: str) -> list[str]:
    return re.findall(r'^<a id="([^"]+)"></a>$', page, re.MULTILINE)


@pytest.mark.parametrize(("name", "text"), list(texts()), ids=[name for name, _ in texts()])
def test_links_lead_somewhere(name, text):
    for link in _LINK.findall(text):
        if link.startswith(("http://", "https://")):
            continue
        page, _, anchor = link.partition("#")
        target = FOLDER / page if page else FOLDER / name
        assert target.exists(), f"{name}: {link}"
        if anchor:
            assert anchor in anchors(target.read_text()), f"{name}: {link}"


# ---- the glossary and the table of contents


def test_the_glossary_has_every_term_in_three_languages():
    page = (FOLDER / "glossary.md").read_text()
    entries = re.findall(r'^<a id="([^"]+)"></a>\n\n### (.+)\n\n((?:- .+\n)+)', page + "\n", re.MULTILINE)

    assert [anchor for anchor, _, _ in entries] == anchors(page)
    assert len(entries) >= 40
    titles = [title for _, title, _ in entries]
    assert titles == sorted(titles, key=str.lower)
    for anchor, title, lines in entries:
        assert anchor == title.lower().replace(" ", "-")
        english, korean, chinese = lines.strip().splitlines()
        assert english.isascii() and english.endswith(".") and english.count(". ") == 0, english
        assert re.match(r"- \*\*.+\*\*: .*[\uac00-\ud7a3].*\.$", korean), korean
        assert re.match(r"- \*\*.+\*\*\uff1a.*[\u4e00-\u9fff].*\u3002$", chinese), chinese
        assert not re.search(r"[\uac00-\ud7a3]", chinese) and not re.search(r"[\u4e00-\u9fff]", korean)
        assert "[" + title + "](#" + anchor + ")" in page, "in the list at the top"


def test_no_character_of_the_glossary_is_simplified_chinese():
    """Uses characters that differ in Traditional Chinese and are common in such texts."""
    page = (FOLDER / "glossary.md").read_text()
    assert not set(page) & set("个们这来时发会过还进动问间东车长门开见现观学习数据传输设备网络运训练类线组织结构参")


def test_every_notebook_is_in_the_table_of_contents():
    page = (FOLDER / "README.md").read_text()
    listed = [link for link in _LINK.findall(page) if link.endswith(".ipynb")]
    assert set(listed) == {path.name for path in NOTEBOOKS}
    assert "(glossary.md)" in page
