"""The magics: each parses its line and delegates."""

from __future__ import annotations

from pathlib import Path

from IPython.core.magic import Magics, cell_magic, line_cell_magic, line_magic, magics_class

from ddp_notebook import having
from ddp_notebook.auto import AutoSend
from ddp_notebook.errors import CellFailedHereError, UsageError
from ddp_notebook.launch import options as start_options
from ddp_notebook.records.words import list_ranks
from ddp_notebook.run import forgotten, progress
from ddp_notebook.run.cells import options as cell_options
from ddp_notebook.run.groups.faults import USAGE as FAULT_USAGE
from ddp_notebook.run.interrupted import OF_MAGICS, tells_interrupts
from ddp_notebook.run.jobs.job import Job
from ddp_notebook.run.kernel import cell_number, is_run_by_program
from ddp_notebook.run.lines import LineParser
from ddp_notebook.run.values.exchange import check_name
from ddp_notebook.torchrun import current as torchrun_jobs
from ddp_notebook.torchrun import starting as torchrun


@tells_interrupts(OF_MAGICS)
@magics_class
class DDPMagics(Magics):
    """The session (`%ddp_start` to `%ddp_check`), what it has recorded (`%ddp_record` to `%ddp_trace`), cells for
    ranks (`%%on_all_ranks` to `%ddp_auto`), values (`%ddp_pull`, `%ddp_push`) and files (`%ddp_sync`, `%ddp_fetch`)."""

    # ---- the session

    @line_magic
    def ddp_start(self, line: str) -> None:
        """Start ranks: %ddp_start [N] [--backend auto|nccl|gloo|mpi] [--gpus 3,4|each|none] [--share-gpus]
        [--env K=V ...] [--timeout S] [--grace S|off] [--hang-after S|off] [--guard on|off] [--heal]
        [--live auto|html|off]
        [--hosts NAME[:N],... | --slurm [ARGS] | --mpi ARGS | --profile NAME | --client profile=NAME] [--python PATH]
        [--sync DIR] [--sync-large] [--lease S] [--keep [HOURS]] [--on-preempt save DIR]
        [--check]"""
        asked = start_options.read(line)
        if asked.note:
            print(asked.note)
        if asked.checks:
            having.check(asked.options)
        else:
            having.start(asked.options)

    @line_magic
    def ddp_attach(self, line: str) -> None:
        """Attach to ranks that were started with --keep, or look at a job of torchrun's, whose script runs under
        `-m ddp_notebook.attach`: %ddp_attach [NAME] [--take-over] [--look] [--wait]
        With --wait the cell that runs is followed to its end; with --look this notebook only looks on."""
        parser = LineParser("%ddp_attach [NAME] [--take-over] [--look] [--wait]")
        parser.add_argument("name", metavar="NAME", nargs="?", default="")
        parser.add_argument("--take-over", action="store_true")
        parser.add_argument("--look", action="store_true")
        parser.add_argument("--wait", action="store_true")
        given = parser.parse_line(line)
        having.attach(given.name, take_over=given.take_over, look=given.look, wait=given.wait)

    @line_magic
    def ddp_torchrun(self, line: str) -> None:
        """Run a script by torchrun, and look at it: %ddp_torchrun [--agents N] [--name NAME] --nnodes 1:3 train.py
        Options before the script are torchrun's. The stop button ends the job."""
        print(torchrun.run(torchrun.read(line)).status())

    @line_magic
    def ddp_status(self, line: str) -> None:
        """Show every rank's host, process, device, memory and state: %ddp_status"""
        _refuse_arguments("%ddp_status", line)
        print(having.shown().status())

    @line_magic
    def ddp_restart(self, line: str) -> None:
        """End the ranks and start them afresh with the same options: %ddp_restart"""
        _refuse_arguments("%ddp_restart", line)
        session = having.of_session()
        if session.outlives_stop:
            name = session.kept_as
            raise UsageError(
                f"{name} goes on elsewhere, and what this notebook restarts are its own ranks: %ddp_attach {name} "
                "--take-over takes it over, %ddp_stop lets go of it"
            )
        having.restart(session)

    @line_magic
    def ddp_stop(self, line: str) -> None:
        """End the ranks and everything that they have started: %ddp_stop
        While a job of torchrun's is looked at: look at it no more. It goes on."""
        _refuse_arguments("%ddp_stop", line)
        having.stop()

    @line_magic
    def ddp_interrupt(self, line: str) -> None:
        """End cells that have not ended on some ranks, which keep their variables: %ddp_interrupt [--replace]
        With --replace, ranks that do not end it get new processes, without variables.
        While a job of torchrun's is looked at: cut what its ranks wait in, which raises in the script."""
        parser = LineParser("%ddp_interrupt [--replace]")
        parser.add_argument("--replace", action="store_true")
        replace = parser.parse_line(line).replace
        if (job := torchrun_jobs.current()) is not None:
            if replace:
                parser.error(f"torchrun replaces the ranks of job {job.name}, not --replace")
            print("\n".join(job.interrupt()))
        else:
            print("\n".join(having.of_session().interrupt(replace=replace)))

    @line_magic
    def ddp_heal(self, line: str) -> None:
        """Replace ranks that have died; the others keep everything: %ddp_heal [--from RANK] [NAME ...]"""
        parser = LineParser("%ddp_heal [--from RANK] [NAME ...]")
        parser.add_argument("names", metavar="NAME", nargs="*")
        parser.add_argument("--from", dest="from_rank")
        given = parser.parse_line(line)
        source = given.from_rank
        from_rank = None if source is None else parser.number(int, "--from", source, "number of a rank")
        print("\n".join(having.of_session().heal(from_rank, given.names)))

    @line_magic
    def ddp_resize(self, line: str) -> None:
        """Have more or fewer ranks; those that stay keep everything: %ddp_resize N [--build NAME] [--without 0,2]"""
        parser = LineParser("%ddp_resize N [--build NAME] [--without 0,2]")
        parser.add_argument("world_size", metavar="N")
        parser.add_argument("--build")
        parser.add_argument("--without")
        given = parser.parse_line(line)
        world_size = parser.number(int, "N", given.world_size, "number of ranks")
        print("\n".join(having.of_session().resize(world_size, build=given.build, without=given.without)))

    @line_magic
    def ddp_fault(self, line: str) -> None:
        """Let ranks fail, to see what follows: %ddp_fault kill|hang|slow|raise|off --ranks 0,2-3 [--after S] [--by S]
        --after counts from the beginning of the cell that runs, or of the next one. slow makes steps S (0.1) longer."""
        parser = LineParser(FAULT_USAGE)
        parser.add_argument("kind", metavar="FAULT")
        parser.add_argument("--ranks")
        parser.add_argument("--after")
        parser.add_argument("--by", default="0.1")
        given = parser.parse_line(line)
        after_s = None if given.after is None else parser.number(float, "--after", given.after, "number of seconds")
        by_s = parser.number(float, "--by", given.by, "number of seconds")
        print(having.of_session().fault(given.kind, given.ranks, after_s=after_s, by_s=by_s))

    @line_magic
    def ddp_check(self, line: str) -> None:
        """Say whether parameters, optimizers, data and versions agree across ranks: %ddp_check [NAME ...]"""
        parser = LineParser("%ddp_check [NAME ...]")
        parser.add_argument("names", metavar="NAME", nargs="*")
        print(having.of_session().check(*parser.parse_line(line).names))

    @line_magic
    def ddp_memory(self, line: str) -> None:
        """Say what parameters, gradients, optimizer state, activations and the rest take on each rank, now or while
        code runs, and what was measured before: %ddp_memory [CODE]"""
        print(having.of_session().memory(line.strip()))

    # ---- the recording

    @line_magic
    def ddp_record(self, line: str) -> None:
        """Set how much ranks record from now on, or say how much they do: %ddp_record [off|meta|values|all]"""
        level = line.strip() or having.of_session().recorded
        having.of_session().record(level)
        print(
            {
                "off": "ranks record nothing; what waits where is known all the same",
                "meta": "ranks record what they call and when, but no values of tensors",
                "values": "ranks record what they call, when, and what is in the tensors; of a fast training in "
                "some steps",
                "all": "ranks record what they call, when, and what is in all tensors",
            }[level]
        )

    @line_magic
    def ddp_report(self, line: str) -> None:
        """Say what the time of the last training went into, and what to try: %ddp_report [--baseline]"""
        parser = LineParser("%ddp_report [--baseline]")
        parser.add_argument("--baseline", action="store_true")
        if parser.parse_line(line).baseline:
            having.of_session().baseline()
        print(having.recorded().report())

    @line_magic
    def ddp_monitor(self, line: str) -> None:
        """Show live what the ranks do, or what they did in one cell: %ddp_monitor [CELL]"""
        parser = LineParser("%ddp_monitor [CELL]")
        parser.add_argument("cell", metavar="CELL", nargs="?")
        cell = parser.parse_line(line).cell
        having.recorded().monitor(None if cell is None else parser.number(int, "CELL", cell, "number of a cell"))

    @line_magic
    def ddp_trace(self, line: str) -> None:
        """Write a trace that https://ui.perfetto.dev opens: %ddp_trace run.json"""
        parser = LineParser("%ddp_trace FILE")
        parser.add_argument("file", metavar="FILE")
        path = parser.parse_line(line).file
        profiles, lost = having.recorded().write_trace(path)
        also = f", with torch's profile of {len(profiles)} rank{'s' * (len(profiles) > 1)}" if profiles else ""
        also += f", without that of {list_ranks(lost)}, which is lost" if lost else ""
        print(f"{path}: {Path(path).stat().st_size / 1e6:.1f} MB{also}. Open it at https://ui.perfetto.dev")

    # ---- cells

    @line_cell_magic
    def on_all_ranks(self, line: str, cell: str | None = None) -> None:
        """Run the cell on every rank: %%on_all_ranks [--ranks 0,2-3] [--timeout S] [--quiet] [--here | --background]
        or one line: %on_all_ranks x.sum()"""
        if cell is not None:
            self._run(cell_options.parse(line), cell)
        elif line.strip():
            self._run(cell_options.CellOptions(), line)
        else:
            raise UsageError(
                "%on_all_ranks needs something to run: %on_all_ranks x.sum(), or %%on_all_ranks above a whole cell"
            )

    @cell_magic
    def on_ranks(self, line: str, cell: str) -> None:
        """Run the cell on some ranks: %%on_ranks 0,2-3 [--timeout S] [--quiet] [--here | --background]"""
        self._run(cell_options.parse(line, cell_options.ON_RANKS), cell)

    @line_magic
    def ddp_jobs(self, line: str) -> None:
        """Show the cells that run in the background, wait for that, or have ended: %ddp_jobs"""
        _refuse_arguments("%ddp_jobs", line)
        print(having.of_session().jobs)

    @line_magic
    def ddp_wait(self, line: str) -> None:
        """Wait for cells in the background; one that has failed fails here too: %ddp_wait [N ...]"""
        jobs = having.of_session().jobs
        if not jobs.wait(*_job_numbers("%ddp_wait [N ...]", line), report=print):
            print("no job is left to wait for")

    @line_magic
    def ddp_cancel(self, line: str) -> None:
        """End cells in the background, with every variable kept: %ddp_cancel N ...|all"""
        usage = "%ddp_cancel N ...|all"
        jobs = having.of_session().jobs
        if not line.strip():
            raise UsageError(f"cancel which job? %ddp_jobs lists them\nusage: {usage}")
        numbers = [] if line.strip() == "all" else _job_numbers(usage, line)
        print("\n".join(jobs.cancel(*numbers)) or "no job is left to cancel")

    @cell_magic
    def local(self, line: str, cell: str) -> None:
        """Run the cell in the notebook, also when %ddp_auto is on: %%local"""
        _refuse_arguments("%%local", line)
        self._run_here(cell)

    @line_magic
    def ddp_auto(self, line: str) -> None:
        """Send every plain cell to all ranks, or no longer: %ddp_auto on|off"""
        word = line.strip()
        if word not in ("on", "off"):
            raise UsageError(f"%ddp_auto takes on or off, not {word!r}")
        if word == "on":
            having.of_session()
        assert self.shell is not None
        AutoSend.of(self.shell).is_on = word == "on"
        print(
            "every plain cell runs on all ranks now; %%local keeps one in the notebook"
            if word == "on"
            else "plain cells run in the notebook again"
        )

    # ---- values

    @line_magic
    def ddp_pull(self, line: str) -> None:
        """Set variables to the values that they have on ranks:
        %ddp_pull NAME ... [--ranks 0,2-3] [--as NEW] [--force] [--safe]

        The notebook unpickles what ranks send. --safe receives only numbers, text, tensors, arrays and containers of
        them, without pickle."""
        parser = LineParser("%ddp_pull NAME ... [--ranks 0,2-3] [--as NEW] [--force] [--safe]")
        parser.add_argument("names", metavar="NAME", nargs="+")
        parser.add_argument("--ranks")
        parser.add_argument("--as", dest="new")
        parser.add_argument("--force", action="store_true")
        parser.add_argument("--safe", action="store_true")
        given = parser.parse_line(line)
        if given.new is not None and len(given.names) > 1:
            parser.error(f"--as {given.new} is one name, for {len(given.names)} variables: pull them one by one")
        assert self.shell is not None
        for name in [*given.names, *filter(None, [given.new])]:
            check_name(name)
        session = having.of_session()
        # All or none: a name that the ranks do not have changes no variable of the notebook.
        pulled = {name: session.pull(name, given.ranks, given.force, given.safe) for name in given.names}
        for name, values in pulled.items():
            self.shell.user_ns[given.new or name] = values
            print(f"{name}:\n{values}" if len(given.names) > 1 else values)

    @line_magic
    def ddp_push(self, line: str) -> None:
        """Set variables on ranks to what they are in the notebook: %ddp_push NAME ... [--ranks 0,2-3] [--force]"""
        parser = LineParser("%ddp_push NAME ... [--ranks 0,2-3] [--force]")
        parser.add_argument("names", metavar="NAME", nargs="+")
        parser.add_argument("--ranks")
        parser.add_argument("--force", action="store_true")
        given = parser.parse_line(line)
        assert self.shell is not None
        here = self.shell.user_ns
        if unknown := [repr(name) for name in given.names if name not in here]:
            raise UsageError(f"the notebook has no variable {', '.join(unknown)}; set it here first, then push it")
        having.of_session().push({name: here[name] for name in given.names}, ranks=given.ranks, force=given.force)

    # ---- files

    @line_magic
    def ddp_sync(self, line: str) -> None:
        """Send what has changed in a folder to hosts that do not share it: %ddp_sync [DIR] [--overwrite]
        [--also NAME ...] [--large]"""
        parser = LineParser("%ddp_sync [DIR] [--overwrite] [--also NAME ...] [--large]")
        parser.add_argument("folder", metavar="DIR", nargs="?")
        parser.add_argument("--overwrite", action="store_true")
        parser.add_argument("--also", nargs="+", action="extend", default=[])
        parser.add_argument("--large", action="store_true")
        given = parser.parse_line(line)
        session = having.of_session()
        with progress.shown("sync:") as report:
            synced = session.sync(
                given.folder, overwrite=given.overwrite, also=given.also, large=given.large, report=report
            )
        print(synced)

    @line_magic
    def ddp_fetch(self, line: str) -> None:
        """Bring files of ranks here: %ddp_fetch PATH [--ranks 0,2-3] [--to DIR] [--overwrite]"""
        parser = LineParser("%ddp_fetch PATH [--ranks 0,2-3] [--to DIR] [--overwrite]")
        parser.add_argument("path", metavar="PATH")
        parser.add_argument("--ranks")
        parser.add_argument("--to", default=".")
        parser.add_argument("--overwrite", action="store_true")
        given = parser.parse_line(line)
        session = having.of_session()
        with progress.shown("fetching:") as report:
            fetched = session.fetch(given.path, given.ranks, given.to, given.overwrite, report)
        print(fetched)

    def _run(self, options: cell_options.CellOptions, code: str) -> None:
        session = having.of_session()
        done = session.run(
            code,
            options.ranks,
            options.timeout_s,
            wait=not options.background,
            quiet=options.quiet,
            file=self._cell_file(code),
            record=options.record,
        )
        if isinstance(done, Job) and is_run_by_program():  # which shows nothing of a cell that has ended
            session.jobs.wait(done.number)
        if options.here:
            self._run_here(code)

    def _run_here(self, code: str) -> None:
        assert self.shell is not None
        with AutoSend.of(self.shell).paused():
            if not self.shell.run_cell(code).success:
                raise CellFailedHereError("the cell failed here, in the notebook: see above")

    def _cell_file(self, code: str) -> str:
        """The name that the notebook itself gives to the code of a cell."""
        assert self.shell is not None
        return str(self.shell.compile.get_code_name(code, code, cell_number()))


def _job_numbers(usage: str, line: str) -> list[int]:
    parser = LineParser(usage)
    parser.add_argument("numbers", metavar="N", nargs="*")
    return [parser.number(int, "N", text, "number of a job") for text in parser.parse_line(line).numbers]


def _refuse_arguments(magic: str, line: str) -> None:
    if line.strip():
        other = ", or %ddp_stop and %ddp_start with other options" if magic == "%ddp_restart" else ""
        raise UsageError(f"{magic} takes no {line.strip()!r}; write {magic} alone{other}")


def load(shell: object) -> None:
    """Register the magics with an IPython shell, which says from now on where a cell was meant for the ranks."""
    shell.register_magics(DDPMagics)  # type: ignore[attr-defined]
    forgotten.watch(shell, having.has_session)
