# SPDX-License-Identifier: Apache-2.0
"""Models built on the meta device get the weights of models built on the CPU, seed by seed."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    model_parallel_cuda_manual_seed,
)
from megatron.core.transformer.module import Float16Module
from torch import nn

from megatron.fsdp.dtensor.tensor_part import full_tensor
from megatron.mcore_adapter.core_engine import CoreEngine
from megatron.mcore_adapter.core_initialiser import MegatronCoreInitialiser
from megatron.mcore_adapter.data_parallel import FullyShardedDataParallel, default_unit_modules
from megatron.pretrain.arguments.configs import ddp_config, transformer_config
from megatron.pretrain.model.layer_specs import layer_spec
from megatron_fsdp import FSDPDistributedIndex, MixedPrecisionPolicy
from tests.support.mcore_adapter.wrapped_models import loss_of
from tests.support.pairwise import each_value
from tests.support.pretrain.parity import DEEPSEEK, LLAMA, MTP, TIED, Combination
from tests.support.pretrain.training_runs import NO_DROPOUT, SMALL, prepare, refuse, trained
from tests.support.rank_pool import run_ranks

ON_META = "--init-model-with-meta-device"

INITIALISED = {
    "mtp_tied": Combination(2, "dp", 3, f"{TIED} {MTP}"),
    "pp2_untied": Combination(2, "pp2", 3, LLAMA),
    "experts_and_latents_tp2_sp_ep2": Combination(
        2, "tp2 sp ep2 etp1", 3, f"{DEEPSEEK} --moe-shared-expert-gate", layers=4
    ),
}


@pytest.mark.always("mtp_tied-cpu")
@pytest.mark.parametrize(
    ("model", "device"),
    each_value(always=[("mtp_tied", "cpu")], model=INITIALISED, device=("gpu", "cpu")),
)
def test_a_model_from_the_meta_device_trains_like_one_that_had_values_at_once(
    model: str, device: str
) -> None:
    # With dropout, so that one number drawn too many or too few shows.
    combination = INITIALISED[model].with_few_microbatches()
    line = combination.ours.replace(NO_DROPOUT, "--hidden-dropout 0.1 --attention-dropout 0.1")
    line = f"{line} --train-iters 1" + (" --use-cpu-initialization" if device == "cpu" else "")
    at_once, later = trained(line, f"{line} {ON_META}")
    assert later.losses == at_once.losses
    assert later.column("params-norm") == at_once.column("params-norm")


@pytest.mark.parametrize("model", [TIED, f"{LLAMA} {MTP}"], ids=["tied", "mtp"])
def test_an_embedding_of_two_stages_cannot_come_from_the_meta_device(model: str) -> None:
    # Its copy would be of other values, and nothing would say so.
    for error in run_ranks(2, refuse, f"{Combination(2, 'pp2', 3, model).ours} {ON_META}"):
        assert error.startswith(("ValueError", "CommandLineError"))
        assert "embedding that two pipeline stages share" in error


LINE = f"{SMALL} --use-distributed-optimizer"

MODELS = {
    "tied": "",
    "untied_rope_swiglu_rmsnorm": (
        "--untie-embeddings-and-output-weights --position-embedding-type rope --swiglu"
        " --normalization RMSNorm --disable-bias-linear"
    ),
    "own_standard_deviations": "--untie-embeddings-and-output-weights --init-method-std 0.1",
    "grouped_queries": "--group-query-attention --num-query-groups 2 --qk-layernorm",
    "bf16": "--bf16 --untie-embeddings-and-output-weights",
    "experts": "--num-experts 2 --disable-bias-linear --moe-router-load-balancing-type none",
}


def seed(tensor_parallel_rank: int = 0) -> None:
    torch.manual_seed(5)
    model_parallel_cuda_manual_seed(5, tp_rank=tensor_parallel_rank, force_reset_rng=True)


def build(flags: str, on_meta: bool, on_cpu: bool = True) -> nn.Module:
    args, _ = prepare(f"{LINE} {flags}")
    config = transformer_config(args)
    config.use_cpu_initialization = on_cpu
    seed()
    with torch.device("meta") if on_meta else nullcontext():
        model = GPTModel(
            config,
            layer_spec(config),
            vocab_size=99,
            max_sequence_length=args.max_position_embeddings,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type,
        )
        return Float16Module(config, model) if config.bf16 else model


def compare_with_the_cpu(flags: str, on_cpu: bool) -> None:
    """Job: `on_cpu` is what use_cpu_initialization is in the model that is compared with."""
    reference = build(flags, on_meta=False, on_cpu=on_cpu)
    module = build(flags, on_meta=True)
    attributes = {name: dict(vars(parameter)) for name, parameter in module.named_parameters()}
    assert all(parameter.is_meta for parameter in module.parameters())
    seed()
    model = CoreEngine(
        module,
        FSDPDistributedIndex(),
        fsdp_unit_modules=default_unit_modules(module),
        init_model_with_meta_device=True,
        mixed_precision_policy=MixedPrecisionPolicy(None),
        use_cpu_initialization=on_cpu,
    )
    expected = dict(reference.named_parameters())
    assert [name for name, _ in model.named_parameters()] == [f"module.{name}" for name in expected]
    for (name, parameter), wanted in zip(model.named_parameters(), expected.values()):
        assert torch.equal(full_tensor(parameter), wanted.detach()), name
        assert parameter.dtype == wanted.dtype
    for name, values in attributes.items():
        kept = vars(dict(model.named_parameters())[f"module.{name}"])
        assert all(kept[key] == value for key, value in values.items()), name
    assert all(not buffer.is_meta for buffer in model.buffers())
    loss = loss_of(model, 1)
    assert torch.equal(loss, loss_of(reference, 1))
    loss.backward()


@pytest.mark.always("tied-on_cpu=True")
@pytest.mark.parametrize(
    ("model", "on_cpu"), each_value(always=[("tied", True)], model=MODELS, on_cpu=[False, True])
)
def test_weights_are_those_of_the_model_built_on_the_cpu(model: str, on_cpu: bool) -> None:
    run_ranks(2, compare_with_the_cpu, MODELS[model], on_cpu)


def parallel_layers(config: Any) -> list[nn.Module]:
    """Layers that are divided over all ranks; gated ones have rows of two halves."""
    common = {"config": config, "tp_group": dist.group.WORLD}
    column = {**common, "init_method": config.init_method}
    row = {
        **common,
        "init_method": config.output_layer_init_method,
        "input_is_parallel": True,
        "skip_bias_add": False,
    }
    return [
        ColumnParallelLinear(32, 64, bias=True, **column),
        ColumnParallelLinear(32, 64, bias=False, stride=2, **column),
        RowParallelLinear(64, 32, bias=True, **row),
    ]


def compare_tensor_parallel_layers(on_cpu: bool) -> list[torch.Tensor]:
    """Job: layers whose parts differ between ranks."""
    args, _ = prepare(f"{LINE} --use-megatron-fsdp")
    config = transformer_config(args)
    config.use_cpu_initialization = on_cpu
    seed(dist.get_rank())
    expected = nn.ModuleList(parallel_layers(config))
    config.use_cpu_initialization = True
    with torch.device("meta"):
        layers = nn.ModuleList(parallel_layers(config))
    attributes = [dict(vars(parameter)) for parameter in layers.parameters()]
    layers.to_empty(device="cpu")
    for parameter, values in zip(layers.parameters(), attributes):
        vars(parameter).update(values)
    seed(dist.get_rank())
    initialiser = MegatronCoreInitialiser(layers, on_cpu)
    with torch.no_grad():
        for layer in layers:
            assert initialiser.knows(layer)
            initialiser.initialise(layer)
    for (name, parameter), wanted in zip(
        layers.named_parameters(), expected.parameters(), strict=True
    ):
        assert torch.equal(parameter, wanted), name
        assert vars(parameter) == vars(wanted)
    return [parameter.detach() for parameter in layers.parameters()]


@pytest.mark.parametrize("on_cpu", [True, False], ids=["cpu_initialization", "gpu_initialization"])
def test_every_tensor_parallel_rank_gets_its_part(on_cpu: bool) -> None:
    first, second = run_ranks(2, compare_tensor_parallel_layers, on_cpu)
    assert not torch.equal(first[0], second[0])


def what_is_known() -> list[bool]:
    """Job: embeddings belong to a model, which knows how they are initialised."""
    model = build("", on_meta=True)
    initialiser = MegatronCoreInitialiser(model)
    stranger = VocabParallelEmbedding(
        8, 4, init_method=nn.init.zeros_, config=model.config, tp_group=dist.group.WORLD
    )
    owning = [
        module for module in model.modules() if any(True for _ in module.parameters(recurse=False))
    ]
    return [all(initialiser.knows(module) for module in owning), initialiser.knows(stranger)]


def test_a_vocabulary_embedding_of_no_model_is_not_known() -> None:
    assert run_ranks(1, what_is_known) == [[True, False]]


def wrap_a_model_on_meta() -> None:
    args, _ = prepare(f"{LINE} --use-megatron-fsdp")
    reference, module = build("", on_meta=False), build("", on_meta=True)
    config = module.config
    config.init_model_with_meta_device = True
    seed()
    model = FullyShardedDataParallel(config, ddp_config(args), module)
    for (name, parameter), wanted in zip(model.named_parameters(), reference.parameters()):
        assert torch.equal(full_tensor(parameter), wanted.detach()), name


def test_the_wrapper_takes_a_model_on_the_meta_device() -> None:
    run_ranks(2, wrap_a_model_on_meta)
