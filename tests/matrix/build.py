"""Creates the environment of one combination."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

from tests.matrix.environments import Environment

ROOT = Path(__file__).resolve().parents[2]
_EXTRAS = ("notebooks", "test")
_NOT_NEEDED = ("mypy", "ruff", "notebook", "torch")  # except for torch, used only in the repository's own environment


def build(environment: Environment, folder: Path) -> Path:
    """Create or update the environment in a folder. Return its interpreter.

    Raises:
        FileNotFoundError: This machine has no such Python.
        subprocess.CalledProcessError: pip failed, for example because no versions fit.
    """
    where = folder / environment.name
    python = where / "bin" / "python"
    if not python.exists():
        subprocess.run([_interpreter(environment.python), "-m", "venv", where], check=True)
    torch = _shared_torch(environment, folder, python)
    [packages] = (where / "lib").glob("python3*/site-packages")
    (packages / "matrix.pth").write_text(f"{ROOT}\n{torch}\n")
    constraints = where / "constraints.txt"
    lines = [*environment.pins, f"torch=={environment.torch}"]
    if environment.file:
        given = (Path(__file__).parent / environment.file).read_text().splitlines()
        lines += [line for line in given if line.strip() and not line.startswith("torch==")]
    constraints.write_text("\n".join(lines) + "\n")
    _pip(python, "install", "--upgrade", "--upgrade-strategy", "eager", "-c", str(constraints), *_requirements())
    return python


def _interpreter(version: str) -> str:
    """Return a Python of this version: on PATH, or of pyenv."""
    roots = [Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"]
    pyenvs = [str(path) for root in roots for path in sorted(root.glob(f"{version}*/bin/python"), reverse=True)]
    for one in itertools.chain(pyenvs, filter(None, [shutil.which(f"python{version}")])):
        if subprocess.run([one, "-c", "import venv, ensurepip"], capture_output=True).returncode == 0:
            return one
    raise FileNotFoundError(f"this machine has no Python {version} with venv: put python{version} on PATH")


def _shared_torch(environment: Environment, folder: Path, python: Path) -> Path:
    """Return a folder with torch and its requirements for all environments with this torch and this Python: up to 5
    GB."""
    tag = "cp" + environment.python.replace(".", "")
    shared = folder / f"torch-{environment.torch}-{tag}"
    done = shared.with_name(shared.name + ".done")
    if not done.exists():
        shutil.rmtree(shared, ignore_errors=True)
        _pip(python, "install", "--no-compile", "--target", str(shared), f"torch=={environment.torch}")
        done.touch()
    return shared


def _requirements() -> Iterator[str]:
    """Yield the requirements of the package, its notebooks and its tests, with the bounds of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = (project["optional-dependencies"][name] for name in _EXTRAS)
    for one in itertools.chain(project["dependencies"], *extras):
        if not one.startswith(_NOT_NEEDED):
            yield one


def _pip(python: Path, *arguments: str) -> None:
    subprocess.run([python, "-m", "pip", "--disable-pip-version-check", "-q", *arguments], check=True)
