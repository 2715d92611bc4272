# SPDX-License-Identifier: Apache-2.0
"""The optimizer's tensors in torch_dist checkpoints, in every layout: bitwise what the optimizer had when it was saved."""

import argparse
import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.transformer.module import Float16Module

from megatron.checkpoint.core import key_rules, spelling
from megatron.checkpoint.core.lazy_tensor import LazyTensor
from megatron.checkpoint.core.stored_checkpoint import StoredCheckpoint
from megatron.checkpoint.torch_dist import checkpoint as torch_dist
from megatron.checkpoint.torch_dist.optimizer_layouts import OptimizerTensors, read_optimizer
from megatron.checkpoint.torch_dist.reformulated_tensor import reformulated
from megatron.pretrain.gpt_model import unwrap
from tests.checkpoint.written_by_megatron_core import State, write
from tests.pretrain.parity import (
    ALLTOALL,
    BIAS,
    DEEPSEEK,
    GPT2,
    LLAMA,
    MLA,
    MOE,
    MOE_SHARED,
    MTP,
    UNTIED,
    Combination,
)
from tests.pretrain.training_runs import build, write_counting_corpus
from tests.rank_pool import run_ranks

OWN_SAMPLES = Path(__file__).parents[1] / "data" / "torch_dist"
MORE_SAMPLES = Path(__file__).parents[3] / "shared" / "data" / "torch_dist"
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


@pytest.fixture(scope="module", autouse=True)
def counting_corpus() -> None:
    write_counting_corpus()


class File:
    """A checkpoint opened for `read_optimizer`, with parts that a test may change."""

    def __init__(self, folder: Path):
        self.stored = StoredCheckpoint(next(folder.glob("iter_*")))
        self.common = torch_dist.read_common(self.stored)
        self.weights = {
            name: self.stored.lazy(key, index)
            for key in self.stored.tensors
            if "optimizer." not in key
            for name, index in spelling.unstacked(key, self.stored.shape(key))
        }
        self.boxes: list[int] = []
        """Elements of every read."""
        read_region = self.stored.read_region

        def recording(key: str, offsets: Any, sizes: Any) -> torch.Tensor:
            self.boxes.append(math.prod(sizes))
            return read_region(key, offsets, sizes)

        self.stored.read_region = recording

    def read(self) -> OptimizerTensors:
        return read_optimizer(self.stored, self.common, self.weights)

    def without_arguments(self, *names: str) -> "File":
        """The same with `args` that lack some."""
        changed = copy.copy(self)
        args = {
            name: value for name, value in vars(self.common["args"]).items() if name not in names
        }
        changed.common = {**self.common, "args": argparse.Namespace(**args)}
        return changed


def sample(name: str) -> Path:
    folder = next(
        (root / name for root in (OWN_SAMPLES, MORE_SAMPLES) if (root / name).is_dir()), None
    )
    if folder is None:
        pytest.skip(f"the sample {name} is larger than what the repository keeps, and is not here")
    return folder


def assert_is(found: OptimizerTensors, weights: dict[str, LazyTensor], expected: State) -> None:
    """Bitwise the expected state, whole and by rows; without main weights, the model's are meant."""
    for slot in ("param", "exp_avg", "exp_avg_sq"):
        main = found.main or weights
        tensors = (
            main
            if slot == "param"
            else {name: slots[slot] for name, slots in found.moments.items()}
        )
        assert set(tensors) >= set(expected[slot]) and (
            tensors is weights or set(tensors) == set(expected[slot])
        )
        for name, value in expected[slot].items():
            assert tensors[name].shape == tuple(value.shape) and tensors[name].dtype == value.dtype
            assert torch.equal(tensors[name].read(), value), (slot, name)
            start, stop = len(value) // 3, max(len(value) - 1, 1)
            assert torch.equal(tensors[name].read_rows(start, stop), value[start:stop]), (
                slot,
                name,
            )


# ---- samples
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_has_the_state_that_the_run_had(name):
    file, expected = File(sample(name)), torch.load(sample(name) / "expected.pt", weights_only=True)
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


def test_a_file_without_an_optimizer_has_no_layout():
    file = File(sample("v015_dense_tp2_dp2_model_space"))
    file.stored.tensors = {
        key: entry for key, entry in file.stored.tensors.items() if "optimizer." not in key
    }
    found = read_optimizer(file.stored, {}, file.weights)
    assert (found.layout, found.main, found.moments, found.param_groups, found.used_keys) == (
        None,
        {},
        {},
        [],
        set(),
    )


def test_a_common_state_without_anything_gives_tensors_and_no_groups():
    name = "v015_dense_tp2_dp2_model_space"
    file = File(sample(name))
    file.common = {}
    assert_is(
        file.read(), file.weights, torch.load(sample(name) / "expected.pt", weights_only=True)
    )
    assert file.read().param_groups == []


# ---- written by Megatron-Core
# ----------------------------------------------------------------------------------------

DISTRIBUTED = "--bf16 --use-distributed-optimizer"
BUCKETS = f"{DISTRIBUTED} --overlap-grad-reduce --ddp-bucket-size 5000"
ZERO = "dp_zero_gather_scatter"
GATED_SHARED = f"{MOE_SHARED} --moe-shared-expert-gate"
RUNS = {
    "buckets of tp2 dp2": (Combination(4, "tp2", 0, LLAMA, BUCKETS), None),
    "buckets of pp2 dp2 with tied embeddings": (Combination(4, "pp2", 0, GPT2, BUCKETS), None),
    "buckets of ep2 dp2": (Combination(4, "ep2", 0, ALLTOALL, BUCKETS), None),
    "buckets of tp2 ep2 with whole experts": (
        Combination(4, "tp2 sp ep2 etp1", 0, ALLTOALL, DISTRIBUTED),
        None,
    ),
    "buckets of tp2 ep2 etp2": (Combination(4, "tp2 sp ep2 etp2", 0, MOE, DISTRIBUTED), None),
    "buckets of experts without an optimizer of their own": (
        Combination(2, "", 0, GATED_SHARED, DISTRIBUTED),
        None,
    ),
    "buckets of pp2 vpp2 with tied embeddings": (
        Combination(2, "pp2 vpp2", 0, GPT2, DISTRIBUTED, layers=4),
        None,
    ),
    "buckets of an uneven pipeline": (
        Combination(
            2, "pp2", 0, LLAMA, f"{DISTRIBUTED} --decoder-first-pipeline-num-layers 1", layers=3
        ),
        None,
    ),
    "buckets of a pipeline with its own layout": (
        Combination(
            2,
            "pp2",
            0,
            LLAMA,
            f"{DISTRIBUTED} --pipeline-model-parallel-layout Et|t*2|t|L",
            layers=4,
        ),
        None,
    ),
    "buckets of predicting layers in pp2": (
        Combination(2, "pp2", 0, f"{LLAMA} {MTP}", DISTRIBUTED),
        None,
    ),
    "buckets of tp2 latent attention": (
        Combination(2, "tp2", 0, f"{MLA} --qk-layernorm", DISTRIBUTED),
        None,
    ),
    "buckets of pp2 ep2 dense and expert layers": (
        Combination(4, "pp2 ep2", 0, DEEPSEEK, DISTRIBUTED, layers=4),
        None,
    ),
    "buckets of fp16": (
        Combination(
            2, "", 0, LLAMA, "--fp16 --use-distributed-optimizer --initial-loss-scale 4096"
        ),
        None,
    ),
    "objects of tp2 dp2": (Combination(4, "tp2", 0, LLAMA, BUCKETS), ZERO),
    # Buckets that end with biases or with 101 rows of embeddings, which are no multiples of the
    # alignment.
    "objects of pp2 vpp2 dp2 with tied embeddings": (
        Combination(
            4, "pp2 vpp2", 0, GPT2, f"{BUCKETS} --ddp-bucket-size 90 --vocab-size 100", layers=4
        ),
        ZERO,
    ),
    "objects of ep2": (Combination(2, "ep2", 0, ALLTOALL, DISTRIBUTED), ZERO),
    "fully reshardable tp2 pp2": (
        Combination(4, "tp2 pp2", 0, LLAMA, f"{DISTRIBUTED} --dist-ckpt-optim-fully-reshardable"),
        None,
    ),
    "not distributed, bf16, tp2": (Combination(2, "tp2", 0, LLAMA, "--bf16"), None),
    "not distributed, fp32": (Combination(2, "", 0, GPT2), None),
    "not distributed, bf16, ep2": (Combination(2, "ep2", 0, ALLTOALL, "--bf16"), None),
}
LAYOUTS = {
    "buckets": "dp_reshardable",
    "objects": ZERO,
    "fully": "fully_reshardable",
    "not": "non_distributed",
}


def written(
    run: Combination, folder: Path, layout: str | None = None, job: Callable[..., Any] = write
) -> State:
    """Two steps and a checkpoint; what the optimizer had."""
    return run_ranks(
        run.ranks, job, f"{run.line} --save {folder} --save-interval 2 --train-iters 2", layout
    )[0]


@pytest.mark.parametrize("name", RUNS)
def test_a_written_file_has_the_state_that_the_ranks_had(name, tmp_path):
    run, layout = RUNS[name]
    expected = written(run, tmp_path, layout)
    file = File(tmp_path)
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


def write_as_engine(command_line: str, layout: str | None) -> State | None:
    """Job: as `write`, with parameters in the order of Transformer Engine's layers with grouped experts."""
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


@pytest.mark.parametrize("model", [UNTIED, ALLTOALL], ids=["dense", "experts"])
def test_layers_of_transformer_engine_are_told_from_local_ones_by_the_chunks(model, tmp_path):
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
        [name for name, _ in unwrap(build(line).model[0]).named_parameters()]
        for line in command_lines
    ]


def test_registration_order_is_that_of_the_models():
    dense = [GPT2, f"{LLAMA} --qk-layernorm", f"{MLA} --qk-layernorm"]
    experts = [GATED_SHARED, f"{ALLTOALL} {BIAS}", f"{DEEPSEEK} {MTP}"]
    lines = [
        Combination(1, "", 0, model, layers=3 + (DEEPSEEK in model)).line
        for model in (*dense, *experts)
    ]
    for names in run_ranks(1, registered_names, *lines)[0]:
        assert sorted(names, key=key_rules.registration_order) == names


# ---- what is read
# ----------------------------------------------------------------------------------------------------


def test_rows_of_a_parameter_are_read_and_nothing_else(tmp_path):
    written(RUNS["buckets of tp2 dp2"][0], tmp_path)
    for file in (File(tmp_path), File(sample("v015_dense_tp2_dp2_model_space"))):
        found = file.read()
        for name, tensor in found.main.items():
            file.boxes.clear()
            rows = tensor.read_rows(1, 3)
            assert sum(file.boxes) == rows.numel(), name


@given(st.data())
def test_pieces_of_any_grid_are_put_together(data):
    grid = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    local = [data.draw(st.integers(1, 4)) for _ in grid]
    shape = [pieces * size for pieces, size in zip(grid, local)]
    lead = data.draw(st.integers(0, len(shape)))
    index = [data.draw(st.integers(0, size - 1)) for size in shape[:lead]]
    whole = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    interleaved = [size for pair in zip(grid, local) for size in pair]
    axes = [*range(0, 2 * len(grid), 2), *range(1, 2 * len(grid), 2)]
    pieces = whole.reshape(interleaved).permute(axes).reshape(*grid, -1)

    class Stored:
        shape = staticmethod(lambda key: tuple(pieces.shape))
        dtype = staticmethod(lambda key: pieces.dtype)

        @staticmethod
        def read_region(key: str, offsets: list[int], sizes: list[int]) -> torch.Tensor:
            return pieces[
                tuple(
                    slice(start, start + size) for start, size in zip(offsets, sizes, strict=True)
                )
            ]

    tensor = reformulated(Stored, "key", shape, index)
    expected = whole[tuple(index)]
    assert tensor.shape == tuple(expected.shape)
    assert torch.equal(tensor.read(), expected)
    if expected.dim():
        start = data.draw(st.integers(0, len(expected)))
        stop = data.draw(st.integers(start, len(expected)))
        assert torch.equal(tensor.read_rows(start, stop), expected[start:stop])


# ---- what is refused
# -------------------------------------------------------------------------------------------------


@pytest.fixture
def space() -> File:
    return File(sample("v015_dense_tp2_dp2_model_space"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Files of two pipeline stages with tied embeddings: as buckets, and as objects."""
    found = {name: tmp_path_factory.mktemp("written") for name in ("buckets", "objects")}
    for name, folder in found.items():
        written(
            Combination(2, "pp2", 0, GPT2, DISTRIBUTED), folder, ZERO if name == "objects" else None
        )
    return found


def test_keys_that_are_not_understood_are_named(space):
    space.stored.objects += [
        "optimizer.surprise/shard_0_1",
        "chained_1.optimizer.state.exp_avg.something/shard_0_1",
    ]
    with pytest.raises(
        ValueError, match=r"(?s)not understood.*optimizer\.surprise/.*chained_1\.optimizer\.state\."
    ):
        space.read()


def test_tensors_of_another_model_are_named_with_what_was_expected(space):
    del space.weights["output_layer.weight"]
    name = "decoder.final_layernorm.weight"
    space.weights[name] = LazyTensor((17,), torch.bfloat16, space.weights[name].read_rows)
    with pytest.raises(ValueError, match=r"(?s)has no output_layer\.weight") as error:
        space.read()
    assert f"(16,) for {name}, expected (17,)" in str(error.value)


def test_a_stored_shape_that_is_not_in_pieces_is_refused(space):
    key = "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight"
    space.stored.tensors[key] = copy.copy(space.stored.tensors[key])
    space.stored.tensors[key].size = torch.Size((2, 4, 1, 191))
    with pytest.raises(
        ValueError,
        match=r"linear_fc1\.weight: \(2, 4, 1, 191\) is not \(2, 48, 16\) in equal pieces",
    ):
        space.read()


def test_layouts_are_not_mixed(space):
    space.stored.objects.append("optimizer.distributed.dp_group_idx_0.param_state/shard_0_1")
    with pytest.raises(
        ValueError, match="several layouts: dp_zero_gather_scatter, fully_sharded_model_space"
    ):
        space.read()


@pytest.mark.parametrize("kind", ["buckets", "objects"])
def test_buckets_of_another_model_do_not_fit(kind, folders):
    file = File(folders[kind])
    file.weights = {
        name: tensor for name, tensor in file.weights.items() if ".layers.1." not in name
    }
    with pytest.raises(
        ValueError,
        match="buckets do not fit the model:\n  tensor parallelism of 1.* chunk 1 of the",
    ):
        file.read()


def test_sizes_that_ranks_stored_must_be_those_of_the_buckets(folders):
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
        match=r"dp_group_idx_1\.per_bucket_numel_unpadded/shard_0_1 says that the buckets have",
    ):
        file.read()


@pytest.mark.parametrize("slot", ["param", "exp_avg_sq"])
def test_copies_of_tied_embeddings_must_agree(slot, folders):
    file = File(folders["buckets"])
    read_region = file.stored.read_region

    def with_another_copy(key: str, offsets: Any, sizes: Any) -> torch.Tensor:
        box = read_region(key, offsets, sizes)
        return box + 1 if "dp_group_idx_1" in key and key.endswith(f".{slot}") else box

    file.stored.read_region = with_another_copy
    found = file.read()
    name = "embedding.word_embeddings.weight"
    tensor = found.main[name] if slot == "param" else found.moments[name][slot]
    with pytest.raises(
        ValueError,
        match=f"share embedding.word_embeddings.weight have different copies of its {slot}",
    ):
        tensor.read()
    found.moments[name]["exp_avg"].read()


def test_an_argument_that_is_needed_and_lacks_is_named(tmp_path):
    written(Combination(2, "tp2", 0, LLAMA, DISTRIBUTED), tmp_path, ZERO)
    with pytest.raises(
        ValueError, match=r"(?s)several layouts, .* lack transformer_impl:.*local.*Engine"
    ):
        File(tmp_path).without_arguments("transformer_impl").read()
