# SPDX-License-Identifier: Apache-2.0
"""The spelling of fsdp_dtensor keys: gated weights and the wrappers in front of names."""

import itertools

import pytest

from megatron.checkpoint.core.key_rules import entry_names, is_gated
from megatron.checkpoint.core.spelling import plain_name
from megatron.checkpoint.fsdp_dtensor.keys import META_PREFIX, wrapper_prefix

GATED = [
    "decoder.layers.0.mlp.linear_fc1.weight",
    "decoder.layers.0.mlp.linear_fc1.bias",
    "decoder.layers.11.mlp.shared_experts.linear_fc1.weight",
    "decoder.layers.2.mlp.experts.local_experts.13.linear_fc1.weight",
    "decoder.layers.2.mlp.experts.local_experts.0.linear_fc1.bias",
    "decoder.layers.2.mlp.experts.linear_fc1.weight7",
    "decoder.layers.2.mlp.experts.linear_fc1.bias12",
]

WHOLE = [
    "decoder.layers.0.mlp.linear_fc2.weight",
    "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
    "decoder.layers.2.mlp.experts.linear_fc2.weight7",
    "decoder.layers.2.mlp.router.weight",
    "decoder.layers.0.self_attention.linear_qkv.weight",
    "embedding.word_embeddings.weight",
]


@pytest.mark.parametrize("name", GATED)
def test_gated_weights_are_two_entries(name: str) -> None:
    assert is_gated(name, gated_linear_unit=True)
    assert entry_names(name, gated_linear_unit=True) == [f"{name}_w", f"{name}_v"]


@pytest.mark.parametrize("name", GATED)
def test_without_a_gated_mlp_they_are_one(name: str) -> None:
    assert not is_gated(name, gated_linear_unit=False)
    assert entry_names(name, gated_linear_unit=False) == [name]


@pytest.mark.parametrize("name", WHOLE)
def test_other_weights_are_one_entry(name: str) -> None:
    assert entry_names(name, gated_linear_unit=True) == [name]


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
