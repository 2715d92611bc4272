# SPDX-License-Identifier: Apache-2.0
"""Attributes and methods of the module work on the wrapper; methods compute as a forward does."""

import operator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from megatron.fsdp.dtensor.tensor_part import full_tensor
from tests.fsdp.test_hugging_face import LLAMA_LAYER, build_llama, build_tied_llama, tokens
from tests.support.fsdp.models import WIDTH, ResidualBlock
from tests.support.fsdp.reference import (
    Ranks,
    batch,
    close,
    on_ranks,
    shard_with_sgd,
    shown_gradients,
)


class Scorer(nn.Module):
    """A model that computes outside of its forward too."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"width": WIDTH}
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.5))
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(ResidualBlock() for _ in range(2))
        self.double()

    def encode(self, x: Tensor) -> Tensor:
        x = self.embed(x * self.scale)
        for block in self.blocks:
            x = block(x)
        return x @ self.embed.weight

    def num_weights(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def fail(self) -> Tensor:
        raise KeyError(f"with {self.scale.sum()}")

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x).sum(-1)


def build_scorer() -> Scorer:
    torch.manual_seed(2)
    return Scorer()


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [0, 1, 3])
@on_ranks(2)
def test_methods_of_the_module_compute_as_its_forward_does(level: int) -> None:
    reference, module = build_scorer(), build_scorer()
    model, optimizer = shard_with_sgd(
        module,
        fsdp_unit_modules=[ResidualBlock],
        zero_dp_strategy=level,
        preserve_fp32_weights=False,
    )
    expected_optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    assert model.config == {"width": WIDTH} and len(model.blocks) == 2
    assert model.num_weights() == reference.num_weights()
    x = batch(0, 0, 0)
    for call in ("encode", "forward", "encode"):
        with torch.no_grad():
            close(model.encode(x), reference.encode(x), "encoding")
        loss, expected = ((getattr(each, call)(x)).square().sum() for each in (model, reference))
        close(loss, expected, call)
        loss.backward()
        expected.backward()
        actual = shown_gradients(model)
        for name, parameter in reference.named_parameters():
            close(full_tensor(actual[f"module.{name}"]), parameter.grad, name)
        for each in (optimizer, expected_optimizer):
            each.step()
            each.zero_grad()
        with pytest.raises(KeyError):
            model.fail()
    if level == 3:
        model.eval()
        with torch.no_grad():
            model.encode(x)
        assert {group.state.name for group in model.groups} == {"SHARDED"}


def ask_one_rank() -> int:
    model, _ = shard_with_sgd(build_scorer())
    with pytest.raises(AttributeError, match=r"Scorer.*nothing"):
        model.nothing  # noqa: B018  # reading it is the test
    return model.num_weights() if dist.get_rank() == 0 else 0


def test_a_method_that_reads_no_weights_waits_for_no_rank(ranks: Ranks) -> None:
    assert ranks(2, ask_one_rank) == [build_scorer().num_weights(), 0]


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [1, 3])
@on_ranks(2)
def test_generation_of_different_lengths_ends(level: int) -> None:
    """Rank 0 ends after one token, rank 1 after six."""
    reference, module = build_llama(), build_llama()
    model, _ = shard_with_sgd(
        module, fsdp_unit_modules=[LLAMA_LAYER], zero_dp_strategy=level, preserve_fp32_weights=False
    )
    prompt = tokens(dist.get_rank(), 0)
    settings = {"max_new_tokens": 1 if dist.get_rank() == 0 else 6, "do_sample": False}
    expected = reference.generate(prompt, **settings)
    with torch.no_grad():
        assert torch.equal(model.generate(prompt, **settings), expected)
        assert torch.equal(model.module.generate(prompt, **settings), expected)


def save_pretrained(path: str, is_tied: bool) -> list[str]:
    build = build_tied_llama if is_tied else build_llama
    module = build()
    model, _ = shard_with_sgd(module, fsdp_unit_modules=[LLAMA_LAYER], preserve_fp32_weights=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    model.module.save_pretrained(f"{path}/inside")
    model.save_pretrained(f"{path}/wrapper")
    problems = []
    for folder in ("inside", "wrapper"):
        loaded = type(module).from_pretrained(f"{path}/{folder}", dtype=torch.float64)
        for name, value in build().state_dict().items():
            if not torch.equal(loaded.state_dict()[name], value + 1.0):
                problems.append(f"{folder}: {name}")
    return problems


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_save_pretrained_writes_whole_weights(ranks: Ranks, tmp_path: Path, is_tied: bool) -> None:
    assert ranks(2, save_pretrained, str(tmp_path), is_tied) == [[], []]


def fail_to_save(path: str) -> str:
    model, _ = shard_with_sgd(build_llama())
    with pytest.raises(RuntimeError) as error:
        model.save_pretrained(path, max_shard_size="a lot")
    return str(error.value)


def test_a_failed_save_pretrained_is_an_error_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(2, fail_to_save, str(tmp_path))
    assert first == second
    assert "rank 0" in first


@on_ranks(2)
def test_one_rank_saves_weights_that_it_was_given(tmp_path: Path) -> None:
    """Run the usual code for a model whose weights were gathered by torch's own function."""
    module = build_llama()
    model, _ = shard_with_sgd(module)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model.module, options=options)
    if dist.get_rank() == 0:
        model.module.save_pretrained(tmp_path, state_dict=weights)
    dist.barrier()
    loaded = type(module).from_pretrained(tmp_path, dtype=torch.float64)
    expected = build_llama().state_dict()
    assert all(torch.allclose(loaded.state_dict()[name], expected[name]) for name in expected)


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [0, 3])
@on_ranks(2)
def test_moving_an_inner_module_leaves_its_weights_in_their_shards(level: int) -> None:
    module = build_scorer()
    module.register_buffer("offset", torch.zeros(2, dtype=torch.float64))
    model, optimizer = shard_with_sgd(module, zero_dp_strategy=level, preserve_fp32_weights=False)
    before = list(model.parameters())
    model.module.to("cpu")
    model.module.embed.double()
    with pytest.raises(NotImplementedError, match="cannot be moved or converted"):
        model.module.half()
    model(batch(0, dist.get_rank(), 0)).sum().backward()
    optimizer.step()
    after = list(model.parameters())
    assert len(before) == len(after) and all(map(operator.is_, before, after))
    assert all(each.grad is not None for each in after)
    assert optimizer.state_dict()
