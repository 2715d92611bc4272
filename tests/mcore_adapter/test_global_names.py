# SPDX-License-Identifier: Apache-2.0
"""Names of parameters: under every layout those of the whole model, equal for copies only."""

from __future__ import annotations

import pytest
from megatron.core import parallel_state
from torch import nn

from megatron.mcore_adapter.global_names import GlobalNames
from megatron.pretrain.arguments.configs import transformer_config
from megatron.pretrain.model.gpt_model import build_chunk
from tests.support.pretrain.parity import ALLTOALL, DEEPSEEK, GPT2, LLAMA, MTP, UNTIED, Combination
from tests.support.pretrain.training_runs import prepare
from tests.support.rank_pool import run_ranks

Place = tuple[int, int]  # pipeline stage, expert rank


def names_of_rank(line: str) -> tuple[Place, list[str]]:
    """Job: return the coordinates of the rank and the global names of its model chunks' entries."""
    args, device = prepare(line)
    stages = args.virtual_pipeline_model_parallel_size
    names = []
    for stage in range(stages) if stages else [None]:
        chunk = build_chunk(args, transformer_config(args), 100, device, stage)
        translation = GlobalNames(chunk)
        for key in chunk.state_dict():
            name = translation.to_global(key)
            assert translation.to_local(name) == key
            assert translation.to_global(f"module.module.{key}") == f"module.module.{name}"
            names.append(name)
    return (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_expert_model_parallel_rank(),
    ), names


def names_by_place(ranks: int, layout: str, model: str) -> dict[Place, set[str]]:
    """Of ranks at the same place, the names of one; all of them are different on a rank."""
    result = {}
    for place, names in run_ranks(
        ranks, names_of_rank, Combination(ranks, layout, 3, model, layers=4).ours
    ):
        assert len(set(names)) == len(names)
        assert result.setdefault(place, set(names)) == set(names)
    return result


WORDS = "embedding.word_embeddings.weight"


STAGES = {
    "untied": (2, "pp2", UNTIED, set()),
    "tied": (2, "pp2", GPT2, {WORDS}),
    "four_stages": (4, "pp4", GPT2, {WORDS}),
    "tied_virtual_stages": (2, "pp2 vpp2", GPT2, {WORDS}),
    "virtual_stages": (2, "pp2 vpp2", LLAMA, set()),
    "mtp": (2, "pp2", f"{LLAMA} {MTP}", {WORDS}),
    "experts": (4, "pp2 ep2", DEEPSEEK, set()),
}


@pytest.mark.always("untied", "virtual_stages")
@pytest.mark.parametrize(("ranks", "layout", "model", "common"), STAGES.values(), ids=STAGES)
def test_stages_have_the_names_of_the_whole_model_between_them(
    ranks: int, layout: str, model: str, common: set[str]
) -> None:
    ((_, whole),) = names_by_place(1, "dp", model).items()
    stages: dict[int, set[str]] = {}
    for (stage, _), names in names_by_place(ranks, layout, model).items():
        stages.setdefault(stage, set()).update(names)
    assert set().union(*stages.values()) == whole
    first, *others = stages.values()
    assert first & set().union(*others) == common
    assert sum(map(len, stages.values())) == len(whole) + len(common)


def test_expert_ranks_have_their_own_experts_and_all_of_the_rest() -> None:
    ((_, whole),) = names_by_place(1, "dp", ALLTOALL).items()
    first, second = names_by_place(2, "ep2", ALLTOALL).values()
    assert first | second == whole
    experts = {name for name in whole if ".local_experts." in name}
    assert first & second == whole - experts
    assert {name for name in first if ".local_experts.1." in name}
    assert {name for name in second if ".local_experts.3." in name}


def test_names_of_one_rank_are_the_modules_own() -> None:
    names = set(names_by_place(1, "dp", f"{DEEPSEEK} {MTP}")[0, 0])
    assert {
        WORDS,
        "decoder.layers.3.mlp.experts.local_experts.3.linear_fc2.weight",
        "output_layer.weight",
    } <= names
    assert any(name.startswith("mtp.layers.0.") for name in names)


class Rank:
    """Stands in for a process group."""

    def __init__(self, number: int) -> None:
        self._number = number

    def rank(self) -> int:
        return self._number


class GroupedExperts(nn.Module):
    """Grouped experts of Transformer Engine, with ``weight0``, ``weight1``, … and biases."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.ep_group, self.num_local_experts = Rank(rank), 2
        for layer in ("linear_fc1", "linear_fc2"):
            names = ["weight0", "weight1", "bias0", "bias1"]
            self.add_module(layer, nn.ParameterDict({name: nn.Parameter() for name in names}))


class GroupedLayer(nn.Module):
    """The second layer of a model, as the first one of its stage."""

    layer_number = 2

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.experts = GroupedExperts(rank)
        self.router = nn.Linear(2, 2)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_weights_of_grouped_experts_are_numbered_across_expert_ranks(rank: int) -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([GroupedLayer(rank)])})
    names = GlobalNames(model)
    for layer in ("linear_fc1", "linear_fc2"):
        for kind in ("weight", "bias"):
            for number in (0, 1):
                key = f"layers.0.experts.{layer}.{kind}{number}"
                name = f"layers.1.experts.{layer}.{kind}{2 * rank + number}"
                assert (names.to_global(key), names.to_local(name)) == (name, key)
    assert names.to_global("layers.0.router.weight") == "layers.1.router.weight"
    assert names.to_local("layers.0.router.weight") == "layers.0.router.weight"  # of another stage
