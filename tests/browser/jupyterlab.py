"""A real JupyterLab or Notebook 7 in a real browser, for tests of the display.

    with open_notebook(path) as lab:
        lab.run_all()
        lab.wait_for_text(2, "tensor([1., 1.])")
        lab.press_stop()

Server and browser listen on loopback only and keep their files in a separate folder. At the end of the block they are
stopped with all processes that the server started.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from playwright.sync_api import Locator, Page, expect, sync_playwright

from tests.browser import chromium

START_TIMEOUT_S = 60
STOP_TIMEOUT_S = 30  # takes 1 s; 4 s in parallel with three others on two cores
RUN_TIMEOUT_S = 60

SCREENSHOTS = Path(__file__).parent / "screenshots"

# Disable downloads of a fresh JupyterLab, and the windowing that removes cells outside of the screen.
SETTINGS: dict[str, dict[str, object]] = {
    "apputils-extension/notification": {
        "fetchNews": "false",
        "checkForUpdates": False,
        "doNotDisturbMode": True,
    },
    "extensionmanager-extension/plugin": {"enabled": False},
    "notebook-extension/tracker": {"windowingMode": "none"},
}


@dataclass(frozen=True, slots=True)
class Server:
    """A Jupyter server started by the tests."""

    process: psutil.Popen
    url: str  # http://127.0.0.1:PORT/
    token: str


class JupyterLab:
    """One notebook, open in JupyterLab or in Notebook 7, which has the same components.

    Cells are counted from 0, including text cells.
    """

    def __init__(self, page: Page, server: Server) -> None:
        self.page = page
        self.server = server

    def run_all(self) -> None:
        """Start all cells through the Run menu, without waiting for them. Retries like `run_cell`."""
        before = self._prompts()
        for _ in range(3):
            self.page.locator(".lm-MenuBar-item", has_text=re.compile("^Run$")).click()
            self.page.locator(".lm-Menu-item[data-command='runmenu:run-all']").click()
            until = time.monotonic() + 5
            while time.monotonic() < until:
                if self._prompts() != before:
                    return
                self.page.wait_for_timeout(50)
        raise AssertionError("no cell starts")

    def restart_and_run_all(self) -> None:
        """Restart the kernel and start all cells through the Run menu, without waiting for them."""
        self.page.locator(".lm-MenuBar-item", has_text=re.compile("^Run$")).click()
        self.page.locator(".lm-Menu-item[data-command='runmenu:restart-and-run-all']").click()
        self.page.locator(".jp-Dialog button.jp-mod-accept").click()

    def _prompts(self) -> list[str]:
        return self.page.locator(".jp-Notebook .jp-Cell .jp-InputPrompt").all_inner_texts()

    def run_cell(self, index: int) -> None:
        """Start one cell with Ctrl+Enter, without waiting for it. Retries, because a page that has just loaded may
        ignore it."""
        prompt = self._cell(index).locator(".jp-InputPrompt")
        before = prompt.inner_text()
        for _ in range(3):
            prompt.click()
            self.page.keyboard.press("Control+Enter")
            with suppress(AssertionError):
                expect(prompt).not_to_have_text(before, timeout=5_000)
                return
        raise AssertionError(f"cell {index} does not start")

    def press_stop(self) -> None:
        """Press the toolbar's stop button, which interrupts the kernel."""
        self.page.locator(".jp-NotebookPanel-toolbar [data-command='notebook:interrupt-kernel']").click()

    def text(self, index: int) -> str:
        """Return the current text of a cell's outputs on the page."""
        return "\n".join(self._cell(index).locator(".jp-OutputArea-output").all_inner_texts())

    def wait_for_text(self, index: int, text: str, timeout_s: float = RUN_TIMEOUT_S) -> None:
        """Wait until a cell's outputs contain the text."""
        outputs = self._cell(index).locator(".jp-Cell-outputArea")
        try:
            expect(outputs).to_contain_text(text, timeout=timeout_s * 1000)
        except AssertionError:
            # the message of playwright repeats the whole output several times
            found = self.text(index)
            raise AssertionError(f"no {text!r} in cell {index} after {timeout_s} s, but:\n{found}") from None

    def wait_until_done(self, index: int, timeout_s: float = RUN_TIMEOUT_S) -> None:
        """Wait until a cell has run: its prompt shows a number instead of the star."""
        prompt = self._cell(index).locator(".jp-InputPrompt")
        try:
            expect(prompt).to_have_text(re.compile(r"^\[\d+\]:$"), timeout=timeout_s * 1000)
        except AssertionError:
            found = prompt.inner_text()
            raise AssertionError(f"cell {index} still shows {found!r} after {timeout_s} s") from None

    def screenshot(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=path)

    def _cell(self, index: int) -> Locator:
        return self.page.locator(".jp-Notebook .jp-Cell").nth(index)


@contextmanager
def open_notebook(
    notebook: Path, env: Mapping[str, str] | None = None, app: str = "jupyterlab"
) -> Iterator[JupyterLab]:
    """Open a notebook in an app, "jupyterlab" or "notebook", with its kernel started and idle.

    The root of the server is the notebook's folder, which JupyterLab may write to. If the block fails, a screenshot is
    saved in `SCREENSHOTS`. Skips the test without chromium (see `chromium.executable`).

    Args:
        env: Variables added to the environment of the server and its kernels.
    """
    executable = chromium.executable()
    with (
        tempfile.TemporaryDirectory(prefix="ddp_notebook_lab_") as folder,
        _running_server(app, notebook.parent, Path(folder), env or {}) as server,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(
            executable_path=executable,
            args=list(chromium.ARGUMENTS),
            env={**os.environ, "HOME": folder},  # chromium keeps caches and certificates there
        )
        try:
            page = browser.new_page(viewport={"width": 1280, "height": 1000})
            lab = JupyterLab(page, server)
            try:
                if app == "notebook":
                    page.goto(f"{server.url}notebooks/{notebook.name}?token={server.token}")
                    idle = page.locator(".jp-NotebookPanel-toolbar [data-status='idle']")
                    expect(idle.first).to_be_visible(timeout=START_TIMEOUT_S * 1000)
                else:
                    page.goto(f"{server.url}lab/tree/{notebook.name}?token={server.token}")
                    # The toolbar shows idle even before there is a kernel; the status bar does not.
                    status = page.locator("#jp-main-statusbar")
                    expect(status).to_contain_text("(ipykernel) | Idle", timeout=START_TIMEOUT_S * 1000)
                yield lab
            except BaseException:
                lab.screenshot(SCREENSHOTS / f"{notebook.stem}.png")
                raise
        finally:
            browser.close()


@contextmanager
def _running_server(app: str, root: Path, folder: Path, extra_env: Mapping[str, str]) -> Iterator[Server]:
    token = secrets.token_hex(16)
    runtime, settings = folder / "runtime", folder / "settings"
    for name, values in SETTINGS.items():
        file = settings / "@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))

    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    env |= {
        "JUPYTER_CONFIG_DIR": str(folder / "config"),
        "JUPYTER_DATA_DIR": str(folder / "data"),
        "JUPYTER_RUNTIME_DIR": str(runtime),
        "JUPYTERLAB_SETTINGS_DIR": str(settings),
        "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
        "IPYTHONDIR": str(folder / "ipython"),
        "JUPYTER_TOKEN": token,
        **extra_env,
    }
    command = [sys.executable, "-m", app, "--no-browser", "--allow-root"]
    command += ["--ServerApp.ip=127.0.0.1", "--ServerApp.port=0", f"--ServerApp.root_dir={root}"]
    command += ["--LabApp.extension_manager=readonly", "--LabApp.news_url=None"]
    command += ["--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]

    log = folder / "server.log"
    with log.open("wb") as output:
        process = psutil.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield Server(process, _wait_for_url(process, runtime, log), token)
    finally:
        _end(process, log)


def _wait_for_url(process: psutil.Popen, runtime: Path, log: Path) -> str:
    """Return the URL of the server, which chooses its port and writes its address to a file when it listens."""
    info = runtime / f"jpserver-{process.pid}.json"
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            return str(json.loads(info.read_text())["url"])
        except (FileNotFoundError, json.JSONDecodeError):
            time.sleep(0.05)
    how = "did not start in time" if process.poll() is None else f"ended with code {process.returncode}"
    raise RuntimeError(f"JupyterLab {how}; its log:\n{log.read_text()}")


def _end(process: psutil.Popen, log: Path) -> None:
    """End the server and its kernels. Fail if any process of its tree survives.

    The server itself may survive. On a busy machine it has hung forever after its kernel had ended. The reason was the
    request of a reloaded page for the status of JupyterLab's build.
    """
    tree = [process]
    with suppress(psutil.NoSuchProcess):  # a test may have ended the server itself
        tree += process.children(recursive=True)
        process.terminate()
    _, left = psutil.wait_procs(tree, timeout=STOP_TIMEOUT_S)
    for survivor in left:
        with suppress(psutil.NoSuchProcess):
            survivor.kill()
    process.wait()
    if left and left != [process]:
        said = f"the Jupyter server was told to end, and said:\n{log.read_text()[-3000:]}"
        raise RuntimeError(f"alive {STOP_TIMEOUT_S} s later: {left}; {said}")
