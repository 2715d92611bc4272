# SPDX-License-Identifier: Apache-2.0
"""The table of key rules: every spelling leads to the canonical name and back.

Shapes are those of Megatron-Core's models.
"""

import argparse
import itertools
from typing import Any

import pytest

from megatron.checkpoint.core import key_rules
from megatron.checkpoint.core.key_rules import _SIZES, MODEL, expected_shape, rule_of
from megatron.checkpoint.core.spelling import (
    INNER_LAYER,
    OTHER_INNER_LAYER,
    Spelling,
    canonical_name,
    layer_kinds,
    unstacked,
)
from tests.support.checkpoint import samples, small_models

LATENT = [
    f"decoder.layers.0.{rest}.weight"
    for rest in (
        "input_layernorm",
        "self_attention.linear_proj",
        "self_attention.linear_q_down_proj",
        "self_attention.linear_q_up_proj",
        "self_attention.linear_kv_down_proj",
        "self_attention.linear_kv_up_proj",
        "self_attention.q_layernorm",
        "self_attention.kv_layernorm",
        "pre_mlp_layernorm",
        "mlp.linear_fc1",
        "mlp.linear_fc2",
    )
]

MODELS = {
    "dense": list(small_models.shapes_of()),
    "biases": list(small_models.shapes_of(["gelu", "gelu"])),
    "experts": list(small_models.shapes_of(["experts", "experts"])),
    "mixed": list(small_models.shapes_of(["gated", "experts"])),
    "predicting": list(small_models.shapes_of(predicting=True)),
    "predicting with experts": list(
        small_models.shapes_of(["experts", "experts"], predicting=True)
    ),
    "latent": LATENT,
    "latent with experts": (
        [*LATENT[:-2], *small_models.layer("decoder.layers.0.", "experts")][: len(LATENT) - 2]
        + [name for name in small_models.layer("decoder.layers.0.", "experts") if ".mlp." in name]
    ),
}


def spelling(
    names: list[str],
    engine: bool,
    grouped: bool,
    stacked: bool = False,
    inner: str = INNER_LAYER,
) -> Spelling:
    return Spelling(
        transformer_engine=engine,
        grouped_experts=grouped,
        stacked=stacked,
        layers=layer_kinds(names),
        inner_layer=inner,
    )


@pytest.mark.parametrize("inner", [INNER_LAYER, OTHER_INNER_LAYER])
@pytest.mark.parametrize("grouped", [True, False], ids=["grouped", "sequential"])
@pytest.mark.parametrize("engine", [True, False], ids=["engine", "local"])
@pytest.mark.parametrize("model", MODELS)
def test_every_spelling_leads_back_to_the_canonical_name(
    model: str, engine: bool, grouped: bool, inner: str
) -> None:
    names = MODELS[model]
    rules = spelling(names, engine, grouped, inner=inner)
    spelled = [rules.module_name(name) for name in names]
    assert len(set(spelled)) == len(names)
    assert [canonical_name(name) for name in spelled] == names
    assert [canonical_name(f"module.module.{name}") for name in spelled] == names


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "apart"])
@pytest.mark.parametrize("engine", [True, False], ids=["engine", "local"])
@pytest.mark.parametrize("model", MODELS)
def test_every_place_in_a_torch_dist_file_leads_back(
    model: str, engine: bool, stacked: bool
) -> None:
    names = MODELS[model]
    rules = spelling(names, engine, grouped=False, stacked=stacked and model != "mixed")
    places = {name: rules.stacked_key(name) for name in names}
    assert len(set(places.values())) == len(names)
    shapes: dict[str, tuple[int, ...]] = {}
    for key, index in places.values():
        shapes[key] = tuple(
            max(pair)
            for pair in itertools.zip_longest(
                shapes.get(key, ()), (at + 1 for at in index), fillvalue=0
            )
        )
    found = {}
    for key, shape in shapes.items():
        found |= {name: (key, index) for name, index in unstacked(key, shape)}
    assert found == places


@pytest.mark.parametrize(
    ("model", "engine", "name", "expected"),
    [
        ("dense", False, "input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
        ("dense", True, "input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
        ("dense", False, "pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
        ("experts", False, "pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
        ("experts", True, "pre_mlp_layernorm.weight", "pre_mlp_layernorm.weight"),
        ("latent", False, "input_layernorm.weight", "input_layernorm.weight"),
        ("latent", False, "pre_mlp_layernorm.weight", "pre_mlp_layernorm.weight"),
        ("latent", True, "input_layernorm.weight", "input_layernorm.weight"),
        ("latent", True, "pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
    ],
)
def test_norms_are_called_in_files_as_megatron_core_calls_them(
    model: str, engine: bool, name: str, expected: str
) -> None:
    rules = spelling(MODELS[model], engine, grouped=False, stacked=True)
    assert rules.stacked_key(f"decoder.layers.0.{name}") == (f"decoder.layers.{expected}", (0,))


@pytest.mark.parametrize(
    ("key", "shape", "expected"),
    [
        (
            "decoder.layers.mlp.linear_fc2.weight",
            (2, 4, 4),
            [
                ("decoder.layers.0.mlp.linear_fc2.weight", (0,)),
                ("decoder.layers.1.mlp.linear_fc2.weight", (1,)),
            ],
        ),
        (
            "decoder.layers.3.mlp.linear_fc2.weight",
            (4, 4),
            [("decoder.layers.3.mlp.linear_fc2.weight", ())],
        ),
        (
            "decoder.layers.mlp.experts.experts.linear_fc1.weight",
            (1, 2, 4, 4),
            [
                (
                    f"decoder.layers.0.mlp.experts.local_experts.{expert}.linear_fc1.weight",
                    (0, expert),
                )
                for expert in (0, 1)
            ],
        ),
        (
            "mtp.layers.0.mtp_model_layer.mlp.experts.experts.linear_fc2.bias",
            (2, 4),
            [
                (
                    f"mtp.layers.0.transformer_layer.mlp.experts.local_experts.{expert}.linear_fc2.bias",
                    (expert,),
                )
                for expert in (0, 1)
            ],
        ),
        ("output_layer.weight", (4, 4), [("output_layer.weight", ())]),
    ],
)
def test_keys_are_taken_apart(key: str, shape: tuple[int, ...], expected: list[Any]) -> None:
    assert list(unstacked(key, shape)) == expected


@pytest.mark.parametrize(
    ("module", "shape"), [("linear_fc2", ()), ("experts.experts.linear_fc1", (3,))]
)
def test_a_key_without_its_axes_is_an_error(module: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="axis of layers or experts"):
        list(unstacked(f"decoder.layers.mlp.{module}.weight", shape))


def test_every_row_is_found_by_its_own_names_and_no_other() -> None:
    names = set()
    for prefix, rows in key_rules.MODEL:
        for row in rows:
            for leaf in row.leaves:
                name = f"{prefix}{row.module}.{leaf}".format(number=12, expert=345)
                assert rule_of(name) is row
                assert canonical_name(name) == name
                names.add(name)
    assert len(names) > 80
    for name in (
        "decoder.layers.0.mlp.linear_fc3.weight",
        "decoder.layers.x.mlp.linear_fc1.weight",
        "output_layer.weights",
        "xoutput_layer.weight",
        "decoder.layers.0.mlp.router.bias2",
        "decoder.layers.0.mlp.experts.linear_fc1.weight",
    ):
        assert rule_of(name) is None, name


def test_names_are_ordered_as_modules_register_them() -> None:
    names = list(small_models.shapes_of(["experts", "gated"], predicting=True))
    ordered = sorted(names, key=key_rules.registration_order)
    position = {name: number for number, name in enumerate(ordered)}
    assert ordered[0] == "embedding.word_embeddings.weight" and ordered[-1] == "output_layer.weight"
    layer, experts = "decoder.layers.1", "decoder.layers.0.mlp.experts.local_experts"
    chosen = [
        f"{experts}.0.linear_fc1.weight",
        f"{experts}.0.linear_fc2.weight",
        f"{experts}.1.linear_fc1.weight",
        f"{experts}.1.linear_fc2.weight",
        f"{layer}.input_layernorm.weight",
        f"{layer}.self_attention.linear_proj.weight",
        f"{layer}.self_attention.linear_qkv.weight",
        f"{layer}.mlp.linear_fc2.weight",
        "decoder.final_layernorm.weight",
        "mtp.layers.0.enorm.weight",
        "mtp.layers.0.transformer_layer.mlp.router.weight",
        "mtp.layers.0.final_layernorm.weight",
    ]
    assert sorted(chosen, key=position.__getitem__) == chosen
    others = [f"decoder.layers.{number}.mlp.linear_fc1.weight" for number in (2, 10)]
    others += ["output_layer.weight", "strange"]
    assert sorted(others, key=key_rules.registration_order) == others


def test_other_parameters_of_a_fused_norm_come_before_those_of_its_linear_layer() -> None:
    layer = "decoder.layers.0"
    norm = f"{layer}.input_layernorm"
    linear = f"{layer}.self_attention.linear_qkv"
    names = [f"{norm}.weight", f"{norm}.scale", f"{linear}.weight", f"{linear}.bias"]
    engine = spelling(names, engine=True, grouped=False)

    def order(name: str) -> tuple[Any, ...]:
        return key_rules.registration_order(name, engine)

    mixed = [*names[2:], *names[:2]]
    assert sorted(mixed, key=order) == names


@pytest.mark.parametrize(
    ("name", "dim", "gated"),
    [
        ("decoder.layers.0.mlp.linear_fc1.weight", 0, True),
        ("decoder.layers.0.mlp.linear_fc1.bias", 0, True),
        ("decoder.layers.0.mlp.linear_fc2.weight", 1, False),
        ("decoder.layers.0.mlp.linear_fc2.bias", None, False),
        ("decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight", 0, True),
        ("decoder.layers.2.mlp.experts.local_experts.0.linear_fc1.bias", 0, True),
        ("decoder.layers.11.mlp.shared_experts.linear_fc1.weight", 0, True),
        ("mtp.layers.0.transformer_layer.mlp.linear_fc1.weight", 0, True),
        ("mtp.layers.0.eh_proj.weight", 0, False),
        ("decoder.layers.0.mlp.router.weight", None, False),
        ("decoder.layers.0.mlp.router.expert_bias", None, False),
        ("embedding.word_embeddings.weight", 0, False),
        ("strange.weight", None, False),
    ],
)
def test_facts_about_parameters(name: str, dim: int | None, gated: bool) -> None:
    assert key_rules.split_dim(name) == dim
    assert key_rules.is_gated(name) == gated and not key_rules.is_gated(name, False)
    assert key_rules.entry_names(name, True) == ([f"{name}_w", f"{name}_v"] if gated else [name])
    assert key_rules.entry_names(name, False) == [name]
    assert key_rules.is_buffer(name) == name.endswith("expert_bias")


@pytest.mark.parametrize("sample", [samples.DENSE, samples.EXPERTS, "dense_gelu_tied_fp32_dp2"])
def test_shapes_follow_from_the_arguments(sample: str) -> None:
    from megatron.checkpoint.commands.formats import open_checkpoint

    path = samples.torch_dist(sample)
    sizes = open_checkpoint(path).state().args
    for name, tensor in samples.expected(path)["param"].items():
        assert expected_shape(name, sizes) == tuple(tensor.shape), name


def test_sizes_that_the_arguments_do_not_say_are_none() -> None:
    sizes = argparse.Namespace(hidden_size=4)
    assert expected_shape("output_layer.weight", sizes) == (None, 4)
    types = "embedding.tokentype_embeddings.weight"
    assert expected_shape(types, sizes) == (None, 4)
    assert expected_shape(types, argparse.Namespace(hidden_size=8, num_tokentypes=2)) == (2, 8)
    without_width = argparse.Namespace(swiglu=True, ffn_hidden_size=None)
    assert expected_shape("decoder.layers.0.mlp.linear_fc1.weight", without_width) == (None, None)
    assert expected_shape("strange", argparse.Namespace()) is None


@pytest.mark.parametrize("number", [7, 12])
def test_grouped_experts_are_gated_by_their_numbers(number: int) -> None:
    module = "decoder.layers.2.mlp.experts"
    for name in (f"{module}.linear_fc1.weight{number}", f"{module}.linear_fc1.bias{number}"):
        assert key_rules.entry_names(name, True) == [f"{name}_w", f"{name}_v"]
    for name in (f"{module}.linear_fc2.weight{number}", "mlp.linear_fc1.layer_norm_weight"):
        assert key_rules.entry_names(name, True) == [name]


def test_every_dim_of_every_rule_has_a_size() -> None:
    dims = set()
    for _, rules in MODEL:
        dims.update(*(rule.dims for rule in rules))
    assert dims and dims <= set(_SIZES)
