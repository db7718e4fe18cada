"""Write the reference pages of magics, options and errors of torch from their declarations.

    python -m tools.docs.reference    writes magics.md, options.md and torch_errors.md in docs/reference

A test compares the pages with the declarations.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path

from ddp_notebook.launch.options import ELSEWHERE, LOCAL, TABLE, Option, StartOptions
from ddp_notebook.magics import _MAGICS
from ddp_notebook.rank.torch_errors import catalogue
from ddp_notebook.rank.torch_errors.known_error import KnownError
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
_TORCH_ERRORS_HEAD = """# Errors of torch

If a rank raises one of these errors of PyTorch, ddp_notebook adds the cause and the fix below torch's own text. The
sentence uses facts of that rank: names of parameters and modules, ranks of the group, and arguments of the call. If the
facts do not fit, or the error is not in this list, it is shown as torch raised it. Values are in braces, and `...` is
text that differs.

Rows under NCCL need GPUs; their tests have not been run. [Error messages](messages.md) lists the errors of
ddp_notebook itself.
"""


def pages() -> Mapping[Path, str]:
    """Return the text of each generated page by its path."""
    return {
        _FOLDER / "magics.md": magics_page(),
        _FOLDER / "options.md": options_page(),
        _FOLDER / "torch_errors.md": torch_errors_page(),
    }


def torch_errors_page() -> str:
    """Return the page of errors of torch: a table for each area."""
    parts = [_TORCH_ERRORS_HEAD]
    for area, entries in catalogue.AREAS.items():
        rows = "\n".join(map(_torch_error_row, entries))
        parts.append(f"## {area}\n\n| error of torch | cause | fix |\n|---|---|---|\n{rows}\n")
    return "\n".join(parts)


def _torch_error_row(entry: KnownError) -> str:
    message = " ".join(entry.text.replace(":d}", "}").replace("{}", "...").replace("`", "'").split())
    cause, fix = (one.replace("!r}", "}").replace("{{", "{").replace("}}", "}") for one in (entry.cause, entry.fix))
    return f"| `{entry.kind.split()[0]}: {message}` | {_plain(cause)} | {_plain(fix)} |".replace("||", "\\|\\|")


def _plain(text: str) -> str:
    """Return text without Markdown: `*`, `_` and `<` stand for themselves."""
    return text.replace("*", "\\*").replace("<", "\\<").replace("_", "\\_").replace("[", "\\[").replace("|", "\\|")


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
