# SPDX-License-Identifier: Apache-2.0
"""Assignment of parameters to the optimizer's groups."""

from pathlib import Path

import pytest

from megatron.checkpoint.core import param_groups
from megatron.checkpoint.core.param_groups import EXPERT_FIELD
from tests.support.checkpoint import small_models
from tests.support.checkpoint.changed_checkpoints import TENSOR, change_common
from tests.support.checkpoint.command_runs import TO_FSDP, run_json
from tests.support.checkpoint.small_models import shapes_of, state_of

USUAL = {
    **small_models.GROUP,
    "is_decoupled_lr": False,
    "default_config": True,
    "max_lr": 1e-3,
    "min_lr": 1e-5,
}

OWN_RATE = {**USUAL, "default_config": False, "max_lr": 7e-3, "min_lr": 1e-4}


def test_embedding_and_output_layer_have_the_rates_that_a_run_has_decoupled(tmp_path: Path) -> None:
    path = small_models.write(state_of(shapes_of()), tmp_path / "in")
    kinds = ((USUAL, 1.0), (OWN_RATE, 1.0), (USUAL, 0.0))
    groups = [{**fields, "wd_mult": multiplier, "step": 3.0} for fields, multiplier in kinds]
    change_common(path, lambda common: common["optimizer"]["optimizer"].update(param_groups=groups))
    run_json(TO_FSDP, path, tmp_path / "out")
    rates: dict[str, float] = {}
    for group in small_models.read(tmp_path / "out").groups:
        rates |= dict.fromkeys(group.names, group.fields["max_lr"])
    own = [name for name, rate in rates.items() if rate == OWN_RATE["max_lr"]]
    assert sorted(own) == ["embedding.word_embeddings.weight", "output_layer.weight"]
    assert set(rates) == set(shapes_of())


def test_a_parameter_that_fits_two_different_groups_is_an_error() -> None:
    groups = [{**USUAL, "wd_mult": 1.0, "lr_mult": multiplier} for multiplier in (1.0, 0.1)]
    with pytest.raises(ValueError, match=r"linear_fc2.weight: groups 0, 1 fit, and they differ"):
        param_groups.assign({TENSOR: (8, 12)}, groups)
    first, second = param_groups.assign({TENSOR: (8, 12)}, groups, numbers={TENSOR: 1})
    assert (first.names, second.names) == ([], [TENSOR])


@pytest.mark.parametrize("apart", [False, True], ids=["alike else", "experts apart"])
def test_a_bias_is_in_no_group_of_weights_that_decay_less_than_others(apart: bool) -> None:
    groups = [{**USUAL, "wd_mult": 1.0}, {**USUAL, "wd_mult": 0.5, EXPERT_FIELD: apart}]
    with pytest.raises(ValueError, match=r"final_layernorm.weight: none fits"):
        param_groups.assign({"decoder.final_layernorm.weight": (8,)}, groups)


def test_matrices_without_a_second_moment_are_in_the_group_of_muon() -> None:
    muon = {**USUAL, "wd_mult": 1.0, "momentum": 0.95}
    muon.pop("betas")
    adam = [{**USUAL, "wd_mult": multiplier} for multiplier in (1.0, 0.0)]
    matrices, table = (TENSOR,), "embedding.word_embeddings.weight"
    norm = "decoder.final_layernorm.weight"
    shapes = {TENSOR: (8, 12), table: (16, 8), norm: (8,)}
    result = param_groups.assign(shapes, [muon, *adam], momentum_only=matrices)
    assert [group.names for group in result] == [[TENSOR], [table], [norm]]
    assert param_groups.has_muon(group.fields for group in result)
    assert not param_groups.has_muon(adam)


@pytest.mark.parametrize("decays", [True, False], ids=["with the flag", "without"])
@pytest.mark.parametrize("end", ["weight", "bias"])
@pytest.mark.parametrize("norm", ["q_layernorm", "k_layernorm"])
def test_norms_of_query_and_key_decay_if_the_run_says_so(norm: str, end: str, decays: bool) -> None:
    name = f"decoder.layers.0.self_attention.{norm}.{end}"
    groups = [{**USUAL, "wd_mult": multiplier} for multiplier in (1.0, 0.0)]
    result = param_groups.assign({name: (4,)}, groups, decay_query_key_norms=decays)
    assert [group.fields["wd_mult"] for group in result if group.names] == [1.0 if decays else 0.0]
