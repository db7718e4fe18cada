"""Batches survive their binary encoding. Invalid data is rejected with the right error, and never gives wrong rows."""

from __future__ import annotations

import json
import random
import struct
import zlib
from typing import Any

import numpy as np
import pytest

from ddp_notebook.records.codec import VERSION, Batch, CodecError, Tensor, decode, decode_all, encode, skim
from ddp_notebook.records.schema import (
    DTYPES,
    EARLIER,
    FIRST_BYTES,
    TABLES,
    TEXTS,
    TIMES,
    VALUE,
    as_array,
    first_values,
)
from tests.observe.batches import some_batch


def batches(count):
    return [some_batch(np.random.default_rng(seed), rank=seed % 5, stream=seed) for seed in range(count)]


def test_every_batch_survives():
    for batch in [Batch(rank=0, stream=0), *batches(100)]:
        again = decode(encode(batch))

        assert again == batch
        assert (again.rank, again.stream, again.dropped) == (batch.rank, batch.stream, batch.dropped)
        assert again.texts == batch.texts
        assert again.tensors == batch.tensors
        assert {name: rows.tobytes() for name, rows in again.tables.items()} == {
            name: rows.tobytes() for name, rows in batch.tables.items()
        }


def test_rows_that_lie_apart_survive():
    rows = some_batch(np.random.default_rng(0)).tables["call"]
    batch = Batch(rank=0, stream=1, tables={"call": rows[::2]})

    assert decode(encode(batch)).tables["call"].tobytes() == rows[::2].tobytes()


@pytest.mark.parametrize(("table", "form"), [(table, form) for table, forms in EARLIER.items() for form in forms])
def test_rows_of_an_earlier_form_have_zeros_for_what_it_lacks(monkeypatch, table, form):
    rows = np.ones(2, form)
    with monkeypatch.context() as earlier:
        earlier.setitem(TABLES, table, form)
        data = encode(Batch(rank=0, stream=1, tables={table: rows}))
    again = decode(data).tables[table]

    assert again.dtype == TABLES[table] != form
    had = list(form.names)
    assert again[had].tolist() == rows.tolist()
    assert all(again[name].tolist() == [0, 0] for name in TABLES[table].names or () if name not in had)


def mangled(data, chance):
    """Return the bytes with random changes: flipped, cut, added, or moved."""
    data = bytearray(data)
    for _ in range(chance.choice([1, 1, 1, 2, 5])):
        at = chance.randrange(len(data)) if data else 0
        # The head, with its lengths, and the JSON are the most sensitive parts.
        at = min(at, chance.choice([20, 100, len(data)]))
        what = chance.choice(["flip", "cut", "insert", "remove", "repeat", "swap"])
        if what == "flip" and data:
            data[at % len(data)] ^= 1 << chance.randrange(8)
        elif what == "cut":
            del data[at:]
        elif what == "insert":
            data[at:at] = chance.randbytes(chance.randint(1, 30))
        elif what == "remove":
            del data[at : at + chance.randint(1, 30)]
        elif what == "repeat":
            data[at:at] = data[at : at + chance.randint(1, 200)]
        elif what == "swap":
            other = chance.randrange(len(data) + 1)
            data = data[other:] + data[:other]
    return bytes(data)


@pytest.mark.slow
def test_bytes_that_were_damaged_are_refused_or_still_the_same():
    samples = [(batch, encode(batch)) for batch in batches(20)]
    refused = 0
    for seed in range(20_000):
        chance = random.Random(seed)
        batch, data = samples[seed % len(samples)]
        damaged = mangled(data, chance)
        for read in (decode, skim):
            try:
                again = read(damaged)
            except CodecError:
                refused += 1
            else:
                assert again.texts == batch.texts
                assert read is skim or damaged == data
    assert refused > 30_000


def sealed(body, tables):
    """Return bytes with a valid checksum."""
    return struct.pack("<4sHHIQ", b"DDPB", VERSION, tables, zlib.crc32(body), len(body)) + body


@pytest.mark.slow
def test_malformed_headers_with_a_valid_checksum_are_refused():
    data = encode(next(batch for batch in batches(30) if len(batch.tensors) == 2))
    length = struct.unpack_from("<I", data, 20)[0]
    words = json.loads(data[24 : 24 + length])
    rest = data[24 + length :]
    odd: list[Any] = [
        None,
        -1,
        10**30,
        1.5,
        float("nan"),
        "x",
        [],
        {},
        [[]],
        [None],
        [["call", -1, 122]],
        [[1, 2, 3]],
        True,
    ]
    for seed in range(5000):
        chance = random.Random(seed)
        changed = json.loads(json.dumps(words))
        place = changed
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = chance.choice(keys)
            if isinstance(place[key], (dict, list)) and chance.random() < 0.7:
                place = place[key]
                continue
            if chance.random() < 0.2:
                del place[key]
            else:
                place[key] = chance.choice(odd)
            break
        body = json.dumps(changed).encode()
        for read in (decode, skim):
            try:
                batch = read(sealed(struct.pack("<I", len(body)) + body + rest, len(words["tables"])))
                assert isinstance(batch.rank, int)
                assert all(isinstance(one, int) for one in batch.texts)
                for tensor in batch.tensors:
                    assert all(isinstance(size, int) for size in tensor.shape)
            except CodecError:
                pass


def test_random_bytes_are_refused():
    for seed in range(2000):
        chance = random.Random(seed)
        body = chance.randbytes(chance.randint(0, 200))
        for data in (body, b"DDPB" + body, sealed(body, 1), sealed(struct.pack("<I", 4) + body, 0)):
            for read in (decode, skim, lambda data: list(decode_all(data))):
                try:
                    assert read(data) == []  # a file of which only the start was written
                except CodecError:
                    pass


def test_what_is_wrong_is_said():
    data = encode(Batch(rank=0, stream=1, texts={1: "x"}))
    for damaged, words in (
        (b"", "0 bytes are no batch"),
        (b"PK" + data[2:], r"no batch: begins with b'PKPB'"),
        (data[:4] + b"\x09\0" + data[6:], f"a batch of version 9; this is version {VERSION}"),
        (data[:-1], "a batch is damaged"),
        (data + b"x", "1 bytes too many behind a batch"),
    ):
        with pytest.raises(CodecError, match=f"^{words}$"):
            decode(damaged)


def test_a_batch_without_its_rows():
    for batch in batches(30):
        left = skim(encode(batch))

        assert (left.rank, left.stream, left.texts) == (batch.rank, batch.stream, batch.texts)
        assert left.dropped == batch.dropped + sum(map(len, batch.tables.values()))
        assert (left.tables, left.tensors) == ({}, ())


def test_the_file_of_a_rank_that_was_ended_while_it_wrote():
    written = batches(4)
    data = b"".join(map(encode, written))
    whole = len(b"".join(map(encode, written[:3])))
    for end in range(whole, len(data), 7):
        assert list(decode_all(data[:end])) == written[:3]
    assert list(decode_all(data)) == written
    assert list(decode_all(b"")) == []


def test_a_file_of_something_else_is_refused():
    for data in (b"\x93NUMPY" * 100, b"x", encode(batches(1)[0]) + b"something else"):
        with pytest.raises(CodecError):
            list(decode_all(data))


def test_first_elements_are_those_of_the_tensor():
    values = [0.5, -2.0, 3.0]
    for dtype, code in DTYPES.items():
        if dtype == "bfloat16":
            data = (np.array(values, "<f4").view("<u4") >> 16).astype("<u2").tobytes()
        else:
            data = np.array(values).astype(code).tobytes() if code[1] != "u" else np.array([0, 254, 3], code).tobytes()
        row = np.zeros((), VALUE)
        row["first_count"], row["first"] = 3, data.ljust(FIRST_BYTES, b"\0")

        expected = np.array(values, "<f4") if dtype == "bfloat16" else np.frombuffer(data, code)
        assert first_values(row, dtype).tolist() == expected.tolist()
    assert as_array(b"\1\2", "float8_e4m3fn").tolist() == [1, 2]


def test_the_columns_that_are_named_are_there():
    for names in (TEXTS, TIMES):
        assert names.keys() == TABLES.keys()
        for table, columns in names.items():
            assert set(columns) <= set(TABLES[table].names or ())
    assert Tensor(call=1, side=0, dtype="float32", shape=(), data=b"").shape == ()
