"""Make docs/monitor.png and docs/monitor.gif: a picture and an animation of the monitor, from real training runs.

python -m tools.monitor_picture docs/monitor.png docs/monitor.gif
"""

from __future__ import annotations

import argparse
import io
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

import ddp_notebook

_RANKS = 2
_WIDTH = 900  # CSS pixels
_COLOURS = 128  # colours of the picture; reduces its size to a third
_FRAME_S = 0.5
_FRAMES = 20
_FRAME_WIDTH = 800  # pixels
_MODEL = """
import time
from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(0)
torch.set_num_threads(1)
layers = [layer for _ in range(6) for layer in (torch.nn.Linear(384, 384), torch.nn.ReLU())]
model = DistributedDataParallel(torch.nn.Sequential(*layers, torch.nn.Linear(384, 1)), bucket_cap_mb=0.5)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

def train(batch_size, steps, slow_after_s=float("inf")):
    inputs = torch.randn(batch_size, 384)
    targets = inputs[:, :8].sum(1, keepdim=True)
    begin_s = time.monotonic()
    for step in range(steps):
        optimizer.zero_grad()
        if rank == 1 and time.monotonic() - begin_s > slow_after_s:
            time.sleep(0.1)
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        log(loss=loss)
"""
# Rank 1 has half as much again to compute, so rank 0 waits. The small buckets overlap with the backward.
_UNEQUAL = "train(384 if rank == 1 else 256, 40)"
# After 6 s rank 1 sleeps in each forward, so rank 0 waits.
_BECOMES_SLOW = "train(256, 10_000, slow_after_s=6)"


def record(path: Path) -> None:
    """Train on the ranks, and save the recording as a page."""
    with ddp_notebook.start(_RANKS, backend="gloo") as session:
        session.run(_MODEL, quiet=True)
        session.run(_UNEQUAL, quiet=True, execution_count=2, file="In [2]")  # the label of a cell in a notebook
        session.recording.save_html(path)


def record_frames(folder: Path) -> list[Path]:
    """Train on the ranks, and save the recording as a page for each frame."""
    pages: list[Path] = []
    with ddp_notebook.start(_RANKS, backend="gloo") as session:
        session.run(_MODEL, quiet=True)
        job = session.submit(_BECOMES_SLOW, quiet=True, execution_count=2, file="In [2]")
        next_s = time.monotonic() + _FRAME_S
        while len(pages) < _FRAMES:
            time.sleep(max(0.0, next_s - time.monotonic()))
            next_s += _FRAME_S
            pages.append(folder / f"{len(pages):02d}.html")
            session.recording.save_html(pages[-1])
        session.jobs.cancel(job.number)
    return pages


@contextmanager
def browser_page() -> Iterator[Page]:
    """Open a page in Chromium.

    Raises:
        SystemExit: Chromium is not on the PATH.
    """
    executable = shutil.which("chromium")
    if executable is None:
        raise SystemExit("chromium is not on the PATH")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox", "--disable-gpu"])
        try:
            yield browser.new_page(viewport={"width": _WIDTH + 40, "height": 900}, device_scale_factor=2)
        finally:
            browser.close()


def draw(shown: Page, page: Path) -> Image.Image:
    """Return a picture of the panel "Gradient sync" of a saved page."""
    shown.goto(page.as_uri())
    monitor = shown.locator(".ddpm")
    monitor.get_by_role("tab", name="Gradient sync").click()
    shown.wait_for_function(
        "[...document.querySelectorAll('.ddpm')].some((one) => one.ddpMonitor.state().panels.sync?.bars.length)"
    )
    return Image.open(io.BytesIO(monitor.screenshot()))


def write_picture(shown: Page, folder: Path, picture: Path) -> None:
    """Write a PNG of the monitor after a training run."""
    page = folder / "run.html"
    record(page)
    few = (
        draw(shown, page).convert("RGBA").quantize(_COLOURS, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    )
    few.save(picture, optimize=True)


def write_animation(shown: Page, folder: Path, animation: Path) -> None:
    """Write a GIF of the monitor during a training run, with two frames a second."""
    frames = [draw(shown, page).convert("RGB") for page in record_frames(folder)]
    height = max(frame.height * _FRAME_WIDTH // frame.width for frame in frames)
    same = [Image.new("RGB", (_FRAME_WIDTH, height), "white") for _ in frames]
    for whole, frame in zip(same, frames, strict=True):
        whole.paste(frame.resize((_FRAME_WIDTH, frame.height * _FRAME_WIDTH // frame.width), Image.Resampling.LANCZOS))
    palette = same[-1].quantize(64, method=Image.Quantize.MEDIANCUT)
    few = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in same]
    few[0].save(animation, save_all=True, append_images=few[1:], duration=int(1000 * _FRAME_S), loop=0, optimize=True)


def main() -> None:
    """Make the picture and the animation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("picture", type=Path, help="path of the picture, a PNG")
    parser.add_argument("animation", type=Path, help="path of the animation, a GIF")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, browser_page() as shown:
        write_animation(shown, Path(folder), options.animation.resolve())
        write_picture(shown, Path(folder), options.picture.resolve())


if __name__ == "__main__":
    main()
