"""A real marimo in a real browser: a notebook in the editor (`marimo edit`) or as an app (`marimo run`).

    with open_marimo(path) as page:
        page.run_all()
        page.wait_for_text("[0-1] tensor([1., 1.])")

marimo is in the folder DDP_NOTEBOOK_TEST_MARIMO, which precedes the packages of this environment.
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
from contextlib import contextmanager, suppress
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
_INACTIVE = re.compile("inactive-button")
_CONTROLS = "[data-testid='chrome-controls-bottom-right']"


class Marimo:
    """One open notebook."""

    def __init__(self, page: Page, server: psutil.Popen) -> None:
        self.page = page
        self.server = server

    def run_all(self) -> None:
        """Run all cells that never ran, with the button. Retries, because a page that has just loaded may ignore it."""
        button = self.page.locator(f"{_CONTROLS} [data-testid='run-button']")
        expect(button).not_to_have_class(_INACTIVE, timeout=30_000)  # the cells exist
        for _ in range(10):
            button.click()
            with suppress(AssertionError):
                expect(button).to_have_class(_INACTIVE, timeout=3_000)  # all cells have run
                return
        raise AssertionError("no cell starts")

    def run_cell(self, index: int) -> None:
        """Run one cell, and the cells that depend on it, with its button."""
        cell = self.page.locator("[data-testid='cell-editor']").nth(index)
        cell.click()
        self.page.keyboard.press("Control+Enter")

    def stop(self) -> None:
        """Press the button that interrupts the notebook."""
        self.page.locator(f"{_CONTROLS} [data-testid='interrupt-button']").click()

    def text(self) -> str:
        """Return all text on the page, including code."""
        return self.page.locator("body").inner_text()

    def wait_for_text(self, text: str, timeout_s: float = 60.0) -> None:
        """Wait until the page shows the text."""
        try:
            expect(self.page.get_by_text(text).first).to_be_visible(timeout=timeout_s * 1000)
        except AssertionError:
            raise AssertionError(f"no {text!r} after {timeout_s:g} s, but:\n{self.text()}") from None


def folder() -> str:
    """Return the folder of marimo. Skip the test if it does not exist."""
    found = os.environ.get("DDP_NOTEBOOK_TEST_MARIMO", "")
    if not Path(found, "marimo").is_dir():
        pytest.skip("DDP_NOTEBOOK_TEST_MARIMO names no folder with marimo; `make test-long` sets it")
    return found


@contextmanager
def open_marimo(notebook: Path, mode: Literal["edit", "run"] = "edit") -> Iterator[Marimo]:
    """Open a marimo notebook. If the block fails, a screenshot is saved in `SCREENSHOTS`."""
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
                page = browser.new_context(viewport={"width": 1280, "height": 1600}).new_page()
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
            _end(server, log)


def _listens(port: int) -> bool:
    with socket.socket() as here:
        return here.connect_ex(("127.0.0.1", port)) == 0
