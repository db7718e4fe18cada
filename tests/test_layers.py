"""Allowed imports between layers, and modules that must not be imported before their use."""

from __future__ import annotations

import ast
import functools
import graphlib
import os
import re
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import pytest

import ddp_notebook
from ddp_notebook import Recording, display, errors, stdlib
from ddp_notebook.observe.figures import drawing
from ddp_notebook.run.notebook_kernel import has_front_end
from ddp_notebook.session import Session
from ddp_notebook.widgets import bundles

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ddp_notebook"
# A rule for a folder applies to all files below it.
MAY_IMPORT = {
    "records": {"records", "stdlib"},
    "messages": {"messages", "stdlib"},
    "wire": {"wire", "messages", "stdlib"},
    "registry": {"registry", "messages", "records", "errors", "version"},
    "rank": {"rank", "wire", "messages", "records", "registry", "stdlib"},
    "launch": {"launch", "wire", "messages", "records", "registry", "errors", "version", "line_parser", "on_rank"},
    "observe": {"observe", "wire", "messages", "records", "errors"},
    "run": {"run", "launch", "observe", "wire", "messages", "records", "registry", "errors", "line_parser", "status"},
    "widgets": {"widgets", "run", "observe", "wire", "messages", "records", "errors", "line_parser"},
}
# A layer above that single files import.
MAY_IMPORT_TOO = {
    "launch/host/child.py": "rank",  # becomes a rank
    "launch/host/preload.py": "rank",  # imports it before ranks are forked
    "launch/elastic/rendezvous.py": "rank",
    "observe/recording.py": "widgets",  # `Recording.save_html`
}
SHARES_A_PROCESS_WITH_CELLS = ["records", "messages", "wire", "rank"]
NOTEBOOK_SIDE = [
    "session.py",
    "magics.py",
    "status.py",
    "errors.py",
    "display.py",
    "session_commands.py",
    "attach_commands.py",
    "run",
    "observe",
    "widgets",
    "lessons",
]


@functools.cache
def parsed(source: str) -> ast.Module:
    """Return the syntax tree of a source. Cached, because several tests read the whole package."""
    return ast.parse(source)


@functools.cache
def statements(source: str) -> list[ast.stmt]:
    """Return all statements of a source, including nested ones."""
    found: list[ast.stmt] = []
    below: list[ast.AST] = [parsed(source)]
    while below:
        children = [child for child in ast.iter_child_nodes(below.pop()) if not isinstance(child, ast.expr)]
        found += [child for child in children if isinstance(child, ast.stmt)]
        below += children
    return found


@pytest.fixture(scope="module", autouse=True)
def forget_trees() -> Iterator[None]:
    yield
    parsed.cache_clear()
    statements.cache_clear()


def parts_imported(source: str, module: str) -> set[str]:
    """Return the parts of this package that a module's source imports: `{"channel", "events"}`."""
    names = set()
    for node in statements(source):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: -node.level] if node.level else []
            base = [*above, node.module] if node.module else above
            names |= {".".join([*base, alias.name]) for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("ddp_notebook.")}


def files(part: str) -> Iterator[tuple[Path, str]]:
    """Yield the files of a part of the package, and their module names."""
    path = PACKAGE / part
    for file in sorted(path.rglob("*.py")) if path.is_dir() else [path] * path.exists():
        yield file, ".".join(file.relative_to(ROOT).with_suffix("").parts)


@pytest.mark.slow
@pytest.mark.parametrize("part", MAY_IMPORT)
def test_a_layer_imports_only_what_is_below_it(part):
    found = list(files(part))
    assert found

    for file, module in found:
        foreign = parts_imported(file.read_text(), module) - MAY_IMPORT[part]
        foreign -= {MAY_IMPORT_TOO.get(str(file.relative_to(PACKAGE)), "")}
        assert not foreign, f"{file.relative_to(ROOT)} imports {sorted(foreign)}"


def test_the_exceptions_are_needed():
    for name, layer in MAY_IMPORT_TOO.items():
        assert layer in parts_imported((PACKAGE / name).read_text(), f"ddp_notebook.{name[:-3].replace('/', '.')}"), (
            name
        )


@pytest.mark.slow
@pytest.mark.parametrize("part", SHARES_A_PROCESS_WITH_CELLS)
def test_code_next_to_cells_uses_copies_of_replaceable_functions(part):
    """`import time` would find a function that the cell has put into the module."""
    for file, _ in files(part):
        body = parsed(file.read_text()).body
        names = {alias.name for node in body if isinstance(node, ast.Import) for alias in node.names}
        executed = {node.module or "" for node in body if isinstance(node, ast.ImportFrom)} & stdlib.EXECUTED
        replaceable = names & stdlib.COPIED | executed
        assert not replaceable, f"{file.relative_to(ROOT)}: from ddp_notebook.stdlib import {', '.join(replaceable)}"


@pytest.mark.slow
def test_the_notebooks_side_does_not_import_what_runs_in_a_rank():
    for part in NOTEBOOK_SIDE:
        for file, module in files(part):
            assert "rank" not in parts_imported(file.read_text(), module), file.relative_to(ROOT)


# Parts of `launch` that the rest of the package may use: the ranks, the options of a start, and checks before one.
OPEN_TO_OTHERS = {
    "warm",
    "client",
    "cluster",
    "hosts",
    "process",
    "options",
    "start_line",
    "placement",
    "preflight",
    "sync",
}
OPEN_TO_OTHERS |= {"preemption", "rank_log", "receipts"}
OPEN_TO_OTHERS |= {"keep", "membership", "elastic"}  # kept sessions, the start of ranks, torchrun jobs
_LAUNCH = "ddp_notebook.launch"


def of_launch(source: str) -> set[str]:
    """Return the modules of `launch` that a source imports, or "" for the folder alone."""
    found = set()
    for node in statements(source):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {name.removeprefix(_LAUNCH).split(".")[1] for name in names if name.startswith(f"{_LAUNCH}.")}
    return found


@pytest.mark.slow
def test_nothing_else_knows_how_ranks_are_started():
    others = [file for file in sorted(PACKAGE.rglob("*.py")) if "launch" not in file.parts]
    found = {file: of_launch(file.read_text()) for file in others}

    assert of_launch("from ddp_notebook.launch.host.host import Host; from ddp_notebook.launch import warm") == {
        "host",
        "warm",
    }
    assert found[PACKAGE / "session.py"] > {"cluster", "membership"}
    for file, modules in found.items():
        assert modules <= OPEN_TO_OTHERS, file.relative_to(ROOT)
        assert not {"start_method", "start_reason"} & _constants(file), file.relative_to(ROOT)


def test_only_who_takes_hosts_chooses_a_way():
    """All other modules in `launch` use only the common interface of all transports."""
    ways = {file.stem for file in (PACKAGE / "launch" / "transports").glob("*.py")}
    ways -= {"__init__", "base", "folders", "cleanup_process", "host_list", "reconnecting", "ports", "remote_python"}
    ways -= {"ssh_config"}
    assert ways == {"local", "ssh", "callback", "outpost"}
    choose = {"warm.py": {"local"}, "hosts.py": {"ssh"}, "tasks.py": {"callback", "outpost"}}
    for file, _ in files("launch"):
        if file.parent.name != "transports":
            tree = statements(file.read_text())
            imported = {node.module for node in tree if isinstance(node, ast.ImportFrom)}
            chosen = {way for way in ways if f"{_LAUNCH}.transports.{way}" in imported}
            assert chosen == choose.get(file.name, set()), file.relative_to(ROOT)


def _looks_at_processes(source: str) -> bool:
    """Return whether a source reads information about processes of this machine."""
    imported = re.search(r"^\s*(import|from) psutil\b", source, re.MULTILINE)
    return imported is not None or re.search(r"[\"']/proc\b", source) is not None


def test_the_notebook_side_reads_no_processes_of_its_machine():
    """A rank may run on another machine."""
    for source in ("import psutil", "def f():\n    from psutil import Process", "open(f'/proc/{pid}/stat')"):
        assert _looks_at_processes(source), source
    assert _looks_at_processes((PACKAGE / "launch" / "processes.py").read_text())
    for part in NOTEBOOK_SIDE:
        for file, _ in files(part):
            assert not _looks_at_processes(file.read_text()), file.relative_to(ROOT)


def _constants(file: Path) -> set[object]:
    tree = ast.walk(parsed(file.read_text()))
    return {node.value for node in tree if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_magics_only_delegate():
    """They import no library except IPython, and hold no ipyparallel objects."""
    tree = list(ast.walk(parsed((PACKAGE / "magics.py").read_text())))
    modules = {node.module or "" for node in tree if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in tree if isinstance(node, ast.Import) for alias in node.names}

    assert {module.partition(".")[0] for module in modules} == {
        "__future__",
        "typing",
        "sys",
        "IPython",
        "ddp_notebook",
    }
    assert "client" not in {node.attr for node in tree if isinstance(node, ast.Attribute)}


def test_these_tests_would_see_every_kind_of_import():
    for source in (
        "import ddp_notebook.session",
        "from ddp_notebook import session",
        "from ddp_notebook.session import current",
        "def later():\n    from ddp_notebook.session import current",
        "if TYPE_CHECKING:\n    import ddp_notebook.session as s",
        "from .. import session",
        "from ..session import current",
    ):
        assert parts_imported(source, "ddp_notebook.rank.engine") == {"session"}, source
    assert parts_imported("import torch, os.path\nfrom ddp_notebooks import session", "ddp_notebook.rank.x") == set()


# ---- what an import brings with it


@functools.cache
def loaded_by(statement: str) -> frozenset[str]:
    """Return the modules that a fresh Python has imported after this statement, which prints nothing."""
    done = subprocess.run(
        [sys.executable, "-c", f"{statement}\nimport sys; print(*sys.modules)"],
        cwd=ROOT,
        env={**os.environ, "PYTHONWARNINGS": "default"},
        capture_output=True,
        text=True,
        check=True,
    )
    return frozenset(done.stdout.split())


def heavy(modules: frozenset[str]) -> set[str]:
    """Return modules that are slow to import and do not belong into the notebook process."""
    return {name for name in modules if name in ("torch", "sklearn") or name.startswith("ddp_notebook.rank.")}


@pytest.mark.slow
def test_the_notebooks_side_imports_no_torch():
    modules = loaded_by("import ddp_notebook.session, ddp_notebook.magics, ddp_notebook.observe.files")

    assert "ddp_notebook.launch.cluster" in modules
    assert heavy(modules) == set()
    assert not modules & {"ipywidgets", "anywidget", "matplotlib"}, "the first view imports them"
    of_lessons = ("algorithms.stepping", "collectives.costs", "messages.point_to_point", "lesson_display")
    assert heavy(loaded_by("import " + ", ".join(f"ddp_notebook.lessons.{name}" for name in of_lessons))) == set()


MOST_LOADED = 90  # modules of this package
ON_USE = (  # parts of this package that are imported on first use
    *("ddp_notebook.launch.keep.", "ddp_notebook.launch.starters.", "ddp_notebook.launch.sync."),
    *("ddp_notebook.launch.preflight.", "ddp_notebook.launch.elastic.", "ddp_notebook.observe.report."),
    *(f"ddp_notebook.launch.transports.{way}" for way in ("ssh", "reconnecting", "callback", "outpost")),
    *("ddp_notebook.torchrun.job", "ddp_notebook.torchrun.start_job", "ddp_notebook.widgets.monitor"),
)


@pytest.mark.processes
def test_the_magics_import_little():
    """A magic imports its implementation when it is called."""
    modules = {name for name in loaded_by("import ddp_notebook.magics") if name.startswith("ddp_notebook")}

    assert "ddp_notebook.line_parser" in modules
    assert len(modules) <= MOST_LOADED
    assert {name for name in modules if name.startswith(("ddp_notebook.launch", *ON_USE))} == set()


@pytest.mark.processes
def test_a_start_imports_no_other_way_of_starting():
    modules = loaded_by(
        "import ddp_notebook.session_commands, ddp_notebook.launch.start_line, ddp_notebook.launch.warm"
    )

    assert {"ddp_notebook.session", "ddp_notebook.launch.transports.local"} <= modules
    assert {name for name in modules if name.startswith(ON_USE)} == set()


# Files of this package with functions that run for a cell, in the main thread and in the one that reads text of ranks.
# (The recording of earlier cells arrives in other threads.)
MOST_TOUCHED = 40
PASS = """
import sys, threading
touched, counts, package = set(), False, "/ddp_notebook/"

def profile(frame, event, _):
    if counts and threading.current_thread().name in ("MainThread", "ddp-host") and package in frame.f_code.co_filename:
        touched.add(frame.f_code.co_filename)

sys.setprofile(profile), threading.setprofile(profile)
import ddp_notebook
session = ddp_notebook.start(2)
for _ in range(3):
    session.run("pass")
counts = True
session.run("pass")
counts = False
session.submit("rank", quiet=True).result(), str(session.status()), session.stop()
sys.modules.update({f"touched:{file}": sys for file in touched})
"""


@pytest.mark.long
def test_a_session_imports_only_its_launcher_and_few_files():
    modules = loaded_by(PASS)
    touched = {name for name in modules if name.startswith("touched:")}

    assert "ddp_notebook.run.jobs.job" in modules
    assert {name for name in modules if name.startswith(ON_USE)} == set()
    assert any(name.endswith("run/cells/watch.py") for name in touched)
    assert len(touched) <= MOST_TOUCHED, sorted(touched)


# Such files on a rank: code in its main thread and in its agent, from the arrival of the cell until its end is sent.
MOST_TOUCHED_ON_RANK = 37
PROFILE = """
def _profile():
    import builtins, gc, sys
    from ddp_notebook.rank.cell import interpreter
    from ddp_notebook.wire.endpoint import Endpoint
    touched, package, set_profile = set(), "/ddp_notebook/", interpreter.setprofile
    builtins.touched = touched

    def profile(frame, event, _):
        if package in frame.f_code.co_filename:
            touched.add(frame.f_code.co_filename.rpartition(package)[2])

    def receive(*message):  # in the agent's thread
        set_profile(profile)
        received(*message)

    [endpoint] = [one for one in gc.get_objects() if type(one) is Endpoint]
    received, endpoint._receive = endpoint._receive, receive
    interpreter.setprofile = lambda _: None  # the profile function stays after the cell
    set_profile(profile)

_profile()
"""
PASS_ON_RANK = f"""
import sys, ddp_notebook
session = ddp_notebook.start(2)
session.run({PROFILE!r})
str(session.status())  # a message to the agents
session.run("pass"), session.run("import time; found = []")
for _ in range(4):  # a request of the notebook may arrive during one of them
    session.run("time.sleep(0.4); touched.clear()")  # the agent has acknowledged all messages by then
    session.run("pass")
    session.run("found.append(sorted(touched))")
found = [files for of_rank in session.pull("found").values() for files in of_rank]
session.stop()
sys.modules.update({{f"touched:{{file}}": sys for file in set(found[0]).intersection(*found)}})
"""


@pytest.mark.long
def test_a_pass_runs_code_of_few_files_on_a_rank():
    touched = {name.removeprefix("touched:") for name in loaded_by(PASS_ON_RANK) if name.startswith("touched:")}

    assert {"rank/cell/inbox.py", "rank/cell/runner.py", "rank/group/network.py"} <= touched
    assert len(touched) <= MOST_TOUCHED_ON_RANK, sorted(touched)


@pytest.mark.slow
def test_the_monitor_imports_no_torch():
    modules = loaded_by("from ddp_notebook.widgets import Monitor; import ddp_notebook.widgets.still.saved_summary")

    assert "anywidget" in modules
    assert heavy(modules) == set()


@pytest.mark.long
def test_a_view_imports_matplotlib_while_its_cell_runs():
    prepares = "ViewPlacement.prepare_picture(types.SimpleNamespace())"
    waits = "[one.join() for one in threading.enumerate() if one.name == 'ddp-picture-import']"
    before = "import threading, types; from ddp_notebook.widgets.view_placement import ViewPlacement"
    needs = {"ddp_notebook.observe.figures.bars", "matplotlib.backends.backend_agg", "PIL.PngImagePlugin"}

    assert not needs & loaded_by(before)
    assert needs <= loaded_by(f"{before}; {prepares}; {waits}")


@pytest.mark.processes
def test_the_package_alone_imports_nearly_nothing():
    modules = loaded_by("import ddp_notebook")

    assert heavy(modules) == set()
    assert {name for name in modules if name.startswith("ddp_notebook")} == {
        "ddp_notebook",
        "ddp_notebook.errors",
        "ddp_notebook.records",
        "ddp_notebook.records.names",
        "ddp_notebook.records.words",
        "ddp_notebook.version",
    }
    assert not modules & {"IPython", "zmq", "psutil", "ipyparallel", "ipywidgets", "matplotlib"}


@pytest.mark.long
def test_a_rank_imports_nothing_of_the_notebooks_side():
    modules = loaded_by("import torch, ddp_notebook.rank.process")
    parts = {name.split(".")[1] for name in modules if name.startswith("ddp_notebook.")}

    assert parts <= {
        "rank",
        "messages",
        "wire",
        "records",
        "registry",
        "errors",
        "stdlib",
        "version",
    }  # the package itself imports errors and version
    assert not modules & {"ipywidgets", "anywidget"}
    assert {"torch", "ddp_notebook.rank.process"} <= heavy(modules), "and the check for heavy imports sees them"


# ---- the package's names


def test_public_names_are_sorted_and_there():
    assert ddp_notebook.__all__ == sorted(ddp_notebook.__all__)
    for name in ddp_notebook.__all__:
        assert getattr(ddp_notebook, name).__doc__, f"{name} has no docstring"


def test_every_error_is_importable_from_the_package():
    assert set(errors.__all__) <= set(ddp_notebook.__all__)
    assert all(getattr(ddp_notebook, name) is getattr(errors, name) for name in errors.__all__)


def test_users_type_checkers_see_our_types():
    assert (PACKAGE / "py.typed").read_text() == ""


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"^module 'ddp_notebook' has no attribute 'stop'$"):
        ddp_notebook.stop  # noqa: B018


@pytest.mark.processes
def test_every_public_name_is_offered_for_completion():
    done = subprocess.run(
        [sys.executable, "-c", "import ddp_notebook; print(set(ddp_notebook.__all__) - set(dir(ddp_notebook)))"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "set()\n"


# ---- the rooms

FOLDERS = sorted({file.parent for file in PACKAGE.rglob("*.py")})


def _modules_of(folder: Path) -> set[str]:
    """Return the modules that a contents page lists. It has one line for all modules `lesson_NN`, which are found by
    their names."""
    return {file.stem for file in folder.glob("*.py") if not re.fullmatch(r"lesson_\d\d", file.stem)} - {"__init__"}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_a_folders_docstring_is_its_contents_page(folder):
    """One line per file. The package's own docstring is for its users."""
    if folder == PACKAGE:
        return
    contents = ast.get_docstring(parsed((folder / "__init__.py").read_text())) or ""
    rooms = {f"{room.name}/" for room in folder.iterdir() if room in FOLDERS}
    entries = re.findall(r"^ *(\w+/?) +\S", contents, re.MULTILINE) + re.findall(r"──► (\w+)", contents)
    assert _modules_of(folder) | rooms <= set(entries), f"{sorted((_modules_of(folder) | rooms) - set(entries))}"
    listed = {name.rstrip("/") for name in re.findall(r"^ *(\w+/?) {2,}\w[^`\n]*$", contents, re.MULTILINE)}
    there = {path.stem for path in folder.iterdir()}
    assert listed - there <= {"notebook"}, sorted(listed - there)  # the heading of a picture


# ---- no circles


def modules() -> dict[str, Path]:
    """Return every file of the package by its module name."""
    found = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imported(
    source: str, module: str, known: Collection[str], *, is_folder: bool = False, for_types: bool = False
) -> set[str]:
    """Return the known modules that a source imports, including imports in functions.

    Args:
        source: Source of the module.
        module: Name of the module.
        known: Modules to search for.
        is_folder: The source is an `__init__.py`.
        for_types: Include imports under TYPE_CHECKING.
    """
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if not for_types and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                visit(other)
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".")
            above = parts[: len(parts) + is_folder - node.level] if node.level else []
            base = ".".join([*above, node.module] if node.module else above)
            names = {f"{base}.{alias.name}" for alias in node.names}
            found.update(name if name in known else base for name in names)
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.expr):
                visit(child)

    visit(parsed(source))
    return (found & set(known)) - {module}


def circle(graph: Mapping[str, Collection[str]]) -> list[str]:
    """Return modules that form an import cycle, with the first one repeated at the end; empty if there is no cycle."""
    try:
        tuple(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def import_graph(*, for_types: bool) -> dict[str, set[str]]:
    """Return the imports of each module of the package."""
    found = modules()
    return {
        module: imported(file.read_text(), module, found, is_folder=file.name == "__init__.py", for_types=for_types)
        for module, file in found.items()
    }


def reachable(graph: Mapping[str, Collection[str]], module: str) -> set[str]:
    """Return the modules that a module imports, directly or through others."""
    found: set[str] = set()
    left = [module]
    while left:
        new = set(graph[left.pop()]) - found
        found |= new
        left += new
    return found


def circles(graph: Mapping[str, Collection[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other, directly or through others."""
    below = {module: reachable(graph, module) for module in graph}
    return sorted(map(list, {tuple(sorted(b for b in below[a] if a in below[b])) for a in below if a in below[a]}))


@pytest.mark.slow
def test_no_two_files_import_each_other_not_even_in_a_circle():
    graph = import_graph(for_types=False)
    assert "ddp_notebook.observe.tables.recorded" in graph["ddp_notebook.observe.recording"]
    assert "ddp_notebook.widgets.still.saved_page" in graph["ddp_notebook.observe.recording"], "in a function"
    assert circle(graph) == []


@pytest.mark.slow
def test_imports_for_types_make_no_circle_of_more_than_two_files():
    found = circles(import_graph(for_types=True))

    assert ["ddp_notebook.rank.engine", "ddp_notebook.rank.process"] in found, "pairs may be, and are seen"
    assert [one for one in found if len(one) > 2] == []


def test_a_circle_would_be_found():
    assert circles({"a": ["b"], "b": ["c"], "c": []}) == []
    assert circles({"a": ["b"], "b": ["c", "a"], "c": ["d"], "d": ["e"], "e": ["c"]}) == [["a", "b"], ["c", "d", "e"]]
    assert circle({"a": ["b"], "b": ["c"], "c": []}) == []
    found = circle({"a": ["b"], "b": ["c"], "c": ["d"], "d": ["b"]})
    assert found[0] == found[-1] and set(found) == {"b", "c", "d"}
    made_up = {
        "pack.one": "def later():\n    from pack import two",
        "pack.two": "import pack.folder.three as three",
        "pack.folder.three": "from ..one import name",
    }
    assert len(circle({module: imported(source, module, made_up) for module, source in made_up.items()})) == 4
    made_up["pack.folder.three"] = "if TYPE_CHECKING:\n    from ..one import name"
    assert circle({module: imported(source, module, made_up) for module, source in made_up.items()}) == []
    for_types = {module: imported(source, module, made_up, for_types=True) for module, source in made_up.items()}
    assert circles(for_types) == [["pack.folder.three", "pack.one", "pack.two"]]


def test_a_folders_own_imports_are_read_from_its_own_place():
    known = {"pack", "pack.folder", "pack.folder.one", "pack.one"}
    for source, found in {
        "from . import one": {"pack.folder.one"},
        "from .one import name": {"pack.folder.one"},
        "from .. import one": {"pack.one"},
        "from ..one import name": {"pack.one"},
        "from pack.folder import one": {"pack.folder.one"},
        "from pack import name": {"pack"},
    }.items():
        assert imported(source, "pack.folder", known, is_folder=True) == found, source


# ---- lessons: what a user could have written

# In addition to the lessons themselves: the package's public names, its errors, drawing and display helpers, the types
# of recordings, and the texts, units and tables that both sides share.
OPEN_TO_LESSONS = {
    "ddp_notebook.display",
    "ddp_notebook.errors",
    "ddp_notebook.observe.remote",
    "ddp_notebook.observe.report.bandwidth",
    "ddp_notebook.observe.views",
    "ddp_notebook.records.schema",
    "ddp_notebook.records.units",
    "ddp_notebook.records.words",
    "ddp_notebook.session",
}


def not_public(source: str, module: str) -> set[str]:
    """Return imports of a source from this package that are neither public nor of the lessons, including those for
    types."""
    found = set()
    for node in statements(source):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*above, node.module] if node.module else above)
            found |= {f"{base}.{alias.name}" for alias in node.names}
    ours = {name for name in found if name.split(".")[0] == "ddp_notebook"}
    own_names = {f"ddp_notebook.{name}" for name in ddp_notebook.__all__}
    return {name for name in ours - own_names if not _is_below(name, {"ddp_notebook.lessons", *OPEN_TO_LESSONS})}


def _is_below(name: str, modules: set[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def test_lessons_use_the_public_api_only():
    found = list(files("lessons"))
    assert len(found) > 20

    for file, module in found:
        assert not_public(file.read_text(), module) == set(), file.relative_to(ROOT)


def test_the_list_for_lessons_has_nothing_that_they_do_not_use():
    sources = "\n".join(file.read_text() for file, _ in files("lessons"))
    assert {module for module in OPEN_TO_LESSONS if f"from {module} import" not in sources} == set()


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("from ddp_notebook import Session, current", set()),
        ("from ddp_notebook.errors import UsageError", set()),
        ("from ddp_notebook import errors, lessons", set()),
        ("from ..session import running", set()),
        ("import numpy, ddp_notebooks.run", set()),
        (
            "from ddp_notebook.run.notebook_kernel import has_front_end",
            {"ddp_notebook.run.notebook_kernel.has_front_end"},
        ),
        ("def later():\n    from ddp_notebook.run import notebook_kernel", {"ddp_notebook.run.notebook_kernel"}),
        ("if TYPE_CHECKING:\n    from ddp_notebook.rank import agent", {"ddp_notebook.rank.agent"}),
        ("import ddp_notebook.observe.figures.drawing as d", {"ddp_notebook.observe.figures.drawing"}),
        ("from ddp_notebook.records import codec", {"ddp_notebook.records.codec"}),
        ("from ddp_notebook.sessions import x", {"ddp_notebook.sessions.x"}),
        ("from ddp_notebook import magics", {"ddp_notebook.magics"}),
        ("from ...widgets import bundles", {"ddp_notebook.widgets.bundles"}),
    ],
)
def test_what_is_not_public_would_be_seen(source, wrong):
    assert not_public(source, "ddp_notebook.lessons.ddp.inside") == wrong


@pytest.mark.processes
def test_how_to_draw_and_show_is_public():
    assert display.has_front_end is has_front_end and display.read_bundle is bundles.read
    rest = set(display.__all__) - {"calls_drawn", "has_front_end", "read_bundle"}
    assert all(getattr(display, name) is getattr(drawing, name) for name in rest) and rest >= {"Picture", "picture"}
    with pytest.raises(AttributeError, match=r"^module 'ddp_notebook.display' has no attribute 'label_ends'$"):
        display.label_ends  # noqa: B018
    assert "matplotlib" not in loaded_by("import ddp_notebook.display")


def test_a_session_has_at_most_30_public_names_and_no_base_class():
    assert Session.__mro__ == (Session, object)
    names = {name for name in dir(Session) if not name.startswith("_")} | {"options", "files", "ranks"}
    assert len(names) <= 30, sorted(names)


def test_a_recording_has_at_most_30_public_names():
    names = {name for name in dir(Recording) if not name.startswith("_")}
    assert len(names) <= 30, sorted(names)
