"""A recording as one page: complete, self-contained, and drawn by a real browser without a network."""

from __future__ import annotations

import base64
import gzip
import json
import re
from contextlib import contextmanager
from typing import Literal

import numpy as np
import pytest
from playwright.sync_api import expect, sync_playwright

import ddp_notebook
from ddp_notebook.errors import UsageError
from ddp_notebook.observe.recording import Recording
from ddp_notebook.widgets.simulated.simulation import simulate
from ddp_notebook.widgets.still import saved_page, saved_summary
from tests.browser import chromium
from tests.observe.batches import Rank
from tests.observe.test_figures import logged
from tests.widgets.unpacking import unpack

EVIL = "</script><script>document.title='taken'</script><!--<script> & $title"


@contextmanager
def opened(path, *, scripts: bool = True, scheme: Literal["light", "dark"] = "light"):
    """Open the page in Chromium without a network. Any message in its console fails the test."""
    said: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium.executable(), args=list(chromium.ARGUMENTS))
        try:
            context = browser.new_context(offline=True, java_script_enabled=scripts, color_scheme=scheme)
            shown = context.new_page()
            shown.on("console", lambda message: said.append(message.text))
            shown.on("pageerror", lambda error: said.append(str(error)))
            shown.on(
                "request", lambda one: None if one.url.startswith(("file:", "blob:", "data:")) else said.append(one.url)
            )
            shown.goto(path.as_uri())
            if scripts:
                shown.locator("#still").wait_for(state="hidden")
            yield shown
        finally:
            browser.close()
    assert said == []


@pytest.fixture(scope="module")
def recording():
    return simulate(world_size=4, steps=40)


@pytest.fixture(scope="module")
def saved(recording, tmp_path_factory):
    return recording.save_html(tmp_path_factory.mktemp("page") / "run.html")


@pytest.mark.long
def test_every_panel_draws_it_without_a_kernel_or_a_network(saved, recording):
    with opened(saved) as shown:
        assert shown.title() == saved_summary.text(recording)
        store = shown.evaluate(
            """() => {
              const { store } = document.querySelector("#monitor").querySelector("*").ddpMonitor
                ?? [...document.querySelectorAll("#monitor *")].find((one) => one.ddpMonitor).ddpMonitor;
              return { world: store.worldSize, metrics: store.metricNames(), steps: store.steps().length,
                       collectives: store.collectives().length, missed: store.missed };
            }"""
        )
        calls = recording.rows("call")
        assert store == {
            "world": 4,
            "metrics": ["loss", "accuracy"],
            "steps": 40,
            "collectives": store["collectives"],
            "missed": 0,
        }
        assert store["collectives"] >= len(np.unique(calls["number"][calls["peer"] < 0]))
        tabs = shown.locator("[role=tab]").all()
        assert [tab.inner_text() for tab in tabs] == ["Loss", "Gradient sync", "Timeline", "Tensors", "Ranks", "Calls"]
        for tab in tabs:
            tab.click()
            shown.wait_for_timeout(200)  # time for messages to the console
            assert tab.get_attribute("aria-selected") == "true"


def test_the_data_are_all_that_was_recorded(recording):
    found = saved_page.message(recording)
    rows = {name: table["rows"] for name, table in found.header["tables"].items()}

    calls, spans, values = (recording.rows(table) for table in ("call", "span", "value"))
    assert rows["metric"] == len(recording.rows("metric"))
    assert rows["span"] == len(spans) + len(calls)
    assert rows["step"] == len(recording.steps())
    assert rows["bucket"] == sum(len(step.buckets) for step in recording.steps())
    assert rows["value"] == len(values)
    assert rows["rank"] == 4
    assert found.header["kind"] == "snapshot" and found.header["notes"] == {
        "dropped_rows": 0,
        "values_left_out": 0,
    }
    texts = dict(found.header["texts"])
    assert {"loss", "all_reduce", "default", "cell line 12", "recorded"} <= set(texts.values())


@pytest.mark.long
def test_ranks_stand_under_their_hosts(tmp_path):
    recording = simulate(world_size=4, steps=4)
    panels = (
        "() => [...document.querySelectorAll('#monitor *')].find((one) => one.ddpMonitor).ddpMonitor.state().panels"
    )
    headings, titles = [], []
    for hosts in ((), ("gpu1", "gpu1", "gpu2", "gpu2")):
        recording.hosts = hosts
        kept = ddp_notebook.load(recording.save(tmp_path / "run.npz"))
        assert kept.hosts == hosts
        with opened(kept.save_html(tmp_path / "run.html")) as shown:
            shown.get_by_role("tab", name="Timeline").click()
            shown.wait_for_timeout(200)
            headings.append([one["host"] for one in shown.evaluate(panels)["timeline"]["headings"]])
            shown.get_by_role("tab", name="Ranks").click()
            titles.append(shown.locator(".ddpm-ranks thead th").all_inner_texts()[:2])
            beginning = shown.locator(".ddpm-begins-host").all_inner_texts()
    assert headings == [[], ["gpu1", "gpu2"]] and titles == [["Rank", "State"], ["Rank", "Host"]]
    assert [words.split()[:2] for words in beginning] == [["2", "gpu2"]]


def test_the_page_keeps_the_last_rows_and_a_note_explains_it(recording, monkeypatch):
    monkeypatch.setitem(saved_page.MOST, "span", 1000)
    monkeypatch.setitem(saved_page.MOST, "value", 500)
    header = saved_page.message(recording).header

    assert 900 < header["tables"]["span"]["rows"] <= 1000 and header["tables"]["value"]["rows"] <= 500
    begins = re.fullmatch(
        r"the page holds the last rows: timeline, steps and tensors begin at ([\d.]+) s", header["notes"]["page"]
    )
    assert begins and 0.5 < float(begins[1]) < 4
    assert header["tables"]["metric"]["rows"] == len(recording.rows("metric")), "metrics are few"


def test_values_that_stay_are_the_last_of_all_ranks(monkeypatch):
    monkeypatch.setitem(saved_page.MOST, "value", 8)
    recording = Recording(2)
    for one in (Rank(0), Rank(1)):  # all rows of one rank before those of the other
        for number in range(1, 21):
            recording._feed(one.batch(one.call(cell=1, issue_ns=1000 * number), one.values(number, 1, [1.0])))
    found = saved_page.message(recording)
    value = unpack(found.header, found.data)["value"]
    assert value["number"].tolist() == np.repeat([17, 18, 19, 20], 2).tolist()
    assert value["rank"].tolist() == [0, 1] * 4


@pytest.mark.long
def test_the_same_recording_gives_the_same_page_of_one_file(saved, recording, tmp_path):
    text = saved.read_text()
    again = recording.save_html(tmp_path / "again.html").read_text()

    assert text == again
    assert re.findall(r'(?:src|href)="(?!data:)', text) == []
    assert "default-src 'none'" in text
    assert len(text) < 700_000


@pytest.mark.slow
def test_a_saved_recording_makes_the_same_page(recording, saved, tmp_path):
    loaded = ddp_notebook.load(recording.save(tmp_path / "run.npz"))
    assert loaded.save_html(tmp_path / "run.html").read_text() == saved.read_text()


@pytest.mark.slow
def test_texts_cannot_leave_their_element(tmp_path):
    recording = logged({0: [1.0, 0.5], 1: [1.0, 0.6]}, name=EVIL)
    with opened(recording.save_html(tmp_path / "evil.html")) as shown:
        assert shown.title() == saved_summary.text(recording) and EVIL in shown.title()
        expect(shown.locator("select option", has_text="taken")).to_have_count(1)
        assert shown.locator("img").get_attribute("alt") == saved_summary.text(recording)


@pytest.mark.slow
def test_without_scripts_the_picture_and_the_text_stand_there(saved, recording):
    with opened(saved, scripts=False, scheme="dark") as shown:
        assert shown.locator("h1").inner_text() == saved_summary.text(recording)
        assert shown.locator("#still img").is_visible()
        assert "Where scripts may run" in shown.locator("noscript").inner_text()


@pytest.mark.long
def test_a_page_that_has_it_in_a_frame_says_the_theme(saved):
    with opened(saved, scheme="dark") as shown:
        monitor = shown.locator(".ddpm")
        expect(monitor).to_have_attribute("data-theme", "dark")
        for fragment, theme in (("light", "light"), ("dark", "dark"), ("light", "light"), ("title", "dark")):
            shown.evaluate(f"location.hash = '{fragment}'")
            expect(monitor).to_have_attribute("data-theme", theme)


def test_the_packed_data_are_the_message(saved, recording):
    text = saved.read_text()
    (data,) = re.findall(r'id="data">([^<]*)<', text)
    (header,) = re.findall(r'id="header">([^<]*)<', text)
    found = saved_page.message(recording)
    assert gzip.decompress(base64.b64decode(data)) == found.data
    assert json.loads(header) == found.header


@pytest.mark.long
def test_an_empty_recording_has_a_page_too(tmp_path):
    with opened(Recording(2).save_html(tmp_path / "empty.html")) as shown:
        assert shown.title() == "2 ranks, nothing recorded"


def test_a_folder_that_is_not_there_is_said(tmp_path):
    with pytest.raises(UsageError, match=r"^the folder '.*nowhere' for run.html does not exist; create it first$"):
        Recording(2).save_html(tmp_path / "nowhere" / "run.html")
    assert list(tmp_path.iterdir()) == []
