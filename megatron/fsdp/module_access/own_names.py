# SPDX-License-Identifier: Apache-2.0
"""Names of modules and parameters without the parts that torch's wrappers add to them."""

from __future__ import annotations

import re
from functools import partial
from types import SimpleNamespace

from torch import nn

# Attributes in which `checkpoint_wrapper` and `torch.compile` have the module that they wrap.
_COMPILED = "_orig_mod"
_WRAPPED = re.compile(rf"\.?\b(?:_checkpoint_wrapped_module|{_COMPILED})\b")
_INSIDE = "_fsdp_uncompiled"


def own_name(name: str) -> str:
    """Return a name as it is without recomputation and compilation of modules around it."""
    return _WRAPPED.sub("", name).removeprefix(".")


def lead_by_own_names(root: nn.Module) -> None:
    """Let torch's functions on state dicts find what compiled modules own by :func:`own_name`."""
    # Otherwise `get_model_state_dict` expects `_orig_mod` in names. It asks every module for names
    # that hooks change: {part of a name: attribute that has the module of this name}.
    for module in list(root.modules()):
        compiled = {
            name: child._modules[_COMPILED]
            for name, child in module._modules.items()
            if child is not None and _COMPILED in child._modules
        }
        inside = dict.fromkeys(compiled, _INSIDE)
        if _COMPILED in module._modules:
            inside[""] = _COMPILED
        if inside:
            vars(module)["_fqn_modifiers"] = partial(dict, inside)
            vars(module)[_INSIDE] = SimpleNamespace(**compiled)
