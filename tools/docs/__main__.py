"""Build the documentation site.

    python -m tools.docs                 into site/, which a browser can open as files
    python -m tools.docs --keep-old      with the last executed notebooks

`make docs` installs the requirements before.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path

from tools.docs import fresh, notebooks, replays, sources

_BUILD = fresh.ROOT / "build" / "docs"
_OF_SPHINX = "objects.inv"  # every Sphinx site has this file


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the documentation site.")
    parser.add_argument("--output", type=Path, default=fresh.ROOT / "site", help="default: site/")
    parser.add_argument("--keep-old", action="store_true", help="execute nothing that was executed once")
    options = parser.parse_args()

    if options.output.exists() and not (options.output / _OF_SPHINX).is_file() and any(options.output.iterdir()):
        parser.error(f"{options.output} is there and is no site; name a folder that may be replaced")

    began_s = time.monotonic()
    made, source, site = _BUILD / "made", _BUILD / "source", _BUILD / "site"
    failed = notebooks.execute_all(made, keep_old=options.keep_old)
    replays.record_all(made, keep_old=options.keep_old)
    replays.write_pages(made)
    sources.lay_out(made, source)
    from sphinx.cmd.build import build_main

    # Warnings are errors, such as a broken link or an invalid docstring.
    status = build_main(
        ["-q", "-W", "--keep-going", "-b", "html", "-d", str(_BUILD / "doctrees"), str(source), str(site)]
    )
    if status != 0:
        return status
    copied = options.output.with_name(options.output.name + ".new")  # an incomplete copy must not look like a site
    shutil.rmtree(copied, ignore_errors=True)
    shutil.copytree(site, copied, ignore=shutil.ignore_patterns(".buildinfo*", "_sources"))
    shutil.rmtree(options.output, ignore_errors=True)
    copied.rename(options.output)
    print(f"{(options.output / 'index.html').resolve().as_uri()}  ({time.monotonic() - began_s:.0f} s)")
    print("\n".join(failed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
