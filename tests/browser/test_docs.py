"""The documentation site, opened as files without a server or a network."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import FrameLocator, Locator, Page, expect, sync_playwright

import ddp_notebook
from ddp_notebook import lessons, widgets
from tests.browser import chromium
from tests.browser.jupyterlab import SCREENSHOTS

ROOT = Path(__file__).parents[2]
WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 360, "height": 800}
THEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
NO_PAGES = ("_static", "recordings")  # the recordings are separate pages, see tests/widgets/test_page.py

pytestmark = [pytest.mark.long, pytest.mark.browser, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site like `make docs`. Outputs that are still current are reused."""
    if importlib.util.find_spec("sphinx") is None:
        pytest.skip("Sphinx is not installed; `make test-long` installs it: pip install -e '.[docs]'")
    output = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "tools.docs", "--output", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return output


@contextmanager
def browser(*, scheme: Literal["light", "dark"] = "light", viewport: dict[str, int] = WIDE) -> Iterator[Page]:
    """A page in Chromium without a network. An error, a warning, or an external request fails the test."""
    heard: list[str] = []
    with sync_playwright() as playwright:
        chrome = playwright.chromium.launch(executable_path=chromium.executable(), args=list(chromium.ARGUMENTS))
        try:
            context = chrome.new_context(offline=True, color_scheme=scheme, viewport=viewport)  # type: ignore[arg-type]
            page = context.new_page()
            page.on("console", lambda one: heard.append(f"{page.url}: {one.text}") if one.type != "log" else None)
            page.on("pageerror", lambda error: heard.append(f"{page.url}: {error}"))
            page.on(
                "request",
                lambda one: None if one.url.startswith(("file:", "blob:", "data:")) else heard.append(one.url),
            )
            yield page
        finally:
            chrome.close()
    assert heard == []


def pages_of(site: Path) -> list[Path]:
    return sorted(path for path in site.rglob("*.html") if path.relative_to(site).parts[0] not in NO_PAGES)


# ---- links


class Document(HTMLParser):
    """The ids and the links of one page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if "id" in given:
            self.ids.append(given["id"] or "")
        for name in ("href", "src"):
            if (address := given.get(name)) is not None:
                self.addresses.append(address)


def test_every_link_leads_somewhere(site):
    documents = {path: Document(path) for path in [*pages_of(site), *(site / "recordings").glob("*.html")]}
    wrong = []
    for path, document in documents.items():
        for address in set(document.addresses):
            parts = urlsplit(address)
            if parts.scheme in ("https", "data"):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if parts.scheme or parts.netloc or not target.is_relative_to(site) or not target.is_file():
                wrong.append((path.name, address, "no such file"))
            elif parts.fragment and target in documents and unquote(parts.fragment) not in documents[target].ids:
                wrong.append((path.name, address, "no such place"))
    assert wrong == []
    assert len(documents) > 25


def test_no_name_of_a_place_is_there_twice(site):
    for path in pages_of(site):
        ids = Document(path).ids
        assert sorted(set(ids)) == sorted(ids), path.name


# ---- what is on it


def test_every_public_name_is_in_the_reference(site):
    ids = {name for path in (site / "reference").glob("*.html") for name in Document(path).ids}
    wanted = {
        *(f"ddp_notebook.{name}" for name in ddp_notebook.__all__ if not name.endswith("Error")),
        *(f"ddp_notebook.errors.{name}" for name in ddp_notebook.errors.__all__),
        *(f"ddp_notebook.lessons.{name}" for name in lessons.__all__),
        *(f"ddp_notebook.widgets.{name}" for name in widgets.__all__),
        "ddp_notebook.Session.run",
        "ddp_notebook.Session.pull",
        "ddp_notebook.Recording.save_html",
        "ddp_notebook.Recording.rows",
    }
    assert wanted - ids == set()


def test_each_text_of_the_repository_is_there(site):
    for source, page in (
        ("ARCHITECTURE.md", "ARCHITECTURE.html"),
        ("CONTRIBUTING.md", "CONTRIBUTING.html"),
        ("CHANGELOG.md", "CHANGELOG.html"),
        ("tests/benchmarks/RESULTS.md", "tests/benchmarks/RESULTS.html"),
    ):
        shown = re.sub(r"<[^>]+>", "", (site / page).read_text())
        text = (ROOT / source).read_text()
        for title in re.findall(r"^##? ([\w ?]+)$", text, re.MULTILINE):
            assert title in shown, (page, title)


def test_executed_notebooks_contain_no_local_path(site):
    notebooks = sorted((site / "notebooks").glob("[0-9]*.html"))
    assert len(notebooks) == len(list((ROOT / "notebooks").glob("[0-9][0-9]_*[a-z].ipynb")))
    for path in notebooks:
        text = path.read_text()
        assert text.count('class="cell_output') > 5 and "backend gloo, group 1" in text, path.name
        assert str(ROOT) not in text and sys.prefix not in text, path.name


# ---- how it looks


@pytest.mark.parametrize("theme", THEMES)
def test_every_page_is_accessible_and_asks_nobody(site, theme):
    with browser(scheme=theme) as page:
        for path in pages_of(site):
            page.goto(path.as_uri())
            expect(page.locator("html")).to_have_attribute("data-theme", theme)
            # A page from a folder may not read style sheets or frames. No rule here needs style sheets. The frames
            # contain the recordings, which have separate tests.
            found = Axe().run(page, options={"preload": False, "iframes": False})
            assert found.violations_count == 0, f"{path}\n{found.generate_report()}"


@pytest.mark.parametrize("viewport", [WIDE, NARROW], ids=["wide", "narrow"])
def test_nothing_sticks_out_of_a_page(site, viewport):
    with browser(viewport=viewport) as page:
        for path in pages_of(site):
            page.goto(path.as_uri())
            over = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert over <= 0, f"{path} is {over} px too wide"


# ---- to be played with


def test_the_recorded_training_reacts_and_follows_the_theme(site):
    with browser() as page:
        page.goto((site / "play.html").as_uri())
        frame = page.frame_locator("iframe.recording")
        panel(frame, "Timeline")
        panel(frame, "Gradient sync")
        monitor = frame.locator(".ddpm")
        expect(monitor).to_have_attribute("data-theme", "light")
        page.evaluate("document.documentElement.dataset.theme = 'dark'")
        expect(monitor).to_have_attribute("data-theme", "dark")
        expect(frame.get_by_role("tab", name="Gradient sync")).to_have_attribute("aria-selected", "true")
        SCREENSHOTS.mkdir(exist_ok=True)
        page.screenshot(path=SCREENSHOTS / "docs_play_dark.png", full_page=True)


def panel(frame: FrameLocator, name: str) -> None:
    tab = frame.get_by_role("tab", name=name)
    tab.click()
    expect(tab).to_have_attribute("aria-selected", "true")
    state = frame.locator(".ddpm").evaluate("root => root.ddpMonitor.state().panel")
    assert name.split()[-1].lower() in state or name.split()[0].lower() in state, state


def test_the_recorded_lessons_can_be_played(site):
    with browser() as page:
        page.goto((site / "play.html").as_uri())
        predict_a_collective(page.locator("[data-lesson=collective]"))
        take_steps(page.locator("[data-lesson=algorithm]"))
        see_a_race(page.locator("[data-lesson=messages]"))
        multiply_pieces(page.locator("[data-lesson=product]"))
        train_on_a_mesh(page.locator("[data-lesson=mesh]"))


def predict_a_collective(lesson: Locator) -> None:
    guesses = lesson.locator("input.ddpl-guess")
    guesses.nth(0).fill("1111")
    guesses.nth(1).fill("5")
    lesson.get_by_role("button", name="Run on the ranks").click()
    lesson.get_by_role("button", name="Reveal").click()
    expect(lesson.locator(".ddpl-verdict")).to_have_text("1 of 2 cells right. NumPy computes the same numbers.")

    lesson.get_by_label("collective", exact=True).select_option("reduce_scatter")
    lesson.get_by_label("reduce op", exact=True).select_option("MAX")
    expect(lesson.locator(".ddpl-code").first).to_contain_text("dist.ReduceOp.MAX")
    lesson.get_by_role("button", name="Run on the ranks").click()
    expect(lesson.locator(".ddpl-verdict")).to_have_text("NumPy computes the same numbers.")

    lesson.get_by_label("reduce op", exact=True).select_option("SUM")
    lesson.locator("summary").click()
    lesson.get_by_role("button", name="Try it on the ranks").click()
    expect(lesson.locator(".ddpl-told")).to_contain_text("CollectiveMismatchError")

    lesson.get_by_role("checkbox", name="1").click()
    expect(lesson.get_by_role("alert")).to_contain_text("This page replays what four ranks did")
    expect(lesson.get_by_role("checkbox", name="1")).to_be_checked()


def take_steps(lesson: Locator) -> None:
    step = lesson.get_by_role("button", name="Step ▶")
    for _ in range(6):
        step.click()
    expect(lesson.locator("output")).to_have_text("6 / 6")
    expect(lesson).to_contain_text("On every link exactly the bytes that theory says.")
    lesson.get_by_label("algorithm", exact=True).select_option("parameter server")
    expect(lesson.locator("output")).to_contain_text("0 / ")
    lesson.get_by_role("button", name="Compare with").click()
    expect(lesson).to_contain_text("All ranks have what dist.all_reduce(x) gives.")


def see_a_race(lesson: Locator) -> None:
    lesson.get_by_label("scene", exact=True).select_option("race")
    expect(lesson.locator(".ddpl-said")).to_contain_text("changed")
    lesson.get_by_label("scene", exact=True).select_option("deadlock")
    expect(lesson.locator(".ddpl-message")).to_contain_text("waiting in send")


def multiply_pieces(lesson: Locator) -> None:
    lesson.get_by_label("A", exact=True).select_option("Shard(1)")
    lesson.get_by_label("B", exact=True).select_option("Shard(0)")
    expect(lesson.locator(".ddpl-matrix")).to_have_count(3)
    lesson.get_by_role("radio", name="all_gather", exact=True).check()
    lesson.get_by_role("button", name="Run on the ranks").click()
    expect(lesson.locator(".ddpl-verdict")).to_contain_text("Not 'all_gather': all_reduce")
    lesson.get_by_role("radio", name="all_reduce", exact=True).check()
    lesson.get_by_role("button", name="Run on the ranks").click()
    expect(lesson.locator(".ddpl-verdict")).to_contain_text("You were right: all_reduce")


def train_on_a_mesh(lesson: Locator) -> None:
    lesson.get_by_role("radio", name="along the row").check()
    lesson.get_by_role("button", name="Train on the ranks").click()
    expect(lesson.locator(".ddpl-verdict")).to_contain_text("You were right: along the row")
    lesson.get_by_label("look at", exact=True).select_option("3")
    expect(lesson.locator(".ddpl-moved caption")).to_have_text("What rank 3 moves in one step")
    lesson.get_by_label("training", exact=True).select_option("TP and FSDP")
    lesson.get_by_role("checkbox", name="every rank its own batch").check()
    lesson.get_by_role("button", name="Train on the ranks").click()
    expect(lesson).to_contain_text("Losses are NOT those of one process")


def test_the_search_finds_a_method_and_leads_to_it(site):
    with browser() as page:
        page.goto((site / "index.html").as_uri())
        page.keyboard.press("Control+k")
        page.keyboard.type("straggler")
        page.keyboard.press("Enter")
        found = page.locator("#search-results a", has_text="Recording.straggler")
        expect(found.first).to_be_visible()
        found.first.click()
        expect(page).to_have_url(re.compile(r"reference/recording\.html.*#ddp_notebook\.Recording\.straggler$"))


def test_the_theme_is_chosen_by_a_button_and_kept(site):
    with browser() as page:
        page.goto((site / "index.html").as_uri())
        html = page.locator("html")
        page.get_by_role("button", name="Color mode").first.click()
        page.get_by_role("button", name="Dark").first.click()
        expect(html).to_have_attribute("data-theme", "dark")
        page.goto((site / "play.html").as_uri())
        expect(html).to_have_attribute("data-theme", "dark")
        expect(page.locator("[data-lesson=algorithm] .ddpl")).to_have_attribute("data-theme", "dark")
