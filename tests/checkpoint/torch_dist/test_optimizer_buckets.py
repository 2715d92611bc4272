# SPDX-License-Identifier: Apache-2.0
"""Optimizer state in buckets: the order of parameters is found, contradictions are refused."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron.core.transformer.module import Float16Module

from megatron.checkpoint.core import key_rules
from megatron.checkpoint.core.spelling import canonical_name
from megatron.checkpoint.dcp.chunk import Chunk
from megatron.mcore_adapter.run.wrapped_model import unwrap
from tests.support.checkpoint.torch_dist.stored_optimizers import (
    DISTRIBUTED,
    GATED_SHARED,
    File,
    assert_is,
    written,
)
from tests.support.checkpoint.written_by_megatron_core import State, write
from tests.support.pretrain.parity import (
    ALLTOALL,
    BIAS,
    DEEPSEEK,
    GPT2,
    LLAMA,
    MLA,
    MTP,
    UNTIED,
    Combination,
)
from tests.support.pretrain.training_runs import build
from tests.support.rank_pool import run_ranks


def write_as_engine(command_line: str, layout: str | None) -> State | None:
    """Job: write with the parameter order of Transformer Engine's layers with grouped experts."""
    original = Float16Module.named_parameters

    def order(name: str) -> tuple[Any, ...]:
        layer, _, rest = name.partition(".layers.")[2].partition(".")
        stacks = ("embedding", "decoder.layers", "final_layernorm", "output_layer")
        stack = next(at for at, part in enumerate(stacks) if part in name)
        parts = [
            "linear_proj",
            "input_layernorm",
            "linear_qkv",
            "pre_mlp_layernorm",
            "router",
            "linear_fc1",
            "linear_fc2",
        ]
        part = next((at for at, each in enumerate(parts) if each in rest), 0)
        expert = (
            int(rest.split("local_experts.")[1].split(".")[0]) if "local_experts" in rest else 0
        )
        return (stack, int(layer or 0), part, expert, not name.endswith("weight"))

    def named_parameters(self: Any, *args: Any, **kwargs: Any) -> Any:
        return iter(sorted(original(self, *args, **kwargs), key=lambda item: order(item[0])))

    with patch.object(Float16Module, "named_parameters", named_parameters):
        return write(command_line, layout)


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", [UNTIED, ALLTOALL], ids=["dense", "experts"])
def test_layers_of_transformer_engine_are_told_from_local_ones_by_the_chunks(
    model: str, tmp_path: Path
) -> None:
    run = Combination(2, "ep2" if model == ALLTOALL else "pp2", 0, model, DISTRIBUTED)
    expected = written(run, tmp_path, job=write_as_engine)
    file = File(tmp_path)
    assert file.common["args"].transformer_impl == "local"
    assert_is(file.read(), file.weights, expected)
    file.common["args"].transformer_impl, file.common["args"].moe_grouped_gemm = (
        "transformer_engine",
        True,
    )
    assert_is(file.read(), file.weights, expected)
    assert_is(file.without_arguments("transformer_impl").read(), file.weights, expected)


def registered_names(*command_lines: str) -> list[list[str]]:
    """Job: the parameters of models as they register them."""
    return [
        [canonical_name(name) for name, _ in unwrap(build(line).model[0]).named_parameters()]
        for line in command_lines
    ]


def test_registration_order_is_that_of_the_models() -> None:
    dense = [GPT2, f"{LLAMA} --qk-layernorm", f"{MLA} --qk-layernorm"]
    experts = [GATED_SHARED, f"{ALLTOALL} {BIAS}", f"{DEEPSEEK} {MTP}"]
    lines = [
        Combination(1, "", 0, model, layers=3 + (DEEPSEEK in model)).line
        for model in (*dense, *experts)
    ]
    for names in run_ranks(1, registered_names, *lines)[0]:
        assert sorted(names, key=key_rules.registration_order) == names


@pytest.mark.always("objects")
@pytest.mark.parametrize("kind", ["buckets", "objects"])
def test_buckets_of_another_model_do_not_fit(kind: str, folders: dict[str, Path]) -> None:
    file = File(folders[kind])
    file.weights = {
        name: tensor for name, tensor in file.weights.items() if ".layers.1." not in name
    }
    with pytest.raises(
        ValueError,
        match=r"buckets do not fit the model:\n  tensor parallelism of 1.* chunk 1 of the",
    ):
        file.read()


def test_sizes_that_ranks_stored_must_be_those_of_the_buckets(folders: dict[str, Path]) -> None:
    file = File(folders["buckets"])
    read_object = file.stored.read_object

    def with_another_size(key: str) -> Any:
        value = read_object(key)
        if "dp_group_idx_1.per_bucket_numel_unpadded" in key:
            next(iter(value[0][0].values()))[0] += 64
        return value

    file.stored.read_object = with_another_size
    with pytest.raises(
        ValueError,
        match=r"elements by \S+dp_group_idx_1\.per_bucket_numel_unpadded/shard_0_1",
    ):
        file.read()


@pytest.mark.exhaustive
@pytest.mark.parametrize("slot", ["param", "exp_avg_sq"])
def test_copies_of_tied_embeddings_must_agree(slot: str, folders: dict[str, Path]) -> None:
    file = File(folders["buckets"])
    read_chunk = file.stored.read_chunk

    def with_another_copy(key: str, chunk: Chunk) -> torch.Tensor:
        tensor = read_chunk(key, chunk)
        return tensor + 1 if "dp_group_idx_1" in key and key.endswith(f".{slot}") else tensor

    file.stored.read_chunk = with_another_copy
    found = file.read()
    name = "embedding.word_embeddings.weight"
    tensor = found.main[name] if slot == "param" else found.moments[name][slot]
    with pytest.raises(
        ValueError,
        match=f"share embedding.word_embeddings.weight have different copies of its {slot}",
    ):
        tensor.read()
    found.moments[name]["exp_avg"].read()
