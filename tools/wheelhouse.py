"""Gather the wheels to install ddp_notebook on a machine without a network.

torch is left out: its build depends on the machine, and it is often installed already.
`make wheelhouse DIR=wheels PYTHON_VERSION=3.12` runs this script. The wheels are for Linux machines like this one and
for the given version of Python. Install them with:

    pip install --no-index --find-links wheels 'ddp_notebook[lab,notebooks]'
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from email.parser import BytesParser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

ROOT = Path(__file__).parents[1]
EXTRAS = ("lab", "notebooks")
_NOT_GATHERED = ("torch",)


def requirements(wheel: Path, python_version: str) -> list[str]:
    """Return the requirements of a wheel and its `EXTRAS`, without torch.

    Args:
        wheel: Path of the wheel.
        python_version: Such as `"3.12"`.
    """
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        asked = BytesParser().parsebytes(archive.read(name)).get_all("Requires-Dist") or []
    found = []
    for text in asked:
        one = Requirement(text)
        here = ({"extra": extra, "python_version": python_version} for extra in ("", *EXTRAS))
        if one.name not in _NOT_GATHERED and (one.marker is None or any(map(one.marker.evaluate, here))):
            one.marker = None
            found.append(str(one))
    return found


def gather(folder: Path, python_version: str) -> list[Path]:
    """Build the wheel of this package, and download its requirements. Return all wheels.

    Args:
        folder: Output folder; created if necessary. Existing wheels are not downloaded again.
        python_version: Python version of the target machine, such as `"3.12"`.

    Raises:
        subprocess.CalledProcessError: The build or pip has failed, and has printed the reason.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as build:
        _run("hatchling", "build", "--target", "wheel", "--directory", build)
        [built] = Path(build).glob("*.whl")
        wheel = folder / built.name
        wheel.write_bytes(built.read_bytes())
    for_that = ("--python-version", python_version, "--only-binary", ":all:", "--constraint", "constraints.txt")
    before = set(folder.glob("*.whl"))
    needed = requirements(wheel, python_version)
    said = _run("pip", "--disable-pip-version-check", "download", *for_that, "--dest", str(folder.resolve()), *needed)
    named = {path for path in folder.glob("*.whl") if path.name in said}
    return sorted({wheel} | (set(folder.glob("*.whl")) - before) | named)


def _run(*module: str) -> str:
    """Run a Python module in the repository. Its output is shown only if it fails."""
    done = subprocess.run([sys.executable, "-m", *module], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        print(done.stdout + done.stderr, file=sys.stderr)
        done.check_returncode()
    return done.stdout


def _supported(python_version: str) -> str:
    with (ROOT / "pyproject.toml").open("rb") as file:
        asked = tomllib.load(file)["project"]["requires-python"]
    try:
        is_supported = python_version in SpecifierSet(asked)
    except InvalidVersion:
        is_supported = False
    if not is_supported:
        raise argparse.ArgumentTypeError(f"{python_version!r} is no version of Python for it; it needs {asked}")
    return python_version


def main() -> int:
    here = ".".join(map(str, sys.version_info[:2]))
    parser = argparse.ArgumentParser(description="Gather the wheels for a machine without a network, all but torch.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python-version", type=_supported, default=here, metavar="3.12")
    given = parser.parse_args()
    try:
        wheels = gather(given.folder, given.python_version)
    except subprocess.CalledProcessError as error:
        return int(error.returncode)
    size_mb = sum(wheel.stat().st_size for wheel in wheels) / 1e6
    what = f"{len(wheels)} wheels for Python {given.python_version}, {size_mb:.0f} MB, without torch"
    print(f"{given.folder}: {what}. There:")
    print(f"  pip install --no-index --find-links {given.folder.name} 'ddp_notebook[{','.join(EXTRAS)}]'")
    print("torch must be installed there already, or its wheel and those of what it needs lie in that folder too.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
