"""Train a GPT with 1.3 million parameters: `python -m tests.benchmarks.gpt [--minutes 10] [--write]`.

Uses the model and the text of notebook 18, larger and for longer, on four ranks in DDP. Stores the loss on held-out
text per minute, the tokens per second, and generated text. All ranks stop at the same step, by the clock of rank 0.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat

import ddp_notebook
from tests.benchmarks.results import moment, replace_section

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "18_a_gpt.ipynb"
WORLD_SIZE, BAR = 4, 1.9  # nats per character
_TRAINING = """
import json, time
import gpt
from torch.nn.parallel import DistributedDataParallel

torch.manual_seed(0)
_network = gpt.GPT(width=160, layers=4, heads=4)
_model = DistributedDataParallel(_network)
_optimizer = torch.optim.AdamW(_model.parameters(), lr=LR)
_rows, _step, _share, _minute = [], 0, 0.0, 0
_began = time.monotonic()
while _share < 1:
    if _step % 10 == 0:  # one clock for all
        _now = torch.tensor((time.monotonic() - _began) / (60 * MINUTES))
        dist.broadcast(_now, src=0)
        _share = _now.item()
        for _group in _optimizer.param_groups:
            _group["lr"] = LR * max(0.02, min(1, 20 * _share, 1.25 * (1 - _share)))  # up for a 20th, then down
    _x, _wanted = gpt.batch_of(_step, rank, world_size)
    _optimizer.zero_grad()
    _loss = gpt.losses_of(_model, _x, _wanted).mean()
    _loss.backward()
    torch.nn.utils.clip_grad_norm_(_model.parameters(), 1.0)
    _optimizer.step()
    log(loss=_loss, step=_step)
    _step += 1
    if rank == 0 and _share * MINUTES >= _minute:
        _rows.append([_minute, _step, gpt.loss_per_position(_network).mean().item()])
        _minute += 1
if rank == 0:
    _seconds = time.monotonic() - _began
    print(json.dumps({
        "parameters": sum(p.numel() for p in _network.parameters()),
        "steps": _step, "seconds": _seconds, "tokens_per_s": _step * gpt.BATCH * gpt.CONTEXT / _seconds,
        "by_minute": _rows, "loss": gpt.loss_per_position(_network).mean().item(),
        "by_position": gpt.loss_per_position(_network).tolist(), "sample": gpt.write(_network, length=600),
    }))
"""


def measure(minutes: float, lr: float = 2e-3) -> dict[str, Any]:
    """Return the results of rank 0."""
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    [source] = [cell.source for cell in cells if cell.source.startswith("%%writefile {folder}/gpt.py")]
    with tempfile.TemporaryDirectory(prefix="gpt-") as folder:
        Path(folder, "gpt.py").write_text(source.partition("\n")[2])
        sys.path.insert(0, folder)  # on the ranks too
        try:
            with ddp_notebook.start(WORLD_SIZE, backend="gloo") as session:
                code = f"MINUTES, LR = {minutes}, {lr}\n{_TRAINING}"
                found: dict[str, Any] = json.loads(session.run(code, quiet=True)[0].stdout)
        finally:
            sys.path.remove(folder)
    return found


def report(found: dict[str, Any]) -> list[str]:
    """Return the lines to store for the result of `measure`."""
    by_minute = ", ".join(f"{loss:.2f}" for _, _, loss in found["by_minute"])
    places = found["by_position"]
    return [
        f"{found['parameters']:,} parameters, {WORLD_SIZE} ranks in DDP, {found['seconds'] / 60:.1f} minutes: "
        f"{found['steps']:,} steps, {found['tokens_per_s']:,.0f} tokens per second.",
        "",
        f"Loss on held-out text: **{found['loss']:.3f} nats per character** (limit: {BAR})."
        f" At the start and after each minute: {by_minute}.",
        f"Loss at the first position: {places[0]:.2f}; at the last: {places[-1]:.2f}. Generated text:",
        "",
        "```",
        *found["sample"].splitlines(),
        "```",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.gpt", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--write", action="store_true", help="keep it in RESULTS.md")
    given = parser.parse_args()
    began = moment()
    found = measure(given.minutes)
    lines = [f"{began}, and {os.getloadavg()[0]:.0f} at the end.", *report(found)]
    print("", *lines, sep="\n")
    if given.write:
        replace_section("gpt", lines)


if __name__ == "__main__":
    main()
