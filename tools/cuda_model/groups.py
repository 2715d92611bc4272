# SPDX-License-Identifier: Apache-2.0
"""Process groups as programs for NCCL make them: backends, a bound device, priorities.

The rules are those of `torch.distributed` and of `ProcessGroupNCCL`:

- With a backend for the host too ("cpu:gloo,cuda:nccl") object collectives use gloo.
- A group has a communicator from its first collective on: the ranks make it together, at the first
  messages of one launch too, whoever sends them. A message alone makes one for its two ranks.
- With a device bound to the group of all ranks (``device_id``), groups have a communicator from the
  start. It is split from that of all ranks, which is a collective of them: ranks outside of the
  group join it in `new_group`, unless it has ``use_local_synchronization``.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import ProcessGroup

from tools.cuda_model.detector import Detector

INIT = inspect.signature(dist.init_process_group)
NEW_GROUP = inspect.signature(dist.new_group)
"""As torch has them: other replacements take any arguments."""
OBJECT_COLLECTIVES = (
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
)


class NcclOptions:
    """Settings of a group, as `ProcessGroupNCCL.Options` has them."""

    def __init__(self, is_high_priority_stream: bool = False):
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace()


class Groups:
    """The groups of a program, by name.

    Args:
        detector: the model's.
        backend: of the group of all ranks: "nccl", or "cpu:gloo,cuda:nccl".
    """

    def __init__(self, detector: Detector, backend: str = "nccl"):
        self._launches = detector.launches
        self._names_cuda = detector.blocks.has_host
        self.has_gloo = "gloo" in backend
        self._on_host: set[str] = set()  # made with the backend "gloo"
        self._options: dict[str, NcclOptions] = {}
        self._eager: set[str] = set()  # made with a bound device
        self._calls = threading.local()

    # ---- what a group is

    def is_of_host(self, group: ProcessGroup) -> bool:
        """Return True if gloo runs what the group is asked for now."""
        if group.group_name in self._on_host:
            return True
        return self.has_gloo and self.has_objects()

    def has_objects(self) -> bool:
        """Return True inside an object collective."""
        return getattr(self._calls, "has_objects", False)

    def is_eager(self, group: ProcessGroup) -> bool:
        """Return True if the group had its communicator from the start."""
        is_world = group is distributed_c10d._get_default_group()
        return group.group_name in self._eager or (is_world and _bound_device() is not None)

    def options(self, group: ProcessGroup) -> NcclOptions:
        """Return NCCL's settings of a group."""
        return self._options.setdefault(group.group_name, NcclOptions())

    # ---- functions

    def replacements(self) -> dict[str, Callable[..., Any]]:
        """Return what takes the place of functions of `torch.distributed`."""
        made = {name: self._of_objects(getattr(dist, name)) for name in OBJECT_COLLECTIVES}
        return {
            **made,
            "init_process_group": self._initialised(dist.init_process_group),
            "new_group": self._made(dist.new_group),
            "split_group": self._split,
            "_get_object_coll_device": self._device_of_objects(
                distributed_c10d._get_object_coll_device
            ),
        }

    def _device_of_objects(self, function: Callable[..., str]) -> Callable[..., str]:
        def device_of_objects(group: ProcessGroup | None = None) -> str:
            if self._names_cuda and not (self.has_gloo or self.has_objects()):
                return "cuda"
            return function(group)

        return device_of_objects

    def _of_objects(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            before, self._calls.has_objects = self.has_objects(), True
            try:
                return function(*args, **kwargs)
            finally:
                self._calls.has_objects = before

        return call

    def _initialised(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def init_process_group(*args: Any, **kwargs: Any) -> None:
            given = INIT.bind(*args, **kwargs).arguments
            self.has_gloo = "gloo" in str(given.get("backend") or "cpu:gloo,cuda:nccl")
            device = given.pop("device_id", None)
            function(**given)
            if device is not None:
                distributed_c10d._get_default_group().bound_device_id = device

        return init_process_group

    def _made(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def new_group(*args: Any, **kwargs: Any) -> Any:
            given = NEW_GROUP.bind(*args, **kwargs).arguments
            options, backend = given.pop("pg_options", None), str(given.get("backend") or "nccl")
            is_of_host = "nccl" not in backend
            is_bound = _bound_device() is not None and not is_of_host
            world = range(dist.get_world_size())
            ranks = given.get("ranks") or world
            is_member = dist.get_rank() in ranks
            if is_bound and (is_member or not given.get("use_local_synchronization")):
                self._splits()
            with _unbound():
                group = function(**given)
            if is_member:
                if is_of_host:
                    self._on_host.add(group.group_name)
                if is_bound:
                    self._eager.add(group.group_name)
                    self._launches.connected.add(group.group_name)
                if options is not None:
                    self._options[group.group_name] = options
            return group

        return new_group

    def _split(
        self,
        parent_pg: ProcessGroup | None = None,
        split_ranks: Sequence[Sequence[int]] = (),
        timeout: Any = None,
        pg_options: Any = None,
        group_desc: str | None = None,
        backend: str | None = None,
    ) -> Any:
        """Do what `split_group` does, for a split of the group of all ranks."""
        self._splits()
        own = None
        with _unbound():
            for ranks in split_ranks:
                group = distributed_c10d.new_group(list(ranks), timeout, group_desc=group_desc)
                if dist.get_rank() in ranks:
                    own = group
        if own is not None:
            self._eager.add(own.group_name)
            self._launches.connected.add(own.group_name)
            self._options[own.group_name] = pg_options or NcclOptions()
        return own

    def _splits(self) -> None:
        name = distributed_c10d._get_default_group().group_name
        self._launches.calls[name].append("ncclCommSplit()")
        self._launches.on_host(name, range(dist.get_world_size()), "ncclCommSplit")


def _bound_device() -> Any:
    return distributed_c10d._get_default_group().bound_device_id


@contextmanager
def _unbound() -> Iterator[None]:
    """Let gloo, which would split in its own way, know of no device."""
    world = distributed_c10d._get_default_group()
    device, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = device
