"""A recording is preserved in its file, and errors explain files that are not recordings."""

from __future__ import annotations

import json
import random
import zipfile

import numpy as np
import pytest

from ddp_notebook.errors import RecordingError, UsageError
from ddp_notebook.observe.files import load
from ddp_notebook.observe.recording import Recording
from ddp_notebook.observe.tables import store
from ddp_notebook.observe.tables.matching import label_of
from ddp_notebook.records.codec import Tensor, encode
from ddp_notebook.records.schema import TABLES
from tests.observe.batches import Rank, some_batch, there
from tests.observe.synthetic import simulate

S = 10**9


def full():
    """Return a recording with rows in every table."""
    recording = Recording(3)
    for rank in range(3):
        for stream in (1, 2):
            recording._feed(some_batch(np.random.default_rng(rank * 10 + stream), rank=rank, stream=stream))
    one, side = Rank(2, stream=3), {"name": "p", "title": "pair", "ranks": [0, 2]}
    tensors = (Tensor(call=1, side=1, dtype="int64", shape=(2,), data=np.arange(2).tobytes()),) * 2
    rows = (one.call(group=side), one.values(1, 1, [5.0]), one.row("metric", name="loss", value=2.0, time_ns=9 * S))
    recording._feed(one.batch(*rows, tensors=tensors, dropped=2))
    recording.clock.add(2, sent_ns=0, rank_ns=5 * S, received_ns=100)
    recording.baseline = {"samples_per_s": 12.5}
    return recording


def assert_same(again, recording):
    assert again.world_size == recording.world_size
    assert again.dropped == recording.dropped
    assert again.baseline == recording.baseline
    for table in TABLES:
        assert again.rows(table).tobytes() == recording.rows(table).tobytes()
    assert again.store.texts.all() == recording.store.texts.all()
    assert [again.clock_error_ns(rank) for rank in range(3)] == [recording.clock_error_ns(rank) for rank in range(3)]
    tensors = [(key, one.dtype, one.shape, one.data) for key, one in recording.store.kept_tensors()]
    assert [(key, one.dtype, one.shape, one.data) for key, one in again.store.kept_tensors()] == tensors


@pytest.mark.parametrize("name", ["run.npz", "a run.ddp", "run"])
def test_a_recording_survives_its_file(tmp_path, name):
    recording = full()
    recording.save(tmp_path / name)
    again = load(str(tmp_path / name))

    assert_same(again, recording)
    last = again.collectives(group="pair")[0]
    assert there(last.output).first.tolist() == [5.0]
    assert [one.tolist() for one in again.tensor(2, last.call, 1)] == [[0, 1], [0, 1]]
    assert again.metrics["loss"].times_ns.tolist()[-1] == 4 * S + 50
    assert again.collectives()[0] is not None


def test_a_folder_that_is_not_there_is_told(tmp_path):
    with pytest.raises(UsageError) as error:
        Recording(2).save(tmp_path / "none" / "run.npz")
    assert str(error.value) == f"the folder '{tmp_path / 'none'}' for run.npz does not exist; create it first"


def test_an_empty_one_too(tmp_path):
    Recording(2).save(tmp_path / "run")

    assert repr(load(tmp_path / "run")) == "<Recording of 2 ranks: 0 calls, 0 spans, 0 values of metrics>"


def test_a_file_that_is_there_is_replaced_as_a_whole(tmp_path, monkeypatch):
    path = tmp_path / "run.npz"
    full().save(path)
    before = path.read_bytes()

    def fails(file, **arrays):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez_compressed", fails)
        with pytest.raises(OSError, match="No space left"):
            Recording(1).save(path)
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["run.npz"]

    Recording(1).save(path)
    assert load(path).world_size == 1


def test_files_of_ranks_without_a_notebook(tmp_path):
    run = simulate(world_size=3, steps=3)
    for batch in run.batches():
        (tmp_path / f"rank{batch.rank}.ddp").write_bytes(encode(batch))
    more = Rank(2, stream=99)
    with (tmp_path / "rank2.ddp").open("ab") as file:
        file.write(encode(more.batch(more.call("barrier"), dropped=4)))
        file.write(encode(more.batch(more.call("barrier")))[:-5])  # the process ended while writing
    recording = load(tmp_path)

    assert recording.world_size == 3
    assert recording.dropped == {2: 4}
    assert len(recording.rows("span")) == len(run.rows("span"))
    assert len(recording.collectives(op="barrier")) == 1
    assert len(recording.collectives(op="all_reduce")) == len(run.rows("call"))
    assert len(load(tmp_path / "rank1.ddp").collectives(rank=1)) == len(run.rows("call")) / 3


def test_cells_keep_their_names(tmp_path):
    run = simulate(world_size=1, steps=3)
    for batch in run.batches():
        (tmp_path / "rank0.ddp").write_bytes(encode(batch))
    of_script = load(tmp_path)
    of_script.prompts.update({1: "In [6]", 2: "In [8]", 3: "In [6]"})
    again = load(of_script.save(tmp_path / "run.npz"))

    assert [label_of(again, cell) for cell in range(5)] == [
        "script",
        "In [6] (cell 1)",  # the notebook kernel was restarted before the other cell
        "In [8]",
        "In [6] (cell 3)",
        "cell 4",
    ]


def test_two_files_of_a_rank_are_one_run_and_that_is_said(tmp_path):
    for process in (1, 2):
        more = Rank(0, stream=process)
        (tmp_path / f"rank0-{process}.ddp").write_bytes(encode(more.batch(more.call("barrier"))))
    with pytest.warns(UserWarning, match="contains up to 2 files per rank"):
        recording = load(tmp_path)
    assert len(recording.collectives(op="barrier")) == 2


def test_all_that_files_hold_is_kept(tmp_path, monkeypatch):
    for number in (0, 1):
        rank = Rank(number)
        batches = [rank.batch(*(rank.call() for _ in range(10))) for _ in range(5)]
        (tmp_path / f"{number}.ddp").write_bytes(b"".join(map(encode, batches)))
    monkeypatch.setitem(store.CAPACITY, "call", 16)
    recording = load(tmp_path)

    assert len(recording.collectives()) == 100
    recording.save(tmp_path / "all.npz")
    assert len(load(tmp_path / "all.npz").collectives()) == 100


def changed(path, **arrays):
    """Return a copy of a saved recording with some changed arrays."""
    with np.load(path) as saved:
        parts = {name: saved[name] for name in saved.files} | arrays
    out = path.with_name("changed.npz")
    np.savez_compressed(out, **{name: part for name, part in parts.items() if part is not None})
    return out


def head_of(path, **words):
    with np.load(path) as saved:
        head = json.loads(saved["head"].tobytes()) | words
    return np.frombuffer(json.dumps(head).encode(), np.uint8)


def test_what_is_no_recording_is_told(tmp_path):
    path, other, empty, text = (tmp_path / name for name in ("run.npz", "other.npz", "empty", "text.npz"))
    full().save(path)
    np.savez(other, weights=np.zeros(3))
    empty.mkdir()
    text.write_text("hello")
    (tmp_path / "cut.npz").write_bytes(path.read_bytes()[:-500])
    (tmp_path / "rank0.ddp").write_bytes(b"hello, this is no batch at all")
    no_zip = "is not a recording: it is not a zip file as written by Recording.save()"
    for wrong, words in (
        (text, no_zip),
        (tmp_path / "cut.npz", no_zip),
        (other, "is not a recording: it contains weights"),
        (empty, "contains no recording: no file in it matches *.ddp"),
        (tmp_path / "rank0.ddp", "is damaged or not the recording of a rank: no batch at byte 0"),
    ):
        with pytest.raises(RecordingError) as error:
            load(wrong)
        assert str(error.value) == f"{wrong} {words}"
    with pytest.raises(RecordingError, match=r"rank0\.ddp is damaged or not the recording of a rank"):
        load(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"^the recording .*/nowhere\.npz does not exist$") as missing:
        load(tmp_path / "nowhere.npz")
    assert isinstance(missing.value, RecordingError)  # a notebook shows one line, without frames of the package
    for name, reason in (("a\0b", "null"), ("a\ud800b", "surrogates"), ("x" * 300, "File name too long")):
        with pytest.raises(RecordingError, match=f"cannot be read: .*{reason}"):
            load(name)


def test_other_versions_and_odd_heads_are_told(tmp_path):
    path = tmp_path / "run.npz"
    full().save(path)
    few = np.zeros(3, [("call", "<u8")])
    for arrays, words in (
        ({"head": head_of(path, version=7)}, "is a recording of version 7; this is version 1"),
        ({"head": head_of(path, format="x")}, "is not a recording but 'x'"),
        ({"call": few}, "is a recording of another version: its table 'call' has other columns"),
        ({"call": None}, "is damaged or not a recording: .*call"),
        ({"head": np.zeros(9, np.uint8)}, "is damaged or not a recording: "),
        ({"head": head_of(path, clock=[[1]])}, "is damaged or not a recording: "),
    ):
        with pytest.raises(RecordingError, match=f"changed.npz {words}"):
            load(changed(path, **arrays))


def test_a_pickle_is_not_opened(tmp_path):
    np.savez(tmp_path / "bad.npz", head=np.array([print], object))

    with pytest.raises(RecordingError, match=r"bad\.npz is damaged or not a recording: Object arrays"):
        load(tmp_path / "bad.npz")


@pytest.mark.long
def test_a_damaged_file_is_an_error_or_the_same_recording(tmp_path):
    path, recording = tmp_path / "run.npz", full()
    recording.save(path)
    data, refused = path.read_bytes(), 0
    for seed in range(300):
        chance = random.Random(seed)
        damaged = bytearray(data)
        for _ in range(chance.choice([1, 3])):
            damaged[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        try:
            again = load(path)
        except RecordingError:
            refused += 1
        else:
            assert_same(again, recording)
    assert refused > 150


def test_a_table_whose_name_is_damaged_is_not_left_out(tmp_path):
    path = tmp_path / "run.npz"
    full().save(path)
    data = path.read_bytes()
    for name in TABLES:
        path.write_bytes(data.replace(f"{name}.npy".encode(), f"{name[:-1]}_.npy".encode()))
        with pytest.raises(RecordingError, match="damaged or not a recording"):
            load(path)


def test_it_is_a_zip_of_plain_arrays(tmp_path):
    full().save(tmp_path / "run.npz")

    with zipfile.ZipFile(tmp_path / "run.npz") as file:
        names = {f"{name}.npy" for name in ("head", "tensors", *TABLES)}
        assert set(file.namelist()) == names
