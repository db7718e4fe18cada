"""`Session` as it is used to record: the public methods for what ranks have recorded and written."""

from __future__ import annotations

import os
from dataclasses import replace

from ddp_notebook.observe.report.report import Report
from ddp_notebook.run.agree.words import list_names
from ddp_notebook.run.assembly import Assembled
from ddp_notebook.run.record import trace
from ddp_notebook.run.record.told import Recording


class RecordFace(Assembled):
    """The part of `Session` that tells what ranks have recorded."""

    @property
    def recording(self) -> Recording:
        """What the ranks have recorded: metrics, collectives, steps. All of it up to now, or to the end of the session.

        Example:
            >>> result = session.run("dist.barrier()\\ndist.all_reduce(torch.ones(1))", quiet=True)
            >>> session.recording.collectives(op="all_reduce")[-1].site
            'cell line 2'
        """
        return self._parts.recordings.now

    @property
    def recorded(self) -> str:
        """How much the ranks record: "off", "meta", "values" or "all"."""
        return self._parts.recordings.level

    def record(self, level: str) -> None:
        """Set how much the ranks record in the cells to come: "off", "meta" (no values of tensors), "values" (of a fast
        training those of some steps: 20 collectives a second, at least one step) or "all".

        Raises:
            UsageError: there is no such level.

        Example:
            >>> session.record("meta")
        """
        self._parts.recordings.set_level(level)

    def report(self, cell: int | None = None) -> Report:
        """What the time of a training cell's steps went into, in words.

        Args:
            cell: its number; None: the last one that trained.

        Example:
            >>> print(session.report())
            cell ...: ... steps on 2 ranks, ... ms/step (mean of steps 2 to ...
        """
        report = self.recording.report(cell)
        if not report.synchronises or report.times:
            return report
        if loaders := self._parts.checking.whole_loaders():
            count = len(report.ranks)
            note = (
                f"Each rank reads all of {list_names(loaders)}: with a DistributedSampler it reads its share, and an "
                f"epoch has 1/{count} of the steps"
            )
            report = replace(report, notes=(*report.notes, note))
        return report

    def log(self, rank: int) -> str:
        """What a rank has written, as it came: the last 64 MB.

        Raises:
            UsageError: there is no such rank.

        Example:
            >>> result = session.run("print('epoch 3 done')")
            [0-1] epoch 3 done
            >>> session.log(0).splitlines()[-1]
            'epoch 3 done'
        """
        self._parts.living.check_host()
        [one] = self._parts.living.parse([rank])
        return self._parts.arrivals.log(one)

    def trace(self, path: str | os.PathLike[str], cell: int | None = None) -> int:
        """Write the recording as one Chrome trace, which https://ui.perfetto.dev opens, with what torch's profiler has
        seen in cells that ran with `--profile`.

        Args:
            path: of the file; compressed if it ends in `.gz`.
            cell: only this one; None: all.

        Returns:
            The number of profiles that it holds.

        Raises:
            UsageError: nothing was recorded, or the file cannot be written.
        """
        return len(self.write_trace(path, cell)[0])

    def write_trace(self, path: str | os.PathLike[str], cell: int | None = None) -> tuple[list[int], list[int]]:
        """The same. Returns the ranks whose profiles it holds, and those whose profiles are lost."""
        return trace.write(self.recording, path, cell, self._parts.profiles())
