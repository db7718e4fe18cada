"""Write the reference pages of magics and options from their declarations.

    python -m tools.docs.reference    writes docs/reference/magics.md and docs/reference/options.md

A test compares both pages with the declarations.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path

from ddp_notebook.launch.options import ELSEWHERE, LOCAL, TABLE, Option, StartOptions
from ddp_notebook.magics import _MAGICS
from ddp_notebook.run.magic_help import sections

_FOLDER = Path(__file__).parents[2] / "docs" / "reference"
_MAGICS_HEAD = """# Magics

`%load_ext ddp_notebook` adds these magics. `%ddp_help` lists them in a notebook, and `%ddp_help NAME` prints the
options of one. [Options](options.md) has all options of all magics. Scripts use [sessions](session.md) instead.
"""
_OPTIONS_HEAD = """# Options

Every option of every magic, as `%ddp_help NAME` prints them.

## %ddp_start in detail

`start()` takes the same options as keywords. Options of ranks on other machines are fields of `Ssh`, `Slurm`, `Mpi`,
`Profile` and `Client`, and options of ranks that outlive the notebook are fields of `Keep`. The defaults file
`~/.config/ddp_notebook.toml` may have the options in the last column, in its section `[start]`.

| option | in scripts | default | values | ways of starting | meaning | defaults file |
|---|---|---|---|---|---|---|
"""
_ALL = (LOCAL, *ELSEWHERE)


def pages() -> Mapping[Path, str]:
    """Return the text of each generated page by its path."""
    return {_FOLDER / "magics.md": magics_page(), _FOLDER / "options.md": options_page()}


def magics_page() -> str:
    """Return the page of all magics: a heading for each section of `%ddp_help`, and for each magic its usage, help and
    examples."""
    parts = [_MAGICS_HEAD]
    for section, names in sections(_MAGICS).items():
        parts.append(f"## {section.capitalize()}\n")
        for name in names:
            magic = _MAGICS[name]
            line = magic.parser()
            usage = f"```text\n{line.usage_line}\n```\n"
            examples = [one for one in line.examples if one != line.usage_line]
            shown = "\n".join(["", "Example:", "", "```text", *examples, "```", ""]) if examples else ""
            parts.append(f"### `{line.prog}`\n\n{inspect.getdoc(magic)}\n\n{usage}{shown}")
    return "\n".join(parts)


def options_page() -> str:
    """Return the page of all options."""
    rows = "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in _cells(one))} |\n" for one in TABLE)
    helps = [f"## {magic.parser().prog}\n\n```text\n{magic.getdoc()}\n```\n" for magic in _MAGICS.values()]
    return _OPTIONS_HEAD + rows + "\n" + "\n".join(helps)


def _cells(option: Option) -> list[str]:
    metavar = option.kind.argparse().get("metavar", "")
    written = " ".join([option.flag, *([metavar] if isinstance(metavar, str) else metavar)])
    written = "N" if option.flag == "N" else written.strip()
    owner = "" if option.owner is StartOptions else f"{option.owner.__name__.lstrip('_')}."
    ways = "all" if option.ways == _ALL else ", ".join(way if way == LOCAL else f"`--{way}`" for way in option.ways)
    return [
        f"`{written}`",
        f"`{owner}{option.field}`",
        f"`{option.default!r}`",
        option.kind.limits or "any",
        ways,
        option.help.replace("%%", "%"),
        f"`{option.in_file}`" if option.in_file else "",
    ]


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
