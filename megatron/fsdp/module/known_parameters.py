# SPDX-License-Identifier: Apache-2.0
"""The parameters that were sharded, which code may neither add to nor remove from."""

from __future__ import annotations

from typing import Any

from torch import nn

from megatron.fsdp.engine.loops_in_c import are_same, concatenated


class KnownParameters:
    """The parameters that were sharded: ``root``, the wrapper, has no others afterwards."""

    # Otherwise what code adds would be used and never trained, and what it removes would still be
    # among `parameters()`. Other objects may come and go: buffers, and modules around the same
    # parameters (torch.compile).

    def __init__(self, root: nn.Module, names: dict[nn.Parameter, str]):
        self._root = root
        self._names = names
        # Of every module in `root` the parameters and the children, as live views, and all that was
        # in them at the last check.
        self._views: list[Any] = []
        self._seen: list[object] = []

    def check(self) -> None:
        """Raise ``RuntimeError`` if parameters have appeared or vanished since sharding."""
        if self._views and are_same(self._seen, concatenated(self._views)):
            return
        views: list[Any] = []
        names: dict[nn.Parameter, str] = {}
        for path, module in self._root.named_modules():
            # Read as plain dicts, which do not show the sharded parameters instead.
            views.append(dict.values(module._parameters))
            views.append(dict.values(module._modules))
            for name, parameter in dict.items(module._parameters):
                if parameter is None:
                    continue
                if not isinstance(parameter, nn.Parameter):
                    return  # torch.func.functional_call has put it there for one call
                names[parameter] = f"{path}.{name}".removeprefix("module.")
        new = [name for parameter, name in names.items() if parameter not in self._names]
        gone = [name for parameter, name in self._names.items() if parameter not in names]
        if new or gone:
            raise RuntimeError(
                "the model has other parameters than when it was sharded:"
                f" {len(new)} new ({', '.join(new[:5])}), {len(gone)} gone ({', '.join(gone[:5])})."
                " The optimizer knows only those that were sharded: replace layers, resize"
                " embeddings, and add adapters and parametrizations before fully_shard"
            )
        self._views = views
        self._seen = concatenated(views)
