# SPDX-License-Identifier: Apache-2.0
"""Models of every kind of layer train, have Megatron-Core's names, and ignore the layout."""

from argparse import Namespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import nn

from megatron.checkpoint.core.key_rules import split_dim
from megatron.checkpoint.core.spelling import canonical_name
from megatron.fsdp.dtensor.tensor_part import get_mcore_tensor_parallel_partition_dim
from megatron.mcore_adapter import cpu
from megatron.mcore_adapter.core_initialiser import MegatronCoreInitialiser
from megatron.mcore_adapter.releases.process_groups import batch_on_this_rank
from megatron.pretrain.model import layer_specs
from megatron.pretrain.model.layer_specs import layer_spec, mtp_block_spec
from tests.support.model_parallel import ONE_AXIS, initialize
from tests.support.rank_pool import run_ranks

LENGTH = 16
INNER_LAYERS = ("mtp_model_layer", "transformer_layer")
"""Names of the layer inside a multi-token prediction layer, from Megatron-Core 0.17 and before."""
SIZES: dict[str, Any] = dict(
    transformer_impl="local",
    num_layers=2,
    hidden_size=16,
    num_attention_heads=4,
    use_cpu_initialization=True,
    attention_dropout=0.0,
    hidden_dropout=0.0,
    add_bias_linear=False,
    bias_dropout_fusion=False,
    init_method_std=0.2,
    calculate_per_token_loss=True,
)
EXPERTS: dict[str, Any] = dict(
    num_moe_experts=2,
    moe_layer_freq=[0, 1],
    moe_ffn_hidden_size=8,
    moe_shared_expert_intermediate_size=8,
    moe_token_dispatcher_type="alltoall",
    moe_router_load_balancing_type="none",
    moe_router_topk=1,
    moe_router_pre_softmax=True,
)
LATENT: dict[str, Any] = dict(
    multi_latent_attention=True,
    q_lora_rank=8,
    kv_lora_rank=6,
    qk_head_dim=6,
    qk_pos_emb_head_dim=4,
    v_head_dim=5,
    rope_type="rope",
    qk_layernorm=True,
    normalization="RMSNorm",
)
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "grouped_queries": dict(num_query_groups=2, qk_layernorm=True, normalization="RMSNorm"),
    "experts": EXPERTS,
    "latent": LATENT,
    "latent_experts_yarn": LATENT | EXPERTS | dict(rope_type="yarn", q_lora_rank=None),
    "prediction": dict(mtp_num_layers=1),
    "everything": LATENT | EXPERTS | dict(mtp_num_layers=1),
}
OF_A_LAYER = {
    "dense": (
        "input_layernorm.weight input_layernorm.bias self_attention.linear_proj.weight"
        " self_attention.linear_qkv.weight pre_mlp_layernorm.weight pre_mlp_layernorm.bias"
        " mlp.linear_fc1.weight mlp.linear_fc2.weight"
    ),
    "latent": (
        "input_layernorm.weight self_attention.linear_proj.weight"
        " self_attention.linear_q_down_proj.weight self_attention.linear_q_up_proj.weight"
        " self_attention.linear_kv_down_proj.weight self_attention.linear_kv_up_proj.weight"
        " self_attention.q_layernorm.weight self_attention.kv_layernorm.weight"
        " pre_mlp_layernorm.weight mlp.linear_fc1.weight mlp.linear_fc2.weight"
    ),
    "experts": (
        "input_layernorm.weight input_layernorm.bias self_attention.linear_proj.weight"
        " self_attention.linear_qkv.weight pre_mlp_layernorm.weight pre_mlp_layernorm.bias"
        " mlp.router.weight mlp.experts.local_experts.0.linear_fc1.weight"
        " mlp.experts.local_experts.0.linear_fc2.weight"
        " mlp.experts.local_experts.1.linear_fc1.weight"
        " mlp.experts.local_experts.1.linear_fc2.weight mlp.shared_experts.linear_fc1.weight"
        " mlp.shared_experts.linear_fc2.weight"
    ),
}
"""Parameters of the last layer."""
PREDICTING = {"enorm.weight", "enorm.bias", "hnorm.weight", "hnorm.bias", "eh_proj.weight"} | {
    "final_layernorm.weight",
    "final_layernorm.bias",
    *(f"transformer_layer.{name}" for name in OF_A_LAYER["dense"].split()),
}


def config(kind: str, **overrides: Any) -> TransformerConfig:
    values = SIZES | MODELS[kind] | overrides
    return (MLATransformerConfig if "multi_latent_attention" in values else TransformerConfig)(
        **values
    )


def start(**layout: int) -> None:
    """Process groups for a layout, and the random numbers of its ranks."""
    cpu.install()
    initialize(Namespace(**vars(ONE_AXIS) | layout))
    torch.manual_seed(5)
    model_parallel_cuda_manual_seed(5, force_reset_rng=True)


def build(settings: TransformerConfig) -> GPTModel:
    spec = layer_spec(settings)
    return GPTModel(
        settings,
        spec,
        vocab_size=64,
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
        mtp_block_spec=mtp_block_spec(settings, spec),
    )


def losses(model: nn.Module, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Of each token that this rank has; the mask weights those of multi-token prediction alone."""
    tokens = torch.randint(64, (2, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(LENGTH).expand(2, LENGTH).contiguous()
    batch = {
        "tokens": tokens[:, :-1].contiguous(),
        "labels": tokens[:, 1:].contiguous(),
        "positions": positions,
    }
    batch = batch_on_this_rank(batch)
    return model(batch["tokens"], batch["positions"], None, labels=batch["labels"], loss_mask=mask)


def train_each() -> dict[str, list[str]]:
    """Job: run every kind of model forward and backward; return names of trained parameters."""
    names = {}
    for kind in MODELS:
        start()
        model = build(config(kind))
        losses(model).sum().backward()
        names[kind] = [
            canonical_name(name)
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        ]
        assert len(names[kind]) == len(list(model.parameters())), kind
        for name, parameter in model.named_parameters():
            # Rules say what Transformer Engine's layers do, which have whole ones on each rank.
            if "_down_proj" not in name:
                divided = get_mcore_tensor_parallel_partition_dim(parameter)
                assert split_dim(canonical_name(name)) == divided, (kind, name)
    return names


def without_prefix(names: list[str], prefix: str) -> set[str]:
    return {name.removeprefix(prefix) for name in names if name.startswith(prefix)}


def test_every_kind_of_model_trains_under_megatron_cores_names() -> None:
    (names,) = run_ranks(1, train_each)
    for kind, of_a_layer in OF_A_LAYER.items():
        assert without_prefix(names[kind], "decoder.layers.1.") == set(of_a_layer.split())
    for kind in ("experts", "latent_experts_yarn"):
        assert (
            "decoder.layers.0.mlp.linear_fc1.weight" in names[kind]
        )  # dense, as moe_layer_freq says
    assert without_prefix(names["prediction"], "mtp.layers.0.") == PREDICTING
    assert {
        "self_attention.q_layernorm.weight",
        "self_attention.k_layernorm.weight",
    } <= without_prefix(names["grouped_queries"], "decoder.layers.0.")


def gradients(
    settings: TransformerConfig, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the sum of losses and whole gradients, combined as at the end of a training step."""
    model = build(settings)
    loss = losses(model, mask).sum()
    loss.backward()
    tensor_group = parallel_state.get_tensor_model_parallel_group()
    context_group = parallel_state.get_context_parallel_group()
    total = loss.detach().clone()
    dist.all_reduce(total, group=context_group)
    whole = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad.clone()
        dist.all_reduce(gradient, group=context_group)
        if getattr(parameter, "average_gradients_across_tp_domain", False):
            dist.all_reduce(gradient, op=dist.ReduceOp.AVG, group=tensor_group)
        elif is_summed(settings, name, parameter):
            dist.all_reduce(gradient, group=tensor_group)
        if getattr(parameter, "tensor_model_parallel", False) or "local_experts" in name:
            parts = [torch.empty_like(gradient) for _ in range(tensor_group.size())]
            dist.all_gather(parts, gradient.contiguous(), group=tensor_group)
            gradient = torch.cat(parts, dim=parameter.partition_dim)
        whole[name] = gradient
    return total, whole


def is_summed(settings: TransformerConfig, name: str, parameter: nn.Parameter) -> bool:
    """Return whether Megatron-Core's finalize_model_grads sums the gradient over tensor ranks."""
    by_name = settings.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name)
    return by_name or (
        settings.sequence_parallel and getattr(parameter, "sequence_parallel", False)
    )


def weights_of_predictions(context_parallel_size: int = 1, **_: int) -> torch.Tensor | None:
    """Return a loss mask with which one rank weights its predictions as divided ranks do.

    Since Megatron-Core 0.17 (`process_mtp_loss`) each context-parallel rank multiplies them by its
    number of tokens over the number that have a next token. The sequence's last token has none: it
    is the end of the second chunk of rank 0, of which the first chunk begins the sequence.
    """
    if not hasattr(multi_token_prediction, "process_mtp_loss"):
        return None
    tokens = LENGTH // context_parallel_size
    weights = torch.ones(2, LENGTH)
    weights[:, : tokens // 2] *= tokens / (tokens - 1)
    weights[:, -tokens // 2 :] *= tokens / (tokens - 1)
    # The model rolls it back; with 0 first its sum stays the same, and the factor of one rank is 1.
    weights = weights.roll(1, dims=-1)
    weights[:, 0] = 0
    return weights


def compare_with_one_rank(
    kinds: list[str], layout: dict[str, int], sequence_parallel: bool
) -> None:
    """Job: models whose layers or sequences are divided over two ranks."""
    for kind in kinds:
        start()
        expected_loss, expected = gradients(config(kind), weights_of_predictions(**layout))
        start(**layout)
        loss, found = gradients(config(kind, **layout, sequence_parallel=sequence_parallel))
        torch.testing.assert_close(loss, expected_loss)
        assert found.keys() == expected.keys()
        for name in found:
            error = (found[name] - expected[name]).norm() / expected[name].norm()
            assert error < 1e-4, f"{kind}: the gradient of {name} differs by {error:.1e}"


TENSOR = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2}


@pytest.mark.always("tensor")
@pytest.mark.parametrize(
    ("kinds", "layout", "sequence_parallel"),
    [
        (["dense", "grouped_queries", "latent", "prediction"], TENSOR, False),
        (["dense", "grouped_queries", "latent", "latent_experts_yarn", "everything"], TENSOR, True),
        (
            ["dense", "grouped_queries", "latent_experts_yarn", "everything"],
            {"context_parallel_size": 2},
            False,
        ),
    ],
    ids=["tensor", "tensor_and_sequence", "context"],
)
def test_gradients_of_divided_models_equal_those_of_one_rank(
    kinds: list[str], layout: str, sequence_parallel: bool
) -> None:
    run_ranks(2, compare_with_one_rank, kinds, layout, sequence_parallel)


def has_experts(mlp: Any) -> bool:
    """Return whether an MLP's specification, which is a partial call since 0.18, has experts."""
    return getattr(mlp, "func", None) is MoELayer or getattr(mlp, "module", None) is MoELayer


def layers_of_stages(**overrides: Any) -> list[str]:
    """Job: one letter for each layer of this rank's two stages: dense, expert, predicting."""
    layout = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    start(**layout)
    settings = config(
        "experts",
        num_layers=8,
        moe_layer_freq=[0, 0, 0, 1, 1, 0, 1, 1],
        mtp_num_layers=1,
        pipeline_dtype=torch.float32,
        **layout | overrides,
    )
    stages = []
    for stage in range(2):
        spec = layer_spec(settings, stage)
        letters = ["e" if has_experts(layer.submodules.mlp) else "d" for layer in spec.layer_specs]
        prediction = mtp_block_spec(settings, spec, stage)
        if prediction is not None:
            (layer,) = prediction.layer_specs
            assert layer.module is multi_token_prediction.MultiTokenPredictionLayer
            submodules = layer.submodules
            name = next(name for name in INNER_LAYERS if hasattr(submodules, name))
            inner = getattr(submodules, name)
            assert has_experts(inner.submodules.mlp)  # as the model's last layer
            letters.append("p")
        stages.append("".join(letters))
    return stages


def test_pipeline_stages_have_their_layers() -> None:
    assert run_ranks(2, layers_of_stages) == [["dd", "ed"], ["de", "eep"]]


def test_a_stage_of_predictions_only_is_made_like_the_last_layer() -> None:
    layout = "Ettt|tt|ttt|mL"
    assert run_ranks(2, layers_of_stages, pipeline_model_parallel_layout=layout) == [
        ["ddd", "dee"],
        ["ee", "p"],
    ]


def owners_unknown_on_meta() -> list[str]:
    """Job: return modules with parameters that cannot be initialised from the meta device."""
    start()
    unknown = []
    for kind in MODELS:
        with torch.device("meta"):
            model = build(config(kind))
        initialiser = MegatronCoreInitialiser(model)
        for name, module in model.named_modules():
            if next(module.parameters(recurse=False), None) is not None and not initialiser.knows(
                module
            ):
                unknown.append(f"{kind}: {name}")
    return unknown


def test_every_module_with_parameters_can_be_initialised_on_the_meta_device() -> None:
    assert run_ranks(1, owners_unknown_on_meta) == [[]]


def test_with_transformer_engine_megatron_cores_specs_are_taken_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []

    def record(*args: Any, **keywords: Any) -> str:
        calls.append(args)
        return "spec"

    monkeypatch.setattr(layer_specs, "get_gpt_decoder_block_spec", record)
    settings = config("dense", transformer_impl="transformer_engine")
    assert layer_spec(settings) == "spec"
    assert calls == [(settings, True)]
