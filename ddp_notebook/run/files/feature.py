"""Declaration of `%ddp_sync` and `%ddp_fetch`."""

from __future__ import annotations

import functools

from ddp_notebook.line_parser import LineParser
from ddp_notebook.run.features import Commands, FeatureMagic, NotebookFeature
from ddp_notebook.run.interrupted import OF_FILES
from ddp_notebook.run.magic_lines import RANKS


@functools.cache
def sync_line() -> LineParser:
    parser = LineParser("%ddp_sync", "%ddp_sync", "%ddp_sync src --also .env")
    parser.add_argument("folder", metavar="DIR", nargs="?", help="by default the one of --sync, else the notebook's")
    parser.add_argument("--overwrite", action="store_true", help="also replace files that are newer on a host")
    parser.add_argument(
        "--also",
        metavar="NAME",
        nargs="+",
        action="extend",
        default=[],
        help="send these too, which look like keys",
    )
    parser.add_argument("--large", action="store_true", help="also more than 1 GB or 20,000 files")
    return parser


@functools.cache
def fetch_line() -> LineParser:
    parser = LineParser("%ddp_fetch", "%ddp_fetch checkpoints --ranks 0", "%ddp_fetch runs/*.pt --to results")
    parser.add_argument("path", metavar="PATH", help="a file, a folder or a pattern, in the rank's directory")
    parser.add_argument("--ranks", metavar="0,2-3", help=RANKS)
    parser.add_argument("--to", metavar="DIR", default=".", help="folder of the notebook's host; by default this one")
    parser.add_argument("--overwrite", action="store_true", help="replace files that exist")
    return parser


def ddp_sync(commands: Commands, line: str) -> None:
    """Send changed files to hosts that do not share the folder."""
    from ddp_notebook.run import progress

    parser = sync_line()
    given = parser.parse_line(line)
    files = commands().of_session().files
    with progress.shown("sync:") as report:
        synced = files.sync(given.folder, overwrite=given.overwrite, also=given.also, large=given.large, report=report)
    print(synced)


def ddp_fetch(commands: Commands, line: str) -> None:
    """Copy files from the ranks to the notebook's host."""
    from ddp_notebook.run import progress

    parser = fetch_line()
    given = parser.parse_line(line)
    files = commands().of_session().files
    with progress.shown("fetching:") as report:
        fetched = files.fetch(given.path, given.ranks, given.to, given.overwrite, report)
    print(fetched)


FEATURE = NotebookFeature(
    magics={
        "ddp_sync": FeatureMagic(sync_line, ddp_sync, OF_FILES["sync"], "files"),
        "ddp_fetch": FeatureMagic(fetch_line, ddp_fetch, OF_FILES["fetch"], "files"),
    }
)
