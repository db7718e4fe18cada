"""The wheel, and its use on a machine without a network, Node or a compiler."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from email.message import Message
from email.parser import BytesParser
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell
from packaging.requirements import Requirement

import ddp_notebook
from ddp_notebook.launch.host.preload import OLDEST_TORCH, check_torch
from tests.installing.environments import Environment, checkout_files, versions_of, without_network
from tools.address import NOTEBOOKS, write, wrong
from tools.wheelhouse import requirements

ROOT = Path(__file__).parents[2]
FIRST = ROOT / "notebooks" / "01_first_process_group.ipynb"
EXECUTE = Path(__file__).with_name("execute.py")
BUNDLES = {"ddp_notebook/widgets/static/monitor.js", "ddp_notebook/lessons/static/lessons.js"}
# Files imported by the notebook and its ranks, and programs on their PATH.
LOOK = """
import shutil, sys
import ddp_notebook
from ddp_notebook.widgets import bundles
look = '''
import sys
for one in list(sys.modules.values()):
    print(getattr(one, "__file__", ""))
'''
exec(look)
for rank in (0, 1):
    print(ddp_notebook.current().run(look, quiet=True)[rank].stdout)
print("bundle", len(bundles.monitor()))
print("found", [name for name in ("node", "npm", "cc", "gcc", "c++", "nvcc", "git") if shutil.which(name)])
"""


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return BytesParser().parsebytes(archive.read(name))


# ---- what is in it


@pytest.mark.long
def test_the_wheel_is_pure_python_and_contains_the_javascript(wheel):
    assert wheel.name == f"ddp_notebook-{ddp_notebook.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert all(archive.getinfo(name).file_size > 10_000 for name in BUNDLES)
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "ddp_notebook").rglob("*.py")}
    assert modules | BUNDLES <= set(names)
    rest = {name.split("/")[0] for name in names} - {"ddp_notebook"}
    assert len(rest) == 1 and rest.pop().endswith(".dist-info"), "no tests, tools or notebooks"


@pytest.mark.processes
@pytest.mark.parametrize("name", ["colab", "kaggle"])
def test_its_bounds_admit_what_is_there_already(wheel, name):
    """Otherwise pip would replace installed packages."""
    theirs = versions_of(name)
    asked = [Requirement(text) for text in metadata(wheel).get_all("Requires-Dist", [])]
    ours = [one for one in asked if one.marker is None and one.name != "torch"]
    assert len(ours) > 10
    assert [str(one) for one in ours if not one.specifier.contains(theirs[one.name.replace("_", "-")])] == []


@pytest.mark.processes
def test_its_bounds_are_those_of_the_code(wheel):
    found = metadata(wheel)
    asked = {one.name: one for one in map(Requirement, found.get_all("Requires-Dist", [])) if one.marker is None}
    assert str(asked["torch"].specifier) == f">={OLDEST_TORCH}"
    python = found["Requires-Python"]
    oldest, below_newest = group(r">=3\.(\d+)", python), group(r"<3\.(\d+)", python)
    supported = {f"Programming Language :: Python :: 3.{n}" for n in range(int(oldest), int(below_newest))}
    assert supported == {one for one in found.get_all("Classifier", []) if "Python ::" in one}


def test_a_torch_that_is_too_old_is_named_with_what_to_do():
    for version in ("2.10.0+cu128", "2.9.1", "1.13.1"):
        with pytest.raises(SystemExit) as error:
            check_torch(version)
        assert str(error.value) == (
            f'torch {version} is installed, and ddp_notebook needs 2.11 or later: pip install "torch>=2.11"'
        )
    for version in ("2.11.0", "2.13.0+cpu", "2.15.0a0+git1234", "3.0.1"):
        check_torch(version)


@pytest.mark.processes
def test_a_wheelhouse_has_all_but_torch(wheel):
    asked = {Requirement(text).name for text in requirements(wheel, "3.12")}
    assert {"ipyparallel", "numpy", "jupyterlab", "scikit-learn"} <= asked
    assert not {"torch", "pytest", "accelerate"} & asked
    assert not any(";" in text for text in requirements(wheel, "3.12"))


@pytest.mark.processes
@pytest.mark.parametrize("version", ["3.10", "3.15", "three"])
def test_a_wheelhouse_for_another_python_is_refused(tmp_path, version):
    command = [sys.executable, str(ROOT / "tools" / "wheelhouse.py"), str(tmp_path / "wheels")]
    refused = subprocess.run([*command, "--python-version", version], capture_output=True, text=True)
    assert refused.returncode and not (tmp_path / "wheels").exists()
    assert f"{version!r} is no version of Python for it; it needs >=3.11,<3.15" in refused.stderr


# ---- the address


def test_the_notebooks_name_the_address_that_is_set(tmp_path):
    """`python tools/address.py` writes it."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        repository = tomllib.load(file)["tool"]["ddp_notebook"]["repository"]
    for path in NOTEBOOKS:
        assert wrong(path) == []
        assert path.read_text().count(f"github.com/{repository}") == 2 and "/github/" + repository in path.read_text()
        copy = tmp_path / path.name
        copy.write_text(path.read_text().replace(repository, "somebody/else"))
        assert [cell.cell_type for cell in wrong(copy)] == ["markdown", "code"]
        assert write(copy) and not write(copy)
        assert copy.read_text() == path.read_text()


def commands_of_the_readme() -> list[str]:
    """Return the lines of the shell blocks, without comments."""
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return [re.sub(r"\s+#.*", "", line) for block in blocks for line in block.splitlines()]


def test_the_readme_names_the_address_that_is_set():
    with (ROOT / "pyproject.toml").open("rb") as file:
        address = tomllib.load(file)["tool"]["ddp_notebook"]
    at = f"https://github.com/{address['repository']}"
    commands = commands_of_the_readme()
    assert f"git clone {at}" in commands
    assert f'pip install "ddp_notebook[lab,notebooks] @ git+{at}@{address["branch"]}"' in commands


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_readme_commands_install_next_to_the_present_torch(tmp_path):
    """The commands contain the address on GitHub, for which git uses the last commit of this checkout."""
    origin = tmp_path / "origin.git"
    subprocess.run(["git", "clone", "-q", "--bare", str(ROOT), str(origin)], check=True)
    subprocess.run(["git", "-C", str(origin), "branch", "-f", "main", "HEAD"], check=True, capture_output=True)
    [clone] = [one for one in commands_of_the_readme() if one.startswith("git clone ")]
    [install] = [one for one in commands_of_the_readme() if "git+https" in one]
    instead = {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.{origin.as_uri()}.insteadOf",
        "GIT_CONFIG_VALUE_0": clone.split()[-1],
    }
    subprocess.run(clone.split(), cwd=tmp_path, env=os.environ | instead, check=True, capture_output=True)
    assert (tmp_path / "ddp_notebook" / "Makefile").read_text() == subprocess.run(
        ["git", "show", "HEAD:Makefile"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout

    environment = Environment(tmp_path / "env")
    environment.lend("torch")
    theirs = environment.versions()["torch"]
    environment.run("-m", *shlex.split(install), "-q", before=(), **instead)
    versions = environment.versions()
    assert versions["torch"] == theirs and {"jupyterlab", "ddp-notebook"} <= set(versions)
    code = "import ddp_notebook.widgets.bundles as bundles; print(bundles.__file__, len(bundles.monitor()))"
    file, size = environment.run("-c", code).split()
    assert Path(file).is_relative_to(environment.packages) and int(size) > 10_000


# ---- where nothing else is


def looking(notebook: Path, to: Path) -> Path:
    """Add a cell after the start that prints the imported files."""
    made = nbformat.read(notebook, as_version=4)
    [start] = [at for at, cell in enumerate(made.cells) if "%ddp_start {ranks}" in cell.source]
    made.cells.insert(start + 1, new_code_cell(LOOK))
    nbformat.write(made, to)
    return to


def group(pattern: str, text: str) -> str:
    """Return the first group of a pattern in the text."""
    match = re.search(pattern, text)
    assert match is not None, text
    return match[1]


def printed(notebook: nbformat.NotebookNode) -> str:
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    return "".join(out.get("text", "") or out.get("data", {}).get("text/plain", "") + "\n" for out in outputs)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_an_offline_machine_installs_it_and_runs_a_notebook(tmp_path):
    """Uses `make wheelhouse`, whose output explains the steps."""
    house = tmp_path / "wheels"
    version = ".".join(map(str, sys.version_info[:2]))
    command = ["make", "--no-print-directory", "wheelhouse", f"DIR={house}", f"PYTHON_VERSION={version}"]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert made.returncode == 0, made.stdout + made.stderr
    wheels = list(house.glob("*.whl"))
    size_mb = sum(one.stat().st_size for one in wheels) / 1e6
    assert f"{len(wheels)} wheels for Python {version}, {size_mb:.0f} MB, without torch" in made.stdout
    assert not [one for one in wheels if one.name.startswith(("torch-", "nvidia"))]
    [how] = re.findall(r"^  pip (install .*)$", made.stdout, re.MULTILINE)

    environment = Environment(tmp_path / "env")
    environment.lend("torch")
    alone = without_network()
    words = how.replace("'", "").replace(f"--find-links {house.name}", f"--find-links {house}").split()
    environment.pip(*words, "-q", before=alone)
    looked = looking(FIRST, environment.folder / "first.ipynb")
    executed = environment.folder / "executed.ipynb"
    # Only programs of the environment.
    quiet = {"PATH": str(environment.bin), "DDP_NOTEBOOK_RANKS": "2", "HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    environment.run(str(EXECUTE), str(looked), str(executed), before=alone, **quiet)

    said = printed(nbformat.read(executed, as_version=4))
    assert "found []" in said and int(group(r"bundle (\d+)", said)) > 10_000
    assert said.count("/ddp_notebook/__init__.py") == 3, "of the notebook and of both ranks"
    assert checkout_files(said) == []
    assert float(group(r"test accuracy ([\d.]+)%", said)) > 95
    assert "parameters equal to those of rank 0" in said
