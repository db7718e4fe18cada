"""Every message survives the wire, and invalid data is rejected."""

from __future__ import annotations

import dataclasses
import importlib
import json
import pkgutil
import re
import sys
from types import SimpleNamespace, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from ddp_notebook import messages
from ddp_notebook.launch.host import server
from ddp_notebook.messages.dispatch import Table
from ddp_notebook.messages.encoding import SHOWN, VERSION, Message, decode
from ddp_notebook.messages.hosts import ConnectTarget, FileDigest, FilePart, FoundFile, ListenPlace, Seen
from ddp_notebook.messages.ranks import Display, Probe, Pulled, RunCell
from ddp_notebook.messages.record_options import PROFILES, RecordOptions, profile_of, profile_path

MODULES = [
    importlib.import_module(f"{messages.__name__}.{one.name}") for one in pkgutil.iter_modules(messages.__path__)
]
KINDS = [
    kind
    for module in MODULES
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Message) and kind.__module__ == module.__name__
]
KINDS.remove(Message)
SAMPLES: dict[str, Any] = {
    "int": 2**40,
    "float": 0.125,
    "str": "é\ud800 \x1e\n",  # a lone surrogate, as created by os.fsdecode
    "bytes": bytes(range(256)),
    "bytearray": bytearray(range(256)),
    "bool": True,
    "dict[str, str]": {"LANG": "é", "EMPTY": ""},
    "dict[str, Any]": {"data": {"text/plain": "1"}, "transient": {}, "deep": [{"a": None}]},
    "list[str]": ["a", ""],
    "list[int]": [0, 2**40],
    "list[Any]": [1, 2**40, "é"],
    "list[list[Any]]": [["\udcff.pt", 0, 2**40], []],
    "int | None": None,
    "bool | None": False,
    "list[str] | None": None,
    "dict[str, Any] | None": {"name": "all_reduce", "ranks": [0, 1]},
    "RecordOptions": RecordOptions(level="meta", watch=("loss", "é"), profile=True, profiles="/a {b}", solo=(3, 0.5)),
    "str | None": None,
    "list[bool]": [True, False],
    "dict[int, Seen]": {7: Seen(True, "é"), 0: Seen(False)},
    "list[ListenPlace]": [ListenPlace("127.0.0.1", 0, 1, "word")],
    "list[ConnectTarget]": [ConnectTarget("127.0.0.1", 1, "word")],
    "list[FoundFile | None]": [FoundFile("file", 3, 2**60, 0o640), None],
    "list[FilePart]": [FilePart("\udcff", 3, False, (0o640, 2**60)), FilePart("link", link="sub")],
    "list[FileDigest]": [FileDigest("a", "b", 2**60)],
    "dict[str, dict[str, Any]]": {"engine": {"key": "\udcff", "registration": 7}},
    "list[dict[str, Any]]": [{"source": "page", "start": 0}],
}


def value(its: Any) -> Any:
    """Return an unusual value of this type."""
    if its is Message:
        return Probe(request=7)
    if isinstance(its, type) and dataclasses.is_dataclass(its):
        return sample(its)
    origin, of = get_origin(its), get_args(its)
    if origin is list:
        return [value(of[0])]
    if origin is tuple:
        return tuple(map(value, of))
    if origin is dict:
        return {7: value(of[1]), 0: value(of[1])} if of[0] is int else {"é": value(of[1])}
    if origin is UnionType:
        return value(of[0])
    return SAMPLES[its.__name__]


def sample(kind: type[Any]) -> Any:
    """Return a message with an unusual value in every field."""
    hints = get_type_hints(kind)
    names = {field.name: str(field.type) for field in dataclasses.fields(kind)}
    return kind(**{name: SAMPLES[its] if its in SAMPLES else value(hints[name]) for name, its in names.items()})


def test_every_message_survives_the_wire():
    assert len(KINDS) > 10
    for kind in KINDS:
        message = shown = sample(kind)
        if kind.__name__ in SHOWN:
            texts = {field.name for field in dataclasses.fields(kind) if field.type == "str"}
            shown = dataclasses.replace(message, **dict.fromkeys(texts, "é\\ud800 \x1e\n"))

        assert decode(message.encode()) == shown
        assert type(decode(message.encode())) is kind


def test_defaults_survive_too():
    assert decode(Pulled(request=1).encode()) == Pulled(request=1)


def test_a_cell_that_records_as_always_says_nothing_about_it():
    cell = RunCell(cell=1, code="x", execution_count=1)
    assert json.loads(cell.encode()[0])[1]["record"] == {}
    assert decode(cell.encode()) == cell


def test_what_is_to_be_recorded_that_is_no_such_thing_is_refused():
    wrong: list[Any] = [{"levels": "off"}, {"watch": 1}, {"solo": [1]}, [], None]
    for record in wrong:
        frame = json.dumps(["RunCell", {"cell": 1, "code": "", "execution_count": 1, "record": record}]).encode()
        with pytest.raises(ValueError, match=rf"^not a message of version {VERSION}: b"):
            decode([frame])


def test_profiles_are_found_where_they_are_put(tmp_path):
    folder = tmp_path / "a {folder} of {0}"
    folder.mkdir()
    paths = {(cell, rank): profile_path(str(folder), cell, rank) for cell in (7, 12) for rank in (0, 10)}
    for path in [*paths.values(), folder / "stack-1"]:
        path.touch()
    assert {profile_of(path): path for path in folder.glob(PROFILES)} == paths


def test_large_fields_are_frames_of_their_own():
    frames = Pulled(request=1, data=b"\x00" * 1000).encode()

    assert frames[1:] == [b"\x00" * 1000]
    assert len(frames[0]) < 200


def test_messages_are_frozen_and_name_their_fields():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Probe(request=1).request = 2  # type: ignore[misc]
    with pytest.raises(TypeError):
        Probe(1)  # type: ignore[call-arg]
    assert repr(Probe(request=1)) == "Probe(request=1, with_shortages=False)"


def test_what_json_cannot_hold_is_sent_as_text():
    class Odd:
        def __str__(self) -> str:
            return "odd"

    content = {"data": {"text/plain": Odd()}}

    came = decode(Display(cell=1, msg_type="display_data", content=content, place=1).encode())

    assert came == Display(cell=1, msg_type="display_data", content={"data": {"text/plain": "odd"}}, place=1)


def test_every_message_is_in_the_table_of_its_module():
    for kind in KINDS:
        assert re.search(rf"\b{kind.__name__}\b", f"{sys.modules[kind.__module__].__doc__}"), kind.__name__


def test_two_messages_of_one_name_are_refused():
    with pytest.raises(TypeError, match="both define a message Probe"):
        type("Probe", (Message,), {"__module__": "elsewhere"})


def test_a_field_that_cannot_be_read_back_is_refused():
    @dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
    class Unclear(Message):
        value: FoundFile | FilePart

    with pytest.raises(TypeError, match="nothing tells which"):
        Unclear(value=FoundFile("file", 1, 1, 1)).encode()


def test_every_request_to_a_host_server_has_a_handler(monkeypatch):
    """The server builds the table at its start. Its parts are read without a server here."""
    tables: list[Table[Any]] = []
    monkeypatch.setattr(server, "Table", lambda handlers: tables.append(Table(handlers)))
    control: Any = SimpleNamespace()
    server.HostServer(control, lambda: True, {}, "", 0, {}, lambda _: 0)
    [table] = tables
    requests = {kind for kind in KINDS if kind.__module__ == "ddp_notebook.messages.hosts"}
    assert set(table) == {kind for kind in requests if kind.__name__.endswith("Request")}


def test_what_is_no_message_is_refused():
    for frames in (
        [b""],
        [b"\xff\xfe"],
        [b"{}"],
        [b"7"],
        [b'["Probe"]'],
        [b'["Nothing", {}]'],
        [b'[["Probe"], {}]'],
        [b'["Message", {}]'],
        [b'["Probe", []]'],
        [b'["Probe", {}]'],
        [b'["Probe", {"request": 1, "more": 2}]'],
        [b'["RunCell", {"cell": 1, "code": "pass"}]'],
        Pulled(request=1, data=b"x").encode()[:1],
    ):
        with pytest.raises(ValueError, match=rf"^not a message of version {VERSION}: b") as error:
            decode(frames)
        assert repr(frames[0][:80]) in str(error.value)


def test_a_refusal_shows_the_begin_only():
    frame = json.dumps(["Nothing", {"text": "x" * 10_000}]).encode()

    with pytest.raises(ValueError, match="not a message") as error:
        decode([frame])
    assert len(str(error.value)) < 200


def test_code_is_sent_as_it_was_written():
    code = "x = 'é'\n\tprint(\"\\n\")\r\n%timeit x\n"
    message = RunCell(cell=1, code=code, execution_count=3)

    assert decode(message.encode()) == message


def test_no_frames_are_no_message():
    with pytest.raises(ValueError, match=f"^not a message of version {VERSION}"):
        decode([])
