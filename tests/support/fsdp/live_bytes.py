# SPDX-License-Identifier: Apache-2.0
"""A tracker of the memory that tensors have."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """The bytes of all storages that operations have touched, counted after every operation."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, StorageWeakRef] = {}
        self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if type(leaf) in (Tensor, nn.Parameter) and leaf.device.type == "cpu":
                storage = leaf.untyped_storage()
                self._seen.setdefault(storage._cdata, StorageWeakRef(storage))
        self.peak = max(self.peak, self.now())
        return result

    def now(self) -> int:
        total = 0
        for key, reference in list(self._seen.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._seen[key]
            else:
                total += storage.nbytes()
        return total
