"""Make docs/monitor.png: train on two ranks, and take a picture of the monitor in the page that `save_html` writes.

python -m tools.monitor_picture docs/monitor.png
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

import ddp_notebook

RANKS = 2
WIDTH = 900  # CSS pixels
COLOURS = 128  # colours in the picture: it then takes a third of the bytes
# Rank 1 has half as much again to compute, so rank 0 waits; the small buckets show what is hidden behind the backward.
TRAINS = """
from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(0)
torch.set_num_threads(1)
layers = [layer for _ in range(6) for layer in (torch.nn.Linear(384, 384), torch.nn.ReLU())]
model = DistributedDataParallel(torch.nn.Sequential(*layers, torch.nn.Linear(384, 1)), bucket_cap_mb=0.5)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batch = 384 if rank == 1 else 256
inputs = torch.randn(batch, 384)
targets = inputs[:, :8].sum(1, keepdim=True)
for step in range(40):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    log(loss=loss)
"""


def record(path: Path) -> None:
    """Train on the ranks, and save what they have recorded as a page."""
    session = ddp_notebook.start(RANKS, backend="gloo")
    try:
        session.run(TRAINS, quiet=True, execution_count=2, file="In [2]")  # the label that the cell has in a notebook
        session.recording.save_html(path)
    finally:
        session.stop()


def draw(page: Path, picture: Path) -> None:
    """Write a picture of the gradient panel."""
    executable = shutil.which("chromium")
    if executable is None:
        raise SystemExit("chromium is not on the PATH")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox", "--disable-gpu"])
        try:
            shown = browser.new_page(viewport={"width": WIDTH + 40, "height": 900}, device_scale_factor=2)
            shown.goto(page.as_uri())
            monitor = shown.locator(".ddpm")
            monitor.get_by_role("tab", name="Gradient sync").click()
            shown.wait_for_function(
                "[...document.querySelectorAll('.ddpm')].some((one) => one.ddpMonitor.state().panels.sync?.bars.length)"
            )
            monitor.screenshot(path=picture)
        finally:
            browser.close()
    with Image.open(picture) as image:
        few = image.convert("RGBA").quantize(COLOURS, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    few.save(picture, optimize=True)


def main() -> None:
    """Make the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("picture", type=Path, help="where it goes, a PNG")
    picture = parser.parse_args().picture.resolve()
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "run.html"
        record(page)
        draw(page, picture)


if __name__ == "__main__":
    main()
