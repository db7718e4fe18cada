"""Run notebooks, and keep only the output pictures of cells tagged "picture".

A notebook is committed without other outputs, to keep its changes readable. The pictures stay for readers who do not
run it: as PNG with few colours, with their alternative text, and with the texts in the figure (`tools.picture_texts`),
which a test compares with those of a fresh execution. A guess is not necessary to see them (DDP_NOTEBOOK_ANSWERS).
"""

from __future__ import annotations

import argparse
import base64
import io
import os
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from tools.picture_texts import KEYWORD, RECORD

TAG = "picture"
MOST_BYTES = 60_000  # limit for one PNG
_TRIED = ((128, 1.0), (48, 1.0), (128, 0.7), (48, 0.7), (64, 0.5))  # (colours, scale), tried in this order


def store(path: Path, cell_timeout_s: float = 300) -> int:
    """Run a notebook, and save it with only its pictures. Return their number.

    Raises:
        CellExecutionError: A cell has failed; the notebook is not changed.
        ValueError: A picture is larger than `MOST_BYTES`, or a tagged cell has shown no picture.
    """
    notebook = nbformat.read(path, as_version=4)
    kept = []
    run = nbformat.from_dict(notebook)
    run.cells.insert(0, nbformat.v4.new_code_cell(RECORD))
    os.environ["DDP_NOTEBOOK_ANSWERS"] = "shown"
    client = NotebookClient(
        run,
        timeout=cell_timeout_s,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
        store_widget_state=False,
    )
    executed = client.execute(transport_encryption="auto")
    for number, (cell, ran) in enumerate(zip(notebook.cells, executed.cells[1:], strict=True)):
        if cell.cell_type != "code":
            continue
        cell.execution_count = None
        cell.outputs = _pictures(ran) if TAG in cell.metadata.get("tags", []) else []
        if TAG in cell.metadata.get("tags", []) and not cell.outputs:
            raise ValueError(f"cell {number} of {path.name} is tagged {TAG!r} and has shown no picture")
        kept += cell.outputs
    path.write_text(nbformat.writes(notebook).rstrip("\n") + "\n")
    return len(kept)


def _pictures(cell: NotebookNode) -> list[NotebookNode]:
    found = []
    for output in cell.outputs:
        png = output.get("data", {}).get("image/png")
        if png:
            data = {
                "image/png": _small(base64.b64decode(png)),
                "text/plain": output.data.get("text/plain", "a picture"),
            }
            metadata = {"image/png": size} if (size := output.metadata.get("image/png")) else {}
            found.append(nbformat.v4.new_output("display_data", data=data, metadata=metadata))
    return found


def _small(png: bytes) -> str:
    """Reduce colours and resolution of a picture until it fits."""
    opened = Image.open(io.BytesIO(png))
    texts = PngInfo()
    if said := opened.info.get(KEYWORD):
        texts.add_text(KEYWORD, said, zip=True)
    original = opened.convert("RGBA")
    for colours, scale in _TRIED:
        data = io.BytesIO()
        image = original.resize(
            (round(original.width * scale), round(original.height * scale)), Image.Resampling.LANCZOS
        )
        image.quantize(colours, method=Image.Quantize.FASTOCTREE).save(data, "png", optimize=True, pnginfo=texts)
        if len(data.getvalue()) <= MOST_BYTES:
            return base64.b64encode(data.getvalue()).decode()
    raise ValueError(f"a picture has {len(data.getvalue())} bytes, more than {MOST_BYTES}; draw a smaller one")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Run notebooks and keep only the pictures of the cells tagged 'picture'."
    )
    parser.add_argument("notebooks", nargs="+", type=Path)
    for path in parser.parse_args().notebooks:
        print(f"{path}: {store(path.resolve())} pictures, {path.stat().st_size / 1000:.0f} KB")


if __name__ == "__main__":
    main()
