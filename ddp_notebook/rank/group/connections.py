"""The connections behind process groups: known, cut, and made anew while the groups themselves stay.

A group that somebody holds (a model in DDP or FSDP, a device mesh, a variable of the user's) cannot be replaced there.
So it is not: `renew` makes new connections for every group, and the recorder's kernels send the group's operations
through these. Whoever holds the old object never notices.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import threading
import weakref
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, ProcessGroupGloo, TCPStore
from torch.distributed import PrefixStore, distributed_c10d  # type: ignore[attr-defined]  # exported at run time
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from ddp_notebook.rank.group import sockets
from ddp_notebook.rank.group.calls import Group, timeout_of
from ddp_notebook.rank.group.guard import make_twin
from ddp_notebook.rank.group.recorder import Recorder
from ddp_notebook.rank.group.waiting import notice_interrupt
from ddp_notebook.wire.events import Form

_DEFAULT = "0"  # torch's name of the default group
_Ports = frozenset[tuple[int, int]]


class _Connecting(NamedTuple):
    """A group that is being made, and what there was before."""

    connections: _Ports
    listening: set[int]
    size: int


class Connections:
    """What this process is connected with.

    Args:
        recorder: whose kernels are told where operations go.
        tell: takes the ports of a group's listeners, for the other ranks.
    """

    def __init__(self, recorder: Recorder, tell: Callable[[list[int]], None]) -> None:
        self._recorder = recorder
        self._tell = tell
        self._own_ports: set[int] = set()  # that gloo listens on here
        self._peer_ports: set[int] = set()  # and at the peers
        self._store_ports: set[int] = set()
        self._connecting: dict[int, _Connecting] = {}  # by thread
        self._starting: dict[int, set[int]] = {}  # by thread that starts a store at any port: what listened before
        self._making = threading.RLock()
        self._makers = 0  # calls that hold it: one, or more where one makes groups in turn
        self._groups: dict[str, ProcessGroup] = {}  # by name of a group: what its operations go through
        # Freeing a group joins its threads with the interpreter's lock held, and a thread that still lets go of a
        # tensor waits for that lock. So the last ones are kept until they have long been quiet.
        self._ended: deque[list[Any]] = deque(maxlen=2)
        self.makes_twins = False  # private groups for the guard
        self._fsdp1: weakref.WeakSet[FullyShardedDataParallel] = weakref.WeakSet()
        self._models: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()

    def watch(self) -> None:
        """See from now on what is connected: every gloo group and every client of a store."""
        connect_group, connect_store = ProcessGroupGloo.__init__, TCPStore.__init__

        def init_group(group: ProcessGroupGloo, *args: Any, **kwargs: Any) -> None:
            thread = threading.get_ident()
            listening = sockets.listening_ports()
            size = kwargs.get("size", args[2] if len(args) > 2 else 0)
            self._connecting[thread] = _Connecting(_connections(), listening, size)
            try:
                connect_group(group, *args, **kwargs)
            finally:
                del self._connecting[thread]
                new = sockets.listening_ports() - listening
                self._own_ports |= new
            self._tell(sorted(new))

        @functools.wraps(connect_store)
        def init_store(store: TCPStore, *args: Any, **kwargs: Any) -> None:
            port = kwargs.get("port", args[1] if len(args) > 1 else 0)
            thread = threading.get_ident()
            if port:
                self._store_ports.add(port)
            else:
                self._starting[thread] = sockets.listening_ports()
            try:
                connect_store(store, *args, **kwargs)
            finally:
                self._starting.pop(thread, None)
                notice_interrupt()
            self._store_ports.add(store.port)

        ProcessGroupGloo.__init__ = init_group  # type: ignore[method-assign,assignment]
        TCPStore.__init__ = init_store  # type: ignore[method-assign,assignment]
        self._watch_groups()
        _remember(DistributedDataParallel, "__init__", self._models)
        _remember(DistributedDataParallel, "__setstate__", self._models)
        _remember(FullyShardedDataParallel, "__init__", self._fsdp1)

    def _watch_groups(self) -> None:
        """Give each group a private one for the guard as it is made, and send what torch asks of a group's backend to
        the backend that the group has now."""
        make = distributed_c10d._new_process_group_helper

        @functools.wraps(make)
        def make_group(*args: Any, **kwargs: Any) -> Any:
            made, store = make(*args, **kwargs)
            if self.makes_twins and isinstance(made, ProcessGroup) and made.size() > 1 and _is_gloo(made):
                self._recorder.twins[made] = make_twin(made, store, timeout_of(made))  # its ranks are not known yet
            return made, store

        make_with_name = distributed_c10d._new_group_with_tag

        @functools.wraps(make_with_name)
        def make_in_turn(*args: Any, **kwargs: Any) -> Any:
            """Threads that make groups at the same time wait for each other at the store, whose client answers one
            question after the other: for torch alone with many threads, with the guard's groups with two."""
            with self._making:
                if (refuse := self._recorder.refusal) is not None:  # a rank has died, or the cell is being ended
                    raise refuse(None)
                self._makers += 1
                try:
                    return make_with_name(*args, **kwargs)
                finally:
                    self._makers -= 1

        distributed_c10d._new_group_with_tag = make_in_turn
        set_timeout = distributed_c10d._set_pg_timeout

        @functools.wraps(set_timeout)
        def set_timeouts(timeout: timedelta, group: Any = None) -> None:
            set_timeout(timeout, group)
            which = dist.group.WORLD if group is None else group
            twin = None if which is None else self._recorder.twins.get(which)
            if twin is not None:  # it waits wherever its group does
                twin._set_default_timeout(timeout)

        distributed_c10d._new_process_group_helper = make_group
        distributed_c10d._set_pg_timeout = set_timeouts
        for name in ("_get_backend", "_start_coalescing", "_end_coalescing"):
            setattr(ProcessGroup, name, self._at_successor(getattr(ProcessGroup, name)))

    def _at_successor(self, method: Callable[..., Any]) -> Callable[..., Any]:
        groups = self._recorder.groups

        @functools.wraps(method)
        def of_successor(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            known = groups.get(id(group))
            if known is not None and known.successor is not None and known.reference() is group:
                group = known.successor
            return method(group, *args, **kwargs)

        return of_successor

    def on_peer_ports(self, ports: list[int]) -> None:
        """The other ranks listen there."""
        self._peer_ports.update(ports)

    @property
    def is_connecting(self) -> bool:
        """Whether some thread is making a group."""
        return bool(self._connecting)

    @property
    def is_making(self) -> bool:
        """Whether some thread is in `new_group`, be it at the store."""
        return self._makers > 0

    @property
    def groups_made(self) -> int:
        """How many groups torch has counted: the next one is named after it, and ranks meet under that name."""
        return int(distributed_c10d._world.group_count)

    @property
    def has_models(self) -> bool:
        """Whether there are models in DDP or FSDP: a forward or backward of one may have been left half done."""
        return bool(self._models or self._fsdp1 or FSDPModule.__subclasses__())

    def retire(self, why: str) -> None:
        """No group that there is can be used any more: operations raise these words."""
        for group in self._made().values():
            group.retired = why

    # ---- cutting

    def cut_groups(self) -> int:
        """End every operation that waits in a group, here and at its peers. From any thread.

        Returns:
            How many connections were cut.
        """
        count = sockets.cut(self._own_ports | self._peer_ports)
        for before in list(self._connecting.values()):  # whose peers have not told their ports yet
            new = {port for port, peer in _connections() - before.connections if peer not in self._store_ports}
            count += sockets.cut(new - self._store_ports)
            for port in sockets.listening_ports() - before.listening:
                sockets.knock(port, before.size)
        return count + self._abort_nccl()

    def cut_stores(self) -> int:
        """End every wait at a store."""
        new = [sockets.listening_ports() - before for before in list(self._starting.values())]
        return sockets.cut(self._store_ports.union(*new))

    def cut_store(self, port: int) -> int:
        """End every wait at the store with this port."""
        return sockets.cut([port])

    def _abort_nccl(self) -> int:
        count = 0
        for group in [*distributed_c10d._world.pg_names, *self._groups.values()]:
            if torch.device("cuda") in group._device_types:
                backend = group._get_backend(torch.device("cuda"))
                if backend.name() == "nccl":
                    backend.abort()  # Source: https://docs.pytorch.org/docs/stable/distributed.html#shutdown
                    count += 1
        return count

    # ---- making anew

    def renew(self, place: Form) -> list[str]:
        """New connections for every group, with all ranks of the session. Those that had none join.

        Returns:
            What the user has to know: groups that cannot be had again.

        Raises:
            whatever torch raises when a group does not form.
        """
        forming = timedelta(seconds=place.form_timeout_s)
        client = TCPStore(
            place.store_host,
            place.store_port,
            world_size=None,
            is_master=False,
            timeout=forming,
            wait_for_workers=False,
        )
        store = PrefixStore(f"{place.store_prefix}/{place.epoch}", client)
        world = distributed_c10d._world
        groups = self._made() if dist.is_initialized() else {}
        mine = {"count": world.group_count, "groups": {name: group.ranks for name, group in groups.items()}}
        store.set(f"groups/{place.rank}", json.dumps(mine))
        everybody = [json.loads(one) for one in store.multi_get([f"groups/{r}" for r in range(place.world_size)])]
        self._forget_old()
        notes = []
        if not groups:
            from ddp_notebook.rank.group import join as joining

            joining.join(place, f"{place.store_prefix}/{place.epoch}")
        made: list[tuple[Group, ProcessGroup, Any]] = []
        for name, group in groups.items():
            # by its ranks too: where ranks failed while they made groups, one name may stand for two
            absent = [r for r in group.ranks if everybody[r]["groups"].get(name) != list(group.ranks)]
            if absent and name != _DEFAULT:  # a new rank has no groups, and joins the default one
                if not group.retired:
                    group.retired = _retired(group, absent)
                    notes.append(group.retired)
                continue
            made += self._connect(group, name, PrefixStore(f"{name}/", store), forming)
        for group, successor, twin in made:  # all or none: some through old connections would wait for ever
            group.successor, group.connections, group.twin = successor, successor.boxed(), twin
            self._groups[group.name] = successor
        has_newcomers = any(not one["groups"] for one in everybody)
        for model in list(self._models):
            try:
                _reset(model, make_reducer=has_newcomers)
            except Exception as error:  # of one model: the others and the group are not to suffer
                notes.append(f"a model in DDP cannot go on, wrap it again: {type(error).__name__}: {error}")
        for module in _sharded_modules():
            _reset_sharded(module)
        if self._fsdp1:
            notes.append(
                "FullyShardedDataParallel cannot forget a step that was cut: wrap such models again on all ranks"
            )
        world.group_count = max(world.group_count, *(one["count"] for one in everybody))  # or names would differ
        if groups:
            default = dist.group.WORLD
            assert default is not None
            backend, _ = world.pg_map[default]
            world.pg_map[default] = (backend, PrefixStore(f"{_DEFAULT}/", store))
            for each in (client, store):
                each.set_timeout(timeout_of(default))
        self._recorder.reset_counts()
        return notes

    def _made(self) -> dict[str, Group]:
        """The groups of this process in the order in which they were made, which is that of their names."""
        names = distributed_c10d._world.pg_names
        groups = {name: self._recorder.group(group) for group, name in names.items() if group.size() > 0}
        return dict(sorted(groups.items(), key=lambda item: (not item[0].isdigit(), len(item[0]), item[0])))

    def _forget_old(self) -> None:
        twins = [group.twin for group in self._recorder.groups.values()]
        self._ended.append([*self._groups.values(), *twins])
        self._groups = {}
        self._own_ports.clear()
        self._peer_ports.clear()

    def _connect(
        self, group: Group, name: str, store: Any, forming: timedelta
    ) -> list[tuple[Group, ProcessGroup, Any]]:
        """What torch does for a new group, without registering it. Its keys in the store are torch's own, since a rank
        that joins by `init_process_group` is to meet the others there."""
        old = group.reference()
        assert old is not None
        config = distributed_c10d.Backend(dist.get_backend_config(old))
        by_device = distributed_c10d.BackendConfig(config).device_backend_map
        if not set(by_device.values()) <= {"gloo", "nccl"}:
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
            new._register_backend(
                torch.device(device), distributed_c10d.Backend.backend_type_map[backend], backends[backend]
            )
        first = "nccl" if "nccl" in backends else "gloo"
        new._set_default_backend(distributed_c10d.Backend.backend_type_map[first])
        if old.bound_device_id is not None:
            new.bound_device_id = old.bound_device_id
        new._set_group_name(distributed_c10d.GroupName(name))
        new._set_group_desc(old.group_desc)
        twin = make_twin(new, store, forming) if self.makes_twins and size > 1 and set(backends) == {"gloo"} else None
        if twin is not None:
            twin._set_default_timeout(timeout)
        return [(group, new, twin)]


def _remember(kind: type, name: str, models: Any) -> None:
    """Have a method of a kind of model put the model into a set."""
    original = getattr(kind, name)

    @functools.wraps(original)
    def remembered(model: Any, *args: Any, **kwargs: Any) -> None:
        original(model, *args, **kwargs)
        if name == "__setstate__":
            for hook, state in getattr(model, "_comm_hooks", ()):  # an unpickled model in DDP has lost them
                dist._register_comm_hook(model.reducer, state, hook)  # type: ignore[attr-defined]  # exported later
        models.add(model)

    setattr(kind, name, remembered)


def _is_gloo(group: ProcessGroup) -> bool:
    return "gloo" in str(dist.get_backend_config(group)) and "nccl" not in str(dist.get_backend_config(group))


def _reset(model: DistributedDataParallel, *, make_reducer: bool) -> None:
    """Let a model's reducer forget a backward that did not end, on all ranks alike.

    Where some rank is new its reducer is too, with buckets in their first order; in step with it are only reducers
    that are new as well (the old ones kept their order, and gradients were added to those of other parameters).
    """
    if getattr(model, "reducer", None) is None:
        return
    if not make_reducer:
        model._update_process_group(model.process_group)
    elif model.process_group is dist.group.WORLD:  # one of a group that holds a new rank has to be made again
        state = model.__getstate__()
        model._has_rebuilt_buckets = state["_has_rebuilt_buckets"] = False
        model.__setstate__(state)


def _sharded_modules() -> list[FSDPModule]:
    """All modules that `fully_shard` was called with: it makes a class of its own for each class of module."""
    classes = set(FSDPModule.__subclasses__())
    return [each for each in gc.get_objects() if type(each) in classes] if classes else []


def _reset_sharded(module: FSDPModule) -> None:
    """Let the root of an FSDP model forget a forward or backward that did not end.

    Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
    """
    with contextlib.suppress(AttributeError, RuntimeError):  # it has not run yet, or is not the root
        module.reset_iter_state()


def _nccl(store: Any, rank: int, size: int, timeout: timedelta, group: Group, name: str) -> Any:
    from torch._C._distributed_c10d import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.global_ranks_in_group = list(group.ranks)
    options.group_name = distributed_c10d.GroupName(name)
    return ProcessGroupNCCL(store, rank, size, options)


def _retired(group: Group, absent: list[int]) -> str:
    who = ",".join(map(str, absent))
    return (
        f"group {group.title} of ranks {','.join(map(str, group.ranks))} is not known on rank{'s' * (len(absent) > 1)} "
        f"{who} and cannot be used any more; make it again on all ranks: dist.new_group({list(group.ranks)})"
    )


def _connections() -> _Ports:
    return frozenset((found.port, found.peer_port) for found, _ in sockets.tcp_sockets() if not found.listens)
