# SPDX-License-Identifier: Apache-2.0
"""Optimizer state of torch_dist checkpoints: in every layout bitwise that of the saving run."""

import copy
import functools
import itertools
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.checkpoint.core.lazy_tensor import LazyTensor
from megatron.checkpoint.dcp.chunk import Chunk
from megatron.checkpoint.torch_dist.optimizer_layouts import read_optimizer
from megatron.checkpoint.torch_dist.reformulated_tensor import reformulated
from tests.support.checkpoint import samples
from tests.support.checkpoint.torch_dist.stored_optimizers import (
    DISTRIBUTED,
    RUNS,
    ZERO,
    File,
    assert_is,
    written,
)
from tests.support.checkpoint.written_by_megatron_core import State
from tests.support.pretrain.parity import LLAMA, Combination

SAMPLES = {
    "v015_dense_tp2_dp2_model_space": "fully_sharded_model_space",
    "v015_experts_ep2_dp2_model_space_chained": "fully_sharded_model_space",
    "dense_swiglu_bf16_tp1_dp2": "fully_reshardable",
    "dense_swiglu_bf16_tp2_dp2": "fully_reshardable",
    "dense_gelu_tied_fp32_dp2": "fully_reshardable",
    "moe4_swiglu_bf16_ep2_dp2": "fully_reshardable",
    "dense_swiglu_bf16_dp2_dp_reshardable": "dp_reshardable",
    "v019_dense_dp2_common_state": "fully_reshardable",
}


@pytest.mark.always(
    "v015_experts_ep2_dp2_model_space_chained",
    "dense_gelu_tied_fp32_dp2",
    "v019_dense_dp2_common_state",
)
@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_has_the_state_that_the_run_had(name: str) -> None:
    file, expected = File(samples.torch_dist(name)), samples.expected(samples.torch_dist(name))
    found = file.read()
    assert found.layout == SAMPLES[name]
    assert_is(found, file.weights, expected)
    assert found.used_keys == {
        key for key in (*file.stored.tensors, *file.stored.objects) if "optimizer." in key
    }
    assert [group["is_expert_parallel"] for group in found.param_groups] == [False, False, True][
        : 2 + ("_ep2_" in name)
    ]
    assert {group["step"] for group in found.param_groups} == {
        2.0 if "model_space" in name else 3.0
    }
    assert not any("params" in group for group in found.param_groups)


def test_a_file_without_an_optimizer_has_no_layout() -> None:
    file = File(samples.torch_dist("v015_dense_tp2_dp2_model_space"))
    file.stored.tensors = {
        key: entry for key, entry in file.stored.tensors.items() if "optimizer." not in key
    }
    found = read_optimizer(file.stored, {}, file.weights)
    assert (found.layout, found.main, found.moments) == (None, {}, {})
    assert (found.param_groups, found.used_keys) == ([], set())


def test_a_common_state_without_anything_gives_tensors_and_no_groups() -> None:
    name = "v015_dense_tp2_dp2_model_space"
    file = File(samples.torch_dist(name))
    file.common = {}
    assert_is(file.read(), file.weights, samples.expected(samples.torch_dist(name)))
    assert file.read().param_groups == []


Files = Callable[[str], tuple[Path, State]]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Write the checkpoint of one of `RUNS`; return its folder and what the optimizer had."""

    @functools.cache
    def write(name: str) -> tuple[Path, State]:
        folder = tmp_path_factory.mktemp("written")
        run, layout = RUNS[name]
        return folder, written(run, folder, layout)

    return write


LAYOUTS = {
    "buckets": "dp_reshardable",
    "objects": ZERO,
    "fully": "fully_reshardable",
    "not": "non_distributed",
}


@pytest.mark.always("not distributed, bf16, ep2")
@pytest.mark.parametrize("name", RUNS)
def test_a_written_file_has_the_state_that_the_ranks_had(name: str, files: Files) -> None:
    folder, expected = files(name)
    file = File(folder)
    found = file.read()
    assert file.boxes == [], "tensors are read before they are asked for"
    assert found.layout == LAYOUTS[name.partition(" ")[0]]
    assert_is(found, file.weights, expected)
    assert bool(found.main) == (name != "not distributed, fp32")
    apart = "ep2" in name
    assert [group["is_expert_parallel"] for group in found.param_groups] == [False, False, True][
        : 2 + apart
    ]
    assert {group["step"] for group in found.param_groups} == {2.0}
    assert (found.grad_scaler or {}).get("scale") == (4096 if "fp16" in name else None)
    if name.startswith("buckets"):  # where parameters are follows from where chunks of the file end
        bare = file.without_arguments(
            "tensor_model_parallel_size", "expert_tensor_parallel_size", "transformer_impl"
        ).read()
        assert_is(bare, file.weights, expected)


@pytest.mark.exhaustive
def test_rows_of_a_parameter_are_read_and_nothing_else(files: Files) -> None:
    for file in (
        File(files("buckets of tp2 dp2")[0]),
        File(samples.torch_dist("v015_dense_tp2_dp2_model_space")),
    ):
        found = file.read()
        for name, tensor in found.main.items():
            file.boxes.clear()
            rows = tensor.read_rows(1, 3)
            assert sum(file.boxes) == rows.numel(), name


@given(st.data())
def test_pieces_of_any_grid_are_put_together(data: st.DataObject) -> None:
    grid = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    local = [data.draw(st.integers(1, 4)) for _ in grid]
    shape = [pieces * size for pieces, size in zip(grid, local)]
    lead = data.draw(st.integers(0, len(shape)))
    index = [data.draw(st.integers(0, size - 1)) for size in shape[:lead]]
    whole = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    interleaved = [*itertools.chain.from_iterable(zip(grid, local))]
    axes = [*range(0, 2 * len(grid), 2), *range(1, 2 * len(grid), 2)]
    pieces = whole.reshape(interleaved).permute(axes).reshape(*grid, -1)

    class Stored:
        shape = staticmethod(lambda key: tuple(pieces.shape))
        dtype = staticmethod(lambda key: pieces.dtype)

        @staticmethod
        def read_chunk(key: str, chunk: Chunk) -> torch.Tensor:
            return pieces[chunk.slices([0] * len(pieces.shape))]

    tensor = reformulated(Stored, "key", shape, index)
    expected = whole[tuple(index)]
    assert tensor.shape == tuple(expected.shape)
    assert torch.equal(tensor.read(), expected)
    if expected.dim():
        start = data.draw(st.integers(0, len(expected)))
        stop = data.draw(st.integers(start, len(expected)))
        assert torch.equal(tensor.read_rows(start, stop), expected[start:stop])


def test_a_grid_without_blocks_is_refused() -> None:
    class Stored:
        shape = staticmethod(lambda key: (2, 0, 0))

    with pytest.raises(ValueError, match=r"key: \(2, 0, 0\) is not \(4, 0\) in equal blocks"):
        reformulated(Stored, "key", (4, 0))


def test_keys_that_are_not_understood_are_named(space: File) -> None:
    space.stored.objects += [
        "optimizer.surprise/shard_0_1",
        "chained_1.optimizer.state.exp_avg.something/shard_0_1",
    ]
    with pytest.raises(
        ValueError, match=r"(?s)not understood.*optimizer\.surprise/.*chained_1\.optimizer\.state\."
    ):
        space.read()


def test_tensors_of_another_model_are_named_with_what_was_expected(space: File) -> None:
    del space.weights["output_layer.weight"]
    name = "decoder.final_layernorm.weight"
    space.weights[name] = LazyTensor((17,), torch.bfloat16, space.weights[name].read_rows)
    with pytest.raises(ValueError, match=r"(?s)has no output_layer\.weight") as error:
        space.read()
    assert f"(16,) for {name}, expected (17,)" in str(error.value)


def test_a_stored_shape_that_is_not_in_pieces_is_refused(space: File) -> None:
    key = "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight"
    space.stored.tensors[key] = copy.copy(space.stored.tensors[key])
    space.stored.tensors[key].size = torch.Size((2, 4, 1, 191))
    with pytest.raises(
        ValueError,
        match=r"linear_fc1\.weight: \(2, 4, 1, 191\) is not \(2, 48, 16\) in equal blocks",
    ):
        space.read()


def test_layouts_are_not_mixed(space: File) -> None:
    space.stored.objects.append("optimizer.distributed.dp_group_idx_0.param_state/shard_0_1")
    with pytest.raises(
        ValueError, match="several layouts: dp_zero_gather_scatter, fully_sharded_model_space"
    ):
        space.read()


@pytest.mark.exhaustive
def test_an_argument_that_is_needed_and_lacks_is_named(tmp_path: Path) -> None:
    written(Combination(2, "tp2", 0, LLAMA, DISTRIBUTED), tmp_path, ZERO)
    with pytest.raises(
        ValueError, match=r"(?s)several layouts, .* lack transformer_impl:.*local.*Engine"
    ):
        File(tmp_path).without_arguments("transformer_impl").read()
