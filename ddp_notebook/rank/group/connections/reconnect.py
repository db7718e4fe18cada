"""New connections for every group, while the group objects stay."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, ProcessGroupGloo
from torch.distributed import PrefixStore, distributed_c10d, get_backend, get_backend_config, is_initialized  # type: ignore[attr-defined]  # exported at run time

from ddp_notebook.messages.ranks import Form
from ddp_notebook.rank.group import join
from ddp_notebook.rank.group.calls import Group, timeout_of
from ddp_notebook.rank.group.connections.abort import NCCL, Connections
from ddp_notebook.rank.group.connections.models import Models
from ddp_notebook.rank.group.recorder import Recorder
from ddp_notebook.rank.group.stores import connect
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import contextlib, json, re, threading

_DEFAULT = "0"  # torch's name of the default group
_KEPT = 2


class Reconnection:
    """Reconnection of the groups of this process.

    Args:
        recorder: knows the groups.
        connections: the current connections.
        models: DDP and FSDP models, whose last backward may be incomplete.
    """

    def __init__(self, recorder: Recorder, connections: Connections, models: Models) -> None:
        self._recorder = recorder
        self._connections = connections
        self._models = models
        self._number: tuple[int, int] | None = None  # rank and world_size in the session's last group
        # Freeing a group joins its threads while it holds the GIL, but a thread that is about to drop a tensor waits
        # for the GIL. So the last groups are kept until they have long been idle.
        self._ended: deque[list[Any]] = deque()

    def renew(self, place: Form) -> list[str]:
        """Make new connections for every group, on all ranks of the session. New ranks join the default group.

        If the number of ranks has changed, all ranks join a new default group, since torch's groups keep their size.
        The other groups are retired.

        Returns:
            Notes for the user: groups that cannot be used any more, and their models.

        Raises:
            Any exception of torch if a group does not form.
        """
        forming = timedelta(seconds=place.form_timeout_s)
        client = connect(place, forming)
        store = PrefixStore(f"{place.store_prefix}/{place.epoch}", client)
        world = distributed_c10d._world
        groups = self._recorder.registered() if is_initialized() else {}
        notes: list[str] = []
        default = dist.group.WORLD if groups else None
        if default is not None and not _is_of(default, (place.rank, place.world_size)):
            notes, groups = self._leave(default, place), {}
        mine = {"count": world.group_count, "groups": {name: group.ranks for name, group in groups.items()}}
        store.set(f"groups/{place.rank}", json.dumps(mine))
        everybody = [json.loads(one) for one in store.multi_get([f"groups/{r}" for r in range(place.world_size)])]
        self._put_aside()
        if not groups:
            join.join(place, f"{place.store_prefix}/{place.epoch}")
        notes += self._reconnect(groups, everybody, store, forming)
        notes += self._models.reset(make_reducers=any(not one["groups"] for one in everybody))
        world.group_count = max(world.group_count, *(one["count"] for one in everybody))  # else later names differ
        if groups:
            assert default is not None
            backend, _ = world.pg_map[default]
            world.pg_map[default] = (backend, PrefixStore(f"{_DEFAULT}/", store))
            for each in (client, store):
                each.set_timeout(timeout_of(default))
        self._recorder.reset_counts()
        self.joined(place)
        return notes

    def _reconnect(
        self, groups: Mapping[str, Group], everybody: Sequence[Any], store: Any, forming: timedelta
    ) -> list[str]:
        """Make new connections for the groups that all their ranks still have, and retire the others.

        Args:
            groups: groups of this rank, by name.
            everybody: one item per rank of the session. Its "groups" contain the ranks of each group, by name.

        Returns:
            A sentence for each group that is retired now.
        """
        notes: list[str] = []
        made: list[tuple[Group, ProcessGroup, Any]] = []
        for name, group in groups.items():
            # The ranks are compared too: if ranks failed while they made groups, two groups may have one name.
            absent = [r for r in group.ranks if everybody[r]["groups"].get(name) != list(group.ranks)]
            if absent and name != _DEFAULT:  # a new rank has no groups, and joins the default group
                if not group.retired:
                    group.retired = _retired(group, absent)
                    notes.append(group.retired)
                continue
            made += self._connect(group, name, PrefixStore(f"{name}/", store), forming)
        for group, successor, board in made:  # all or none: operations through old connections would never end
            group.go_through(successor)
            if (old := group.reference()) is not None:
                self._recorder.keep_board(old, board)
        self._connections.replace({group.name: successor for group, successor, _ in made})
        return notes

    def joined(self, place: Form) -> None:
        """Store the rank and the number of ranks of the formed group."""
        self._number = place.rank, place.world_size

    def _leave(self, default: ProcessGroup, place: Form) -> list[str]:
        """Leave all groups, since the session's size or this rank's number has changed, or a cell has made its own
        default group.

        New ranks would never meet the others in the old groups. With several default groups, ranks might meet in a
        wrong one.
        """
        is_own = not _is_of(default, self._number)
        notes = self._models.leave(default, is_of_session=not is_own)
        now = f"{place.world_size} rank{'s' * (place.world_size > 1)}"
        if is_own:
            notes.append(
                f"the session's group of {now} is the default group again: a cell had created another one "
                "(init_process_group with a store, or with the fake backend)"
            )
        for name, group in self._recorder.registered().items():
            ranks = ",".join(map(str, group.ranks))
            if name == _DEFAULT:
                group.retired = (
                    f"this was the default group of {default.size()} ranks, and the session has {now} now: use "
                )
                group.retired += "dist.group.WORLD"
            elif not group.retired:
                group.retired = f"group {group.title} of ranks {ranks} was made before the session had {now}, and "
                group.retired += f"can no longer be used; {_again(group, '[...]')}"
                notes.append(group.retired)
        self._end(list(distributed_c10d._world.pg_names))
        dist.destroy_process_group()
        return notes

    def _put_aside(self) -> None:
        """Keep the current connections for a while without using them."""
        boards = [group.board for group in self._recorder.groups.values()]
        self._end([*self._connections.replace({}), *boards])
        self._connections.forget_listeners()

    def _end(self, groups: list[Any]) -> None:
        """Keep these groups, and free the oldest kept ones in a thread: an operation that never ends would block it."""
        self._ended.append(groups)
        if len(self._ended) > _KEPT:
            threading.Thread(target=self._ended.popleft().clear, name="ddp-free", daemon=True).start()

    def _connect(
        self, group: Group, name: str, store: Any, forming: timedelta
    ) -> list[tuple[Group, ProcessGroup, Any]]:
        """Make a successor of a group as torch makes a new group, but without registering it.

        It has torch's own keys in the store, so that a rank that joins by `init_process_group` meets the others there.
        """
        old = group.reference()
        assert old is not None
        config = distributed_c10d.Backend(get_backend_config(old))
        by_device = distributed_c10d.BackendConfig(config).device_backend_map
        if not set(by_device.values()) <= {"gloo", *NCCL}:
            return []  # "fake" has no connections
        rank, size, timeout = old.rank(), old.size(), timeout_of(old)
        new = ProcessGroup(store, rank, size)
        backends: dict[str, Any] = {}
        for device, backend in by_device.items():
            if backend not in backends:
                at = PrefixStore(f"{device}/", store)
                if backend == "gloo":
                    backends[backend] = ProcessGroupGloo(at, rank, size, timeout=forming)
                    backends[backend]._set_default_timeout(timeout)
                else:
                    backends[backend] = _nccl(at, rank, size, timeout, group, name)
                    if name == _DEFAULT:  # `join` does it too: a new rank waits for the others there
                        with contextlib.suppress(AttributeError):
                            backends[backend].eager_connect_single_device(_device())
            new._register_backend(torch.device(device), _type_of(backend), backends[backend])
        new._set_default_backend(_type_of(next((one for one in NCCL if one in backends), "gloo")))
        if old.bound_device_id is not None:
            new.bound_device_id = old.bound_device_id
        new._set_group_name(distributed_c10d.GroupName(name))
        new._set_group_desc(old.group_desc)
        board = None
        make_board = self._connections.make_board
        if make_board is not None and size > 1 and set(backends) == {"gloo"}:
            board = make_board(new, store, forming)
            board.set_timeout(timeout)
        return [(group, new, board)]


def _is_of(default: ProcessGroup, number: tuple[int, int] | None) -> bool:
    """Return whether this can be the session's default group, with this rank's number and this number of ranks."""
    return (default.rank(), default.size()) == number and get_backend(default) != "fake"


def _type_of(backend: str) -> Any:
    types = distributed_c10d.Backend.backend_type_map
    return types.get(backend, types["nccl"])  # torch registers "nccl2" when it is first requested by this name


def _nccl(store: Any, rank: int, size: int, timeout: timedelta, group: Group, name: str) -> Any:
    """Return an NCCL backend of the group's class. From torch 2.14 on there are two."""
    from torch._C._distributed_c10d import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.global_ranks_in_group = list(group.ranks)
    options.group_name = distributed_c10d.GroupName(name)
    old = group.reference()
    assert old is not None
    kind: Any = type(old._get_backend(torch.device("cuda")))
    if "device_id" not in (kind.__init__.__doc__ or ""):  # the old class, and the new one in torch 2.14
        return kind(store, rank, size, options)
    return kind(store, rank, size, options, old.bound_device_id or _device())


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _retired(group: Group, absent: list[int]) -> str:
    who = ",".join(map(str, absent))
    return (
        f"group {group.title} of ranks {','.join(map(str, group.ranks))} does not exist on "
        f"rank{'s' * (len(absent) > 1)} {who} and can no longer be used; {_again(group, str(list(group.ranks)))}"
    )


def _again(group: Group, ranks: str) -> str:
    """Return an instruction to make a group again.

    torch names the groups of a mesh after its dimensions. A dimension without a name is named by its number:
    `mesh_dim_0`.
    """
    kind, _, dimension = group.title.partition("_")
    if kind == "mesh" and dimension:
        number = re.fullmatch(r"dim_(\d+)", dimension)
        which = number[1] if number else f'"{dimension}"'
        of_it = "" if dimension == "default" else f", and take mesh.get_group({which}) of the new one"
        return f"make its mesh again on all ranks: mesh = init_device_mesh(...){of_it}"
    return f"make it again on all ranks: dist.new_group({ranks})"
