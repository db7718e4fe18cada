"""Messages of ranks that the keeper stores while no notebook is attached, and their limits."""

from __future__ import annotations

import resource
import signal
from dataclasses import replace
from typing import Any

import numpy as np

from ddp_notebook.launch.keep.keeper.journal import Journal
from ddp_notebook.launch.keep.recording_store import KeptRecording, batches
from ddp_notebook.messages.framing import ProcessText
from ddp_notebook.messages.keeper import RankEnded, RankMessage
from ddp_notebook.messages.ranks import CellDone, Display, RunCell
from ddp_notebook.messages.survive_messages import Stalls, Survives
from ddp_notebook.observe.recording import Recording
from ddp_notebook.records.codec import Batch, decode, encode
from ddp_notebook.records.renumbering import Renumbered
from ddp_notebook.records.schema import TABLES
from ddp_notebook.records.units import size
from ddp_notebook.wire.marks import CellEnd, DisplayMark
from ddp_notebook.wire.text import Ordered, TextSplitter

TOKEN = "ab12"


def told(journal: Journal, cell: int, ranks: list[int]) -> None:
    journal.on_told(RunCell(cell=cell, code="", execution_count=cell), ranks)


def display(cell: int, place: int, chars: int = 1) -> Display:
    return Display(cell=cell, msg_type="display_data", content={"data": {"text/plain": "x" * chars}}, place=place)


def texts(journal: Journal) -> list[bytes]:
    """Return the text for a notebook, the only text the journal may copy."""
    events = list(journal.events())
    assert all(isinstance(event, ProcessText) for event in events)
    return [event.data for event in events if isinstance(event, ProcessText)]


def messages(journal: Journal) -> list[Any]:
    """Return the rank messages for a notebook, and how ranks have ended."""
    return [
        event.message if isinstance(event, RankMessage) else event.how
        for event in journal.events()
        if isinstance(event, RankMessage | RankEnded)
    ]


def pieces(journal: Journal) -> list[Any]:
    """Return the content for a notebook: text, displays and ends of one rank, in order."""
    found: list[Any] = []
    splitter, ordered = TextSplitter(TOKEN), Ordered()
    for event in journal.events():
        if isinstance(event, ProcessText):
            for piece in splitter.feed(event.data):
                found += [one for _, one in ordered.add(event.fd, piece)]
        elif isinstance(event, RankMessage) and isinstance(event.message, Display):
            found += [one for _, one in ordered.arrived(event.message)]
        elif isinstance(event, RankMessage):
            found.append(event.message)
    return found


def test_a_split_mark_is_complete_for_a_notebook_that_attaches():
    journal = Journal(TOKEN, 1000)
    told(journal, 1, [0])
    whole = b"a\n" + CellEnd(1, 0.5).encode(TOKEN)
    journal.on_text(0, 1, whole[:6])
    assert b"".join(texts(journal)) == whole[:6]
    assert [cell.told.cell for cell in journal.running] == [1]
    journal.on_text(0, 1, whole[6:])
    assert b"".join(texts(journal)) == whole
    assert journal.running == []


def test_a_cell_resent_to_a_new_rank_still_belongs_to_all_ranks():
    journal = Journal(TOKEN, 1000)
    told(journal, 1, [0, 1])
    told(journal, 1, [1])
    for rank in (1, 0):
        assert [cell.ranks for cell in journal.running] == [[0, 1]]
        journal.on_message(rank, CellDone(cell=1, status="ok", duration_s=1.0))
        journal.on_text(rank, 1, CellEnd(1, 1.0).encode(TOKEN))
    assert journal.running == []


def test_of_a_flood_the_end_is_kept_and_the_rest_counted():
    journal = Journal(TOKEN, 20_000)
    told(journal, 1, [0])
    for number in range(5000):
        journal.on_text(0, 1, b"line %04d\n" % number)
    journal.on_message(0, CellDone(cell=1, status="error", duration_s=1.0, ename="E"))
    journal.on_text(0, 1, CellEnd(1).encode(TOKEN))
    first, *texts, done, end = pieces(journal)
    lines = "".join(texts).splitlines()
    assert first == f"... {size(50_000 - 10 * len(lines))} before this were not kept ...\n"
    assert lines == [f"line {number:04d}" for number in range(5000)][-len(lines) :]
    assert 14_000 < 10 * len(lines) < 20_000, "of which most is text, although it came in small pieces"
    assert done.ename == "E" and end == CellEnd(1)
    assert journal.running == []


def test_text_does_not_wait_for_a_display_that_was_left_out():
    journal = Journal(TOKEN, 4000)
    told(journal, 1, [0])
    for place in range(1, 6):
        journal.on_message(0, display(1, place, chars=400))
        journal.on_text(0, 1, DisplayMark(place).encode(TOKEN) + b"%d\n" % place)
    kept = pieces(journal)
    assert [one.place for one in kept if isinstance(one, Display)] == [4, 5]
    assert kept[-2:] == [display(1, 5, chars=400), "5\n"]


def test_a_displayed_cell_is_dropped_but_later_text_is_kept():
    journal = Journal(TOKEN, 1000)
    told(journal, 1, [0, 1])
    for rank in (0, 1):
        journal.on_text(rank, 1, b"one\n" + CellEnd(1, 0.1).encode(TOKEN) + b"behind\n")
    journal.on_shown(1)
    assert texts(journal) == [b"behind\n", b"behind\n"]
    told(journal, 2, [0])
    journal.on_text(0, 1, b"two\n")
    journal.on_shown(2)
    assert len(journal.running) == 1, "it has not ended"
    journal.on_text(0, 1, CellEnd(2, 0.1).encode(TOKEN))
    journal.on_shown(2)
    assert list(journal.events()) == [] and journal.cells == {}, "rank 1's text was shown above the second cell"


def test_small_displays_count_with_what_keeping_them_takes():
    journal = Journal(TOKEN, 100_000)
    told(journal, 1, [0])
    for place in range(1, 1000):
        journal.on_message(0, display(1, place))
    assert 80 < len(messages(journal)) <= 100


def test_a_cell_for_a_dead_rank_does_not_run_forever():
    journal = Journal(TOKEN, 1000)
    journal.on_told(RunCell(cell=1, code="", execution_count=1), [0, 1], [1])
    journal.on_text(0, 1, CellEnd(1, 0.1).encode(TOKEN))
    assert journal.running == [] and not journal.went_well
    journal.on_told(RunCell(cell=2, code="", execution_count=2), [1], [1])
    assert journal.running == []


def test_what_is_kept_has_the_numbers_that_ranks_have_now():
    journal = Journal(TOKEN, 10_000)
    for rank in (0, 1):
        journal.on_text(rank, 1, b"of %d\n" % rank)
        journal.on_message(rank, display(9, 1))
    journal.on_renumbered({0: 1})
    assert list(journal.events()) == [ProcessText(0, 1, b"of 1\n"), RankMessage(rank=0, message=display(9, 1))]


def test_a_cell_that_goes_on_with_fewer_ranks_is_theirs():
    journal = Journal(TOKEN, 1000)
    told(journal, 1, [0, 1, 2])
    journal.on_ended(1, RankEnded(rank=1, how="killed"))
    journal.on_renumbered({0: 0, 1: 2})
    assert [cell.ranks for cell in journal.running] == [[0, 1]]
    for rank in (0, 1):
        journal.on_text(rank, 1, CellEnd(1, 0.1).encode(TOKEN))
    assert journal.running == []
    journal.on_shown(1)
    assert list(journal.events()) == [] and journal.cells == {}


def test_attach_returns_the_current_state_of_surviving_loops():
    journal = Journal(TOKEN, 1000)
    told(journal, 1, [0, 1])
    for rank in (0, 1):
        journal.on_message(rank, Survives(cell=1, line=3))
    journal.on_message(0, Stalls(cell=1, step=4, holds=True))
    journal.on_ended(1, RankEnded(rank=1, how="killed"))
    found = messages(journal)
    assert found == [Survives(cell=1, line=3), Stalls(cell=1, step=4, holds=True), "killed", Survives(cell=1, line=3)]
    told(journal, 1, [1])  # the new process of rank 1 has the cell
    journal.on_resumed(0)
    assert messages(journal) == [Survives(cell=1, line=3)]
    journal.on_message(0, Survives(cell=1, line=0))
    assert list(journal.events()) == []


def test_a_loop_is_kept_when_the_previous_cell_was_displayed():
    journal = Journal(TOKEN, 1000)
    for cell in (1, 2):
        told(journal, cell, [0])
        journal.on_message(0, Survives(cell=cell, line=3))
        if cell == 1:
            journal.on_text(0, 1, CellEnd(1, 0.1).encode(TOKEN))
    journal.on_shown(1)
    assert journal.is_in_loop and messages(journal) == [Survives(cell=2, line=3)]


def losses(first: int, count: int) -> Batch:
    rows = np.zeros(count, TABLES["metric"])
    rows["name"], rows["step"], rows["value"] = 1, range(first, first + count), 1.0
    return Batch(rank=0, stream=1, texts={1: "loss"} if first == 0 else {}, tables={"metric": rows})


def fed(recorded: KeptRecording) -> Recording:
    recorded.close()
    recording = Recording(world_size=1)
    for one in [*recorded.left(), *batches(recorded.parts())]:
        assert not isinstance(one, Renumbered)
        recording._feed(decode(one[1]))
    return recording


def test_a_long_recording_keeps_its_end_and_counts_dropped_rows(tmp_path):
    recorded = KeptRecording(str(tmp_path), limit_bytes=100_000)
    for number in range(500):
        recorded.put(0, encode(losses(10 * number, 10)))
    assert 50_000 < sum(path.stat().st_size for path in tmp_path.iterdir()) <= 100_000
    recording = fed(recorded)
    kept = recording.metrics["loss"].values
    assert recording.dropped[0] + len(kept) == 5000 and len(kept) > 1000


def test_a_disk_that_takes_nothing_loses_rows_and_no_names(tmp_path):
    recorded = KeptRecording(str(tmp_path / "gone"), limit_bytes=100_000)
    (tmp_path / "gone").touch()  # a missing folder would be created again
    recorded.put(0, encode(losses(0, 10)))
    assert f"{tmp_path / 'gone'} must be a folder that only you can use, but it is a file" in recorded.trouble
    (tmp_path / "gone").unlink()
    recorded.put(0, encode(losses(10, 10)))
    recording = fed(recorded)
    recorded.close()
    assert recording.dropped == {0: 10} and len(recording.metrics["loss"].values) == 10


def test_a_disk_that_becomes_full_keeps_what_it_has(tmp_path):
    recorded = KeptRecording(str(tmp_path), limit_bytes=10_000_000)
    data = encode(losses(0, 100))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    default = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as Python does at its start
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(data) + 100, before[1]))  # the second write is cut short
        for _ in range(2):
            recorded.put(0, data)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
        for _ in range(50):
            recorded.put(0, data)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, default)
    recorded.put(0, data)
    recorded.close()
    assert list(batches(recorded.parts())) == [(0, data)] * 2
    [(_, left)] = recorded.left()
    assert decode(left).dropped == 51 * 100


def test_a_recording_has_the_numbers_of_its_time(tmp_path):
    whole, cut = (
        KeptRecording(str(tmp_path), limit_bytes=10_000_000),
        KeptRecording(str(tmp_path / "cut"), limit_bytes=100_000),
    )
    (tmp_path / "cut").mkdir()
    for recorded in (whole, cut):
        recorded.put(1, encode(replace(losses(0, 10), rank=1)))
        recorded.renumber({0: 1}, 2)
        for first in range(10, 40_010, 1000):
            recorded.put(0, encode(losses(first, 1000)))
        recorded.close()
    before, number, *behind = batches(whole.parts())
    assert before[0] == 1 and number == Renumbered({0: 1}, 2) and {one[0] for one in behind} == {0}
    assert [(rank, decode(data).texts) for rank, data in cut.left()] == [(0, {1: "loss"})], "which its later rows need"
