# SPDX-License-Identifier: Apache-2.0
"""Tests of the shapes that parameters should have."""

from argparse import Namespace

from megatron.checkpoint.core.key_rules import MODEL
from megatron.checkpoint.core.parameter_shapes import _SIZES, Sizes, expected_shape


def test_every_dim_of_every_rule_has_a_size() -> None:
    dims = set()
    for _, rules in MODEL:
        dims.update(*(rule.dims for rule in rules))
    assert dims and dims <= set(_SIZES)


def test_a_size_that_the_arguments_lack_is_none() -> None:
    sizes = Sizes(Namespace(hidden_size=8))
    name = "embedding.tokentype_embeddings.weight"
    assert expected_shape(name, sizes) == (None, 8)
    assert expected_shape(name, Sizes(Namespace(hidden_size=8, num_tokentypes=2))) == (2, 8)
