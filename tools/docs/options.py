"""The page of the site with every option: made from the declarations that the parsers and the help texts use."""

from __future__ import annotations

from ddp_notebook.launch.options import ELSEWHERE, LOCAL, TABLE, Option, StartOptions
from ddp_notebook.magics import _MAGICS

_HEAD = """# Options

Every option of every magic, as `%ddp_help NAME` prints them.

## %ddp_start in detail

`start()` takes the same options as keywords. Options of ranks on other machines are fields of `Ssh`, `Slurm`, `Mpi`,
`Profile` and `Client`, and options of ranks that outlive the notebook are fields of `Keep`. The defaults file
`~/.config/ddp_notebook.toml` may have the options in the last column, in its section `[start]`.

| option | in scripts | default | values | ways of starting | meaning | defaults file |
|---|---|---|---|---|---|---|
"""
_ALL = (LOCAL, *ELSEWHERE)


def page() -> str:
    """Return the page as Markdown."""
    rows = "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in _cells(one))} |\n" for one in TABLE)
    helps = [f"## {magic.parser().prog}\n\n```text\n{magic.getdoc()}\n```\n" for magic in _MAGICS.values()]
    return _HEAD + rows + "\n" + "\n".join(helps)


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
