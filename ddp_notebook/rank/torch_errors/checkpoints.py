"""Errors of torch.distributed.checkpoint and of torch.load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddp_notebook.rank.torch_errors import parameter_names
from ddp_notebook.rank.torch_errors.known_error import KnownError, Values
from ddp_notebook.rank.torch_errors.raised import Raised
from ddp_notebook.records.words import name_ranks
from ddp_notebook.stdlib import os

_CHECKPOINT = r"^torch\.distributed\.checkpoint\."
_PLANNER = _CHECKPOINT + "(default_planner|planner_helpers):"
_NO_METADATA = "metadata is None; global metadata read failed: [Errno {:d}] {}: '{folder}/.metadata'"
_NO_METADATA_BEFORE = "[Errno {:d}] {}: '{folder}/.metadata'"


def _saved(raised: Raised) -> list[str]:
    """Return the keys of the checkpoint that is being loaded, as far as this rank knows them."""
    planner: Any = raised.local(_CHECKPOINT + "state_dict_loader:_load_state_dict$", "planner")
    return list(getattr(getattr(planner, "metadata", None), "state_dict_metadata", ()))


def _with_prefix(raised: Raised, found: Mapping[str, str]) -> Values | None:
    key, saved = found["key"].rstrip("."), _saved(raised)
    longer = [one for one in saved if one.endswith(f".{key}")]
    if len(longer) != 1:
        return None
    return {"key": key, "saved": longer[0], "prefix": longer[0].removesuffix(f".{key}")}


def _missing(raised: Raised, found: Mapping[str, str]) -> Values:
    saved = parameter_names.some(sorted(_saved(raised)))
    has = f"it has {saved}" if saved else "it has other keys"
    return {"key": found["key"].rstrip("."), "ranks": name_ranks(raised.ranks), "saved": has}


def _kinds(_: Raised, found: Mapping[str, str]) -> Values:
    return {"found": found["found"].rpartition(".")[2]}


def _kind_of_path(found: Mapping[str, str]) -> str:
    folder = found["folder"]
    return "file" if os.path.isfile(folder) else "folder" if os.path.isdir(folder) else ""


def _is_file(_: Raised, found: Mapping[str, str]) -> Values | None:
    return {} if _kind_of_path(found) == "file" else None


def _is_folder(_: Raised, found: Mapping[str, str]) -> Values | None:
    return {} if _kind_of_path(found) == "folder" else None


def _is_nothing(_: Raised, found: Mapping[str, str]) -> Values | None:
    return {"cwd": os.getcwd()} if not _kind_of_path(found) else None


def _is_checkpoint(_: Raised, found: Mapping[str, str]) -> Values | None:
    return {} if os.path.isfile(os.path.join(found["folder"], ".metadata")) else None


def _group_sizes(raised: Raised, _: Mapping[str, str]) -> Values | None:
    place = r"^torch\.optim\.optimizer:Optimizer\.load_state_dict$"
    own, given = raised.local(place, "groups"), raised.local(place, "saved_groups")
    if not own or not given:
        return None
    sizes = [(len(one["params"]), len(other["params"])) for one, other in zip(own, given, strict=False)]
    here, saved = next((pair for pair in sizes if pair[0] != pair[1]), (0, 0))
    return {"own": here, "saved": saved} if here or saved else None


ENTRIES = (
    KnownError(
        name="key with a prefix in the checkpoint",
        text="Missing key in checkpoint state_dict: {key}",
        kind="RuntimeError",
        where=_PLANNER,
        facts=_with_prefix,
        cause="the checkpoint has {saved}, and not {key}",
        fix="load it inside a dictionary, dcp.load({{{prefix!r}: state}}, ...)",
    ),
    KnownError(
        name="key that the checkpoint lacks",
        text="Missing key in checkpoint state_dict: {key}",
        kind="RuntimeError",
        where=_PLANNER,
        facts=_missing,
        cause="{key} is in the state_dict of {ranks} and not in the checkpoint; {saved}",
        fix="load a state_dict with the saved keys, or pass planner=DefaultLoadPlanner(allow_partial_load=True)",
    ),
    KnownError(
        name="tensor of another size in the checkpoint",
        text="Size mismatch between saved torch.Size({saved}) and current: torch.Size({now}) for {key}",
        kind="ValueError",
        where=_PLANNER,
        cause="{key} has the shape {saved} in the checkpoint and {now} in the state_dict",
        fix="make the model with the saved sizes; only the number of ranks may differ",
    ),
    KnownError(
        name="value of another kind in the checkpoint",
        text="Invalid checkpoint metadata for {key}, expected {wanted} but found <class '{}.{found}'>",
        kind="ValueError",
        where=_PLANNER,
        facts=_kinds,
        cause="{key} is a tensor in only one of checkpoint and state_dict (expected {wanted}, found {found})",
        fix="put a value of the saved kind into the state_dict before dcp.load",
    ),
    KnownError(
        name="file instead of a checkpoint's folder",
        text=_NO_METADATA,
        kind="AssertionError CheckpointException FileNotFoundError NotADirectoryError",
        where=_CHECKPOINT,
        facts=_is_file,
        cause="{folder} is a file, and dcp.load reads folders that dcp.save has written",
        fix="use torch.load for a file of torch.save",
        other_texts=(_NO_METADATA_BEFORE,),
    ),
    KnownError(
        name="folder without a checkpoint",
        text=_NO_METADATA,
        kind="AssertionError CheckpointException FileNotFoundError",
        where=_CHECKPOINT,
        facts=_is_folder,
        cause="{folder} exists and has no .metadata, the file that dcp.save writes last",
        fix="load an earlier checkpoint if that save was interrupted, or pass the folder of the checkpoint itself",
        other_texts=(_NO_METADATA_BEFORE,),
    ),
    KnownError(
        name="missing folder of a checkpoint",
        text=_NO_METADATA,
        kind="AssertionError CheckpointException FileNotFoundError",
        where=_CHECKPOINT,
        facts=_is_nothing,
        cause="the folder {folder} does not exist on this rank's host; the rank runs in {cwd}",
        fix="check the path; several hosts need a shared file system",
        other_texts=(_NO_METADATA_BEFORE,),
    ),
    KnownError(
        name="checkpoint's folder in torch.load",
        text="[Errno 21] Is a directory: '{folder}'",
        kind="IsADirectoryError",
        where=r"^torch\.serialization:",
        facts=_is_checkpoint,
        cause="{folder} is a checkpoint of torch.distributed.checkpoint",
        fix="use dcp.load(state, checkpoint_id={folder!r}) with a state_dict of the right shapes",
    ),
    KnownError(
        name="checkpoint without a path",
        text="`checkpoint_id` must be specified if storage_reader/storage_writer is None.",
        kind="RuntimeError",
        where=_CHECKPOINT + "_storage_utils:",
        cause="save and load need a folder",
        fix="pass checkpoint_id='path/of/a/folder', the same on all ranks",
    ),
    KnownError(
        name="optimizer of another model",
        text="loaded state dict contains a parameter group that doesn't match the size of optimizer's group",
        kind="ValueError",
        where=r"^torch\.optim\.optimizer:",
        facts=_group_sizes,
        cause="a group of this optimizer has {own} parameters, and the saved one has {saved}",
        fix="make the optimizer from the same parameters in the same groups as the saved one",
    ),
)
