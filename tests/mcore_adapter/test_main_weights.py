# SPDX-License-Identifier: Apache-2.0
"""Optimizers of sharded models copy no main weights, also where Megatron-Core refuses to."""

from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.optimizer import DistributedOptimizer

from megatron.mcore_adapter import core_optimizers

METHOD = "_copy_model_params_to_main_params"


def refuse(optimizer: Any, state_dict: Any = None) -> None:
    """Do what Megatron-Core 0.18 and newer do for a model with --use-megatron-fsdp."""
    raise NotImplementedError(state_dict)


def test_only_optimizers_of_other_models_copy_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DistributedOptimizer, METHOD, refuse)
    monkeypatch.setattr(core_optimizers, "is_owned", lambda parameter: parameter == "sharded")
    monkeypatch.setattr(core_optimizers, "owner_of", id)
    core_optimizers.keep_main_weights.__wrapped__()  # although the process may have done it
    copy = getattr(DistributedOptimizer, METHOD)
    assert copy.__wrapped__ is refuse
    groups = [{"params": ["other"]}, {"params": ["other", "sharded"]}]
    copy(SimpleNamespace(param_groups=groups))
    for own in (groups[:1], []):
        with pytest.raises(NotImplementedError, match="weights"):
            copy(SimpleNamespace(param_groups=own), state_dict="weights")
