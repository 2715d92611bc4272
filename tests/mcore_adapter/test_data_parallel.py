# SPDX-License-Identifier: Apache-2.0
"""FullyShardedDataParallel has the interface that Megatron-Core expects of its wrapper."""

from argparse import Namespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.mcore_adapter import FullyShardedDataParallel
from megatron.mcore_adapter.axes import expert_tensor_group
from megatron.mcore_adapter.data_parallel import default_unit_modules
from megatron.pretrain.arguments.configs import ddp_config
from tests.support.mcore_adapter.wrapped_models import (
    LAYERS,
    backward,
    make_module,
    make_wrapper,
    wrap,
)
from tests.support.model_parallel import ONE_AXIS, initialize, initialize_data_parallel
from tests.support.rank_pool import run_ranks


def call_every_member() -> dict[str, Any]:
    """Job: the members and the calls that Megatron-Core makes, as it makes them."""
    model = make_wrapper(disable_bucketing=False, pg_collection=None, device=torch.device("cpu"))
    model.force_all_reduce = False
    model.zero_grad_buffer()
    backward(model, 0)
    model.start_grad_sync(model.parameters())
    model.finish_grad_sync(force_all_reduce=False)
    model.scale_gradients(torch.tensor(0.5))
    model.param_and_grad_buffer.copy_main_weights_to_model_weights()
    model.param_and_grad_buffer.manual_buffer_registration()
    model.start_param_sync()
    model.start_param_sync(model.parameters(), force_sync=True)
    model.start_param_sync(force_dispatch=True, force_sync=True)
    model.stop_communication()
    model.broadcast_params()
    with model.no_sync():
        pass
    prefixed = model.state_dict_for_save_checkpoint(prefix="model.", keep_vars=True)
    model.load_state_dict(model.state_dict(), strict=True)
    own = [
        name
        for name in ("decoder", "set_input_tensor", "pre_process", "model_type", "vp_stage")
        if hasattr(model, name)
    ]
    return {
        "config": get_model_config(model) is model.config,
        "found_inside": get_attr_wrapped_model(model, "pre_process"),
        "own": own,
        "ddp_config": model.ddp_config.use_megatron_fsdp,
        "gpt": sum(isinstance(module, GPTModel) for module in model.modules()),
        "keys": sorted({key.split(".")[0] for key in model.state_dict()}),
        "prefixed": all(key.startswith("model.module.") for key in prefixed),
    }


def test_every_member_that_megatron_core_uses_takes_its_calls() -> None:
    for seen in run_ranks(2, call_every_member):
        assert seen == {
            "config": True,
            "found_inside": True,
            # Lookups of these go on to the module; an attribute here would hide the module's
            "own": [],
            "ddp_config": True,
            "gpt": 1,
            "keys": ["module"],
            "prefixed": True,
        }


def describe_parameters(flags: str) -> dict[str, Any]:
    """Job: compare the parameters that the optimizer sees with those of the bare model."""
    args, config, module = make_module(flags)
    module.output_layer.weight.a_mark = "kept"
    plain = {
        name: (tuple(parameter.shape), dict(vars(parameter)))
        for name, parameter in module.named_parameters()
    }
    model = wrap(args, config, module)
    first, second = dict(model.named_parameters()), dict(model.named_parameters())
    backward(model, 0)
    model.finish_grad_sync()
    third = dict(model.named_parameters())
    lost = []
    for name, (_, attributes) in plain.items():
        wrapped = first[f"module.module.{name}"]
        changed = [key for key, value in attributes.items() if getattr(wrapped, key, None) != value]
        lost += [(name, key) for key in changed]
    return {
        "same": all(first[name] is second[name] is third[name] for name in first),
        "as_parameters": (
            [id(value) for value in model.parameters()] == [id(value) for value in first.values()]
        ),
        "names": list(first),
        "shapes": {name: tuple(parameter.shape) for name, parameter in first.items()},
        "plain": {f"module.module.{name}": shape for name, (shape, _) in plain.items()},
        "lost": lost,
        "mark": first["module.module.output_layer.weight"].a_mark,
        "marked": all(
            parameter.__fsdp_param__ and isinstance(parameter, DTensor)
            for parameter in first.values()
        ),
        "embedding": [
            name
            for name, p in first.items()
            if getattr(p, "is_embedding_or_output_parameter", False)
        ],
    }


@pytest.mark.always("no_shard")
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads_params"])
def test_parameters_are_the_same_objects_with_the_shapes_and_attributes_of_the_modules(
    strategy: str,
) -> None:
    for seen in run_ranks(2, describe_parameters, f"--data-parallel-sharding-strategy {strategy}"):
        assert seen["same"] and seen["as_parameters"] and seen["marked"]
        assert seen["shapes"] == seen["plain"]  # weight decay goes by the number of dimensions
        assert seen["lost"] == [] and seen["mark"] == "kept"
        assert seen["embedding"] == [
            "module.module.embedding.word_embeddings.weight",
            "module.module.output_layer.weight",
        ]


def groups_of(units: Any = None, **arguments: Any) -> list[set[str]]:
    """Job: the names of the parameters that are gathered together."""
    chosen = {} if units is None else {"fsdp_unit_modules": units}
    return [set(group.names) for group in make_wrapper(**chosen, **arguments).module.groups]


def test_layers_embedding_and_output_layer_are_units_and_the_rest_is_one_more() -> None:
    groups = run_ranks(2, groups_of)[0]
    assert len(groups) == 5
    for prefix in (*LAYERS, "embedding.", "output_layer.", "decoder.final_layernorm."):
        assert sum(all(name.startswith(prefix) for name in group) for group in groups) == 1, prefix


def test_units_may_be_given_as_classes_or_as_import_paths() -> None:
    paths = [
        f"{kind.__module__}.{kind.__qualname__}"
        for kind in (TransformerLayer, LanguageModelEmbedding)
    ]
    by_class = run_ranks(2, groups_of, [TransformerLayer, LanguageModelEmbedding])[0]
    assert run_ranks(2, groups_of, paths)[0] == by_class
    # Outside of units, small modules are gathered together.
    norm = {"decoder.final_layernorm.weight", "decoder.final_layernorm.bias"}
    assert {"output_layer.weight"} | norm in by_class


def test_without_bucketing_there_is_one_group() -> None:
    assert len(run_ranks(2, groups_of, disable_bucketing=True)[0]) == 1


def default_units() -> list[str]:
    """Job: the default units of a model with an output layer of its own."""
    *kinds, output = default_unit_modules(module := make_module()[2])
    assert output is module.output_layer
    return [kind.__name__ for kind in kinds]


def test_the_default_units_are_found_in_the_module() -> None:
    assert run_ranks(1, default_units) == [
        ["TransformerLayer", "MambaLayer", "LanguageModelEmbedding"]
    ]


class Mixer(nn.Linear):
    """A mixer of a Mamba layer without Mamba's kernels."""

    def __init__(self, config: TransformerConfig, d_model: int, **settings: Any):
        super().__init__(d_model, d_model)


def groups_of_a_mamba_layer() -> list[set[str]]:
    """Job: the parameters that are gathered together where the second layer is one of Mamba."""
    args, config, module = make_module()
    module.decoder.layers[1] = MambaLayer(
        config,
        MambaLayerSubmodules(mixer=Mixer),
        layer_number=2,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    model = wrap(args, config, module)
    return [set(group.names) for group in model.module.groups]


def test_a_mamba_layer_is_a_unit() -> None:
    names = {"decoder.layers.1.mixer.weight", "decoder.layers.1.mixer.bias"}
    assert names in run_ranks(1, groups_of_a_mamba_layer)[0]


def refusal(changes: dict[str, Any]) -> str:
    """Job: the error of a constructor call whose settings of data parallelism are changed."""
    args, config, module = make_module()
    try:
        settings = ddp_config(args)
        vars(settings).update(changes)
        FullyShardedDataParallel(config=config, ddp_config=settings, module=module)
    except (ValueError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_megatron_fsdp": False}, "ValueError: FullyShardedDataParallel needs"),
        (
            {"num_distributed_optimizer_instances": 2},
            "initialize_model_parallel(num_distributed_optimizer_instances=2)",
        ),
        ({"outer_dp_sharding_strategy": "optim"}, "outer_dp_sharding_strategy"),
        ({"data_parallel_sharding_strategy": "zero4"}, "data_parallel_sharding_strategy"),
        ({"megatron_fsdp_offload_policy": "folder"}, "has none in files"),
        ({"megatron_fsdp_version": 3}, "megatron_fsdp_version expects 1 or 2 but got 3"),
    ],
    ids=["no_fsdp", "instances", "outer", "strategy", "offload", "version"],
)
def test_configurations_that_would_train_wrongly_are_refused(
    changes: dict[str, Any], words: str
) -> None:
    for message in run_ranks(2, refusal, changes):
        assert words in message


def refusal_of_experts(expert_ranks: int) -> str:
    """Job: the error for experts whose tensor axis is twice as wide as that of everything else."""
    initialize(
        Namespace(
            **{
                **vars(ONE_AXIS),
                "expert_tensor_parallel_size": 2,
                "expert_model_parallel_size": expert_ranks,
            }
        )
    )
    settings = DistributedDataParallelConfig(use_megatron_fsdp=True, use_distributed_optimizer=True)
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=1, num_moe_experts=4
    )
    try:
        FullyShardedDataParallel(config=config, ddp_config=settings, module=torch.nn.Linear(8, 8))
    except ValueError as error:
        return str(error)
    return "accepted"


def test_experts_that_would_be_reduced_over_the_wrong_ranks_are_refused() -> None:
    assert "need expert parallelism of at least 2" in run_ranks(4, refusal_of_experts, 1)[0]
    assert run_ranks(4, refusal_of_experts, 2)[0] == "accepted"


def train_with_groups_of_axes_of_several_ranks() -> list[bool]:
    """Job: compare with a collection that has all groups, one that lacks those of size one."""
    initialize_data_parallel()
    full = ProcessGroupCollection.use_mpu_process_groups()
    partial = ProcessGroupCollection()
    partial.dp, partial.dp_cp, partial.expt_dp = full.dp, full.dp_cp, full.expt_dp
    gradients = []
    for groups in (full, partial):
        model = make_wrapper(pg_collection=groups)
        assert model.megatron_fsdp_dist_index is model.module.get_distributed_index()
        backward(model, 0)
        model.finish_grad_sync()
        gradients.append([parameter.grad.to_local() for parameter in model.parameters()])
    assert "tp" not in vars(partial)  # the user's collection is not changed
    return [torch.equal(one, two) for one, two in zip(*gradients, strict=True)]


def groups_of_an_empty_collection() -> bool:
    """Job: the group of experts' slices is that of the process where a collection has none."""
    initialize_data_parallel()
    group = expert_tensor_group(ProcessGroupCollection())
    return group is parallel_state.get_expert_tensor_parallel_group()


def test_the_group_of_experts_slices_may_be_missing() -> None:
    """An empty collection of 0.19 answers None."""
    assert run_ranks(1, groups_of_an_empty_collection) == [True]


def test_groups_of_axes_of_size_one_may_be_missing() -> None:
    for same in run_ranks(2, train_with_groups_of_axes_of_several_ranks):
        assert same and all(same)
