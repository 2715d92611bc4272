# SPDX-License-Identifier: Apache-2.0
"""The spelling of fsdp_dtensor keys: the wrappers in front of names."""

import itertools

import pytest

from megatron.checkpoint.core.spelling import choose_spelling, plain_name
from megatron.checkpoint.core.training_state import TrainingState
from megatron.checkpoint.fsdp_dtensor.keys import META_PREFIX, wrapper_prefix


@pytest.mark.parametrize("wrappers", ["", "module.", "module.module.", "module.module.module."])
def test_the_wrappers_of_a_file_are_found_in_its_keys(wrappers: str) -> None:
    names = ["decoder.final_layernorm.weight", "embedding.word_embeddings.weight"]
    fields = itertools.product(names, ("lr", "betas"))
    keys = [f"{META_PREFIX}{wrappers}{name}.{field}" for name, field in fields]
    assert (
        wrapper_prefix([*keys, "model.module.embedding.word_embeddings.weight"], names) == wrappers
    )


def test_a_name_that_ends_like_another_does_not_confuse_the_wrappers() -> None:
    names = ["weight", "head.weight"]
    keys = [f"{META_PREFIX}module.module.{name}.lr" for name in names]
    for order in (keys, keys[::-1]):
        assert wrapper_prefix(order, names) == "module.module."


def test_a_file_without_the_optimizer_says_nothing_about_wrappers() -> None:
    assert wrapper_prefix(["model.module.head.weight", "iteration"], ["head.weight"]) is None
    assert wrapper_prefix([f"{META_PREFIX}module.other.weight.lr"], ["head.weight"]) is None


@pytest.mark.parametrize("wrappers", ["", "module.", "module.module.module."])
def test_plain_names_have_no_wrappers(wrappers: str) -> None:
    assert plain_name(f"{wrappers}decoder.module.weight") == "decoder.module.weight"


@pytest.mark.parametrize("order", [1, -1], ids=["grouped first", "apart first"])
def test_experts_are_apart_if_any_layer_has_them_so(order: int) -> None:
    stem = "layers.0.mlp.experts"
    names = {
        f"decoder.{stem}.local_experts.3.linear_fc1.weight": f"decoder.{stem}.linear_fc1.weight3",
        f"mtp.{stem}.local_experts.3.linear_fc1.weight": (
            f"mtp.{stem}.local_experts.3.linear_fc1.weight"
        ),
    }
    state = TrainingState({}, module_names=dict([*names.items()][::order]))
    assert not choose_spelling(state, "transformer_engine").grouped_experts
