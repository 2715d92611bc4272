# SPDX-License-Identifier: Apache-2.0
"""Names of modules and parameters without the parts that torch's wrappers add to them."""

from __future__ import annotations

import re
from types import SimpleNamespace

from torch import nn

# Attributes in which `checkpoint_wrapper` and `torch.compile` have the module that they wrap.
_WRAPPED = re.compile(r"\.?\b(?:_checkpoint_wrapped_module|_orig_mod)\b")


def own_name(name: str) -> str:
    """Return a name without the parts that recomputation and compilation of modules add."""
    return _WRAPPED.sub("", name).removeprefix(".")


def lead_by_own_names(root: nn.Module) -> None:
    """Let torch's functions on state dicts find compiled modules' entries by :func:`own_name`."""
    # `get_model_state_dict` expects `_orig_mod` in names, unless a module has modifiers of names,
    # as one with hooks on state dicts does: {part of a name: attribute that has this module}.
    for module in root.modules():
        inner = {}  # what is inside of compiled children
        for name, child in module._modules.items():
            if child is not None and "_orig_mod" in child._modules:
                inner[name] = child._orig_mod
        if inner or "_orig_mod" in module._modules:
            vars(module)["_fsdp_inner"] = SimpleNamespace(**inner)
            modifiers = dict.fromkeys(inner, "_fsdp_inner")
            modifiers[""] = "_orig_mod"
            vars(module)["_fqn_modifiers"] = modifiers.copy
