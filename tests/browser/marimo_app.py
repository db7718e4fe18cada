"""A real marimo in a real browser: a notebook that is edited (`marimo edit`) or shown as an app (`marimo run`).

    with open_marimo(path) as page:
        page.run_all()
        page.wait_for_console("[0-1] tensor([1., 1.])")

It comes from the folder that DDP_NOTEBOOK_TEST_MARIMO names, over the packages of this environment.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import psutil
import pytest
from playwright.sync_api import Page, expect, sync_playwright

from tests.browser import chromium
from tests.browser.jupyterlab import SCREENSHOTS, _end
from tests.conftest import wait_until

ROOT = Path(__file__).parents[2]
_START_S = 60.0
_CONSOLE = "[data-testid='console-output-area']"


class Marimo:
    """One notebook, open."""

    def __init__(self, page: Page, server: psutil.Popen) -> None:
        self.page = page
        self.server = server

    def run_all(self) -> None:
        """Run all cells that have changed or never ran, through the button."""
        self.page.locator("#run-button").click()

    def stop(self) -> None:
        """Press the button that interrupts the notebook."""
        self.page.locator("#interrupt-button").click()

    def console(self) -> str:
        """What the cells have printed, as it stands on the page now."""
        return "\n".join(self.page.locator(_CONSOLE).all_inner_texts())

    def wait_for_console(self, text: str, timeout_s: float = 60.0) -> None:
        """Wait until some cell's console shows the text."""
        shows = self.page.locator(_CONSOLE, has_text=text).first
        try:
            expect(shows).to_be_visible(timeout=timeout_s * 1000)
        except AssertionError:
            raise AssertionError(f"no {text!r} after {timeout_s:g} s, but:\n{self.console()}") from None

    def wait_for_numbers(self, pattern: str, timeout_s: float = 60.0) -> list[str]:
        """Wait until the console has a match; returns all of them."""
        wait_until(lambda: re.findall(pattern, self.console()), timeout_s, f"{pattern} on the page")
        return re.findall(pattern, self.console())


def folder() -> str:
    """Where marimo lies; skips the test where it does not."""
    found = os.environ.get("DDP_NOTEBOOK_TEST_MARIMO", "")
    if not Path(found, "marimo").is_dir():
        pytest.skip("DDP_NOTEBOOK_TEST_MARIMO names no folder with marimo; `make test-long` sets it")
    return found


@contextmanager
def open_marimo(notebook: Path, mode: Literal["edit", "run"] = "edit") -> Iterator[Marimo]:
    """Open a notebook of marimo's. When the block fails, a screenshot is left in `SCREENSHOTS`."""
    packages, token = folder(), secrets.token_hex(16)
    executable = chromium.executable()
    with tempfile.TemporaryDirectory(prefix="ddp_notebook_marimo_") as home, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        env |= {"PYTHONPATH": os.pathsep.join([packages, str(ROOT)]), "HOME": home, "XDG_CONFIG_HOME": home}
        options = ["--headless", "--host", "127.0.0.1", "--port", str(port), "--token-password", token]
        options += ["--skip-update-check"] if mode == "edit" else ["--redirect-console-to-browser"]
        command = [sys.executable, "-m", "marimo", mode, str(notebook), *options]
        log = Path(home, "server.log")
        with log.open("wb") as output:
            server = psutil.Popen(
                command, env=env, cwd=home, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
        try:
            wait_until(lambda: _listens(port) or server.poll() is not None, _START_S, "marimo listens")
            assert server.poll() is None, log.read_text()
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(
                    executable_path=executable, args=list(chromium.ARGUMENTS), env={**os.environ, "HOME": home}
                )
                page = browser.new_page(viewport={"width": 1280, "height": 1600})
                try:
                    page.goto(f"http://127.0.0.1:{port}/?access_token={token}")
                    yield Marimo(page, server)
                except BaseException:
                    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
                    page.screenshot(path=SCREENSHOTS / f"{notebook.stem}_{mode}.png")
                    raise
                finally:
                    browser.close()
        finally:
            _end(server)


def _listens(port: int) -> bool:
    with socket.socket() as here:
        return here.connect_ex(("127.0.0.1", port)) == 0
