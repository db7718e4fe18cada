"""Write the address of this repository (`[tool.ddp_notebook]` in pyproject.toml) into the notebooks that contain it.

It appears in the badges that open a notebook on Colab or Kaggle, and in the cell that installs the package there. These
cells have the tags "badges" and "install".

    python tools/address.py
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import nbformat
from nbformat import NotebookNode

ROOT = Path(__file__).parents[1]
NOTEBOOKS = (ROOT / "notebooks" / "01_first_process_group.ipynb",)

_BADGES = """\
[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]\
(https://colab.research.google.com/github/{place})
[![Open in Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)]\
(https://kaggle.com/kernels/welcome?src=https://github.com/{place})"""

# The installed version of torch is required, so that pip reports a conflict instead of replacing torch.
_INSTALL = """\
# Does nothing where ddp_notebook is installed.
import importlib.util

if importlib.util.find_spec("ddp_notebook") is None:
    from importlib.metadata import version

    torch = f"torch=={{version('torch')}}"  # stays as it is
    %pip install -q {{torch}} "ddp_notebook @ git+https://github.com/{repository}@{branch}\""""


def texts(notebook: str) -> dict[str, str]:
    """Return the source of each cell that contains the address, by its tag.

    Args:
        notebook: Name of the file.

    Example:
        >>> "/blob/main/notebooks/01.ipynb" in texts("01.ipynb")["badges"]
        True
    """
    with (ROOT / "pyproject.toml").open("rb") as file:
        address = tomllib.load(file)["tool"]["ddp_notebook"]
    place = f"{address['repository']}/blob/{address['branch']}/notebooks/{notebook}"
    return {"badges": _BADGES.format(place=place), "install": _INSTALL.format(**address)}


def wrong(path: Path) -> list[NotebookNode]:
    """Return the cells of a notebook with a wrong address. A notebook without one of the tags is an error."""
    notebook = nbformat.read(path, as_version=4)
    return [cell for cell, text in _tagged(notebook, path.name) if cell.source != text]


def write(path: Path) -> bool:
    """Write the address into a notebook. Return whether the notebook has changed."""
    notebook = nbformat.read(path, as_version=4)
    before = nbformat.writes(notebook)
    for cell, text in _tagged(notebook, path.name):
        cell.source = text
    if nbformat.writes(notebook) == before:
        return False
    path.write_text(nbformat.writes(notebook).rstrip("\n") + "\n")
    return True


def _tagged(notebook: NotebookNode, name: str) -> list[tuple[NotebookNode, str]]:
    found = []
    for tag, text in texts(name).items():
        [cell] = [cell for cell in notebook.cells if tag in cell.metadata.get("tags", [])]
        found.append((cell, text))
    return found


def main() -> int:
    for path in NOTEBOOKS:
        print(f"{path.relative_to(ROOT)}: {'written' if write(path) else 'as it is to be'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
