# SPDX-License-Identifier: Apache-2.0
"""One test for each defect that a reviewer found in the engine, named by what must hold."""

import collections

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.fsdp import (
    DistributedDataParallelConfig,
    FSDPDistributedIndex,
    MegatronFSDP,
    MixedPrecisionPolicy,
    fully_shard,
    fully_shard_model,
)
from megatron.fsdp.param_group import ParamGroup
from megatron.fsdp.sharded_param import full_tensor
from tests.rank_pool import run_ranks as ranks


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Output(nn.Module):
    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x @ weight.t()


class Tied(nn.Module):
    """The output layer takes the embedding's weight as an argument, as Megatron-Core's does."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.Sequential(*[Layer() for _ in range(3)])
        self.output = Output()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.output(self.layers(self.embedding(tokens)), weight=self.embedding.weight)


def input_gradients() -> bool:
    torch.manual_seed(0)
    net = nn.Sequential(Layer(), Layer())
    x = torch.randn(3, 8, requires_grad=True)
    (expected,) = torch.autograd.grad(net(x).sum(), x)
    model = fully_shard_model(net, fsdp_unit_modules=[Layer])
    (actual,) = torch.autograd.grad(model(x).sum(), x)
    (again,) = torch.autograd.grad(model(x).sum(), x)
    return torch.equal(expected, actual) and torch.equal(expected, again)


def test_gradients_of_inputs_alone_can_be_asked_for() -> None:
    assert ranks(2, input_gradients) == [True, True]


def gathers_per_step() -> dict[str, int]:
    counts: collections.Counter = collections.Counter()
    original = ParamGroup.unshard

    def counting(self: ParamGroup) -> None:
        before = self._gather
        original(self)
        if self._gather is not None and self._gather is not before:
            counts[self.names[0]] += 1

    net = Tied()
    model, optimizer = fully_shard(
        net, torch.optim.SGD(net.parameters(), lr=0.1), fsdp_unit_modules=[Layer, nn.Embedding, Output]
    )
    tokens = torch.randint(16, (2, 4))
    for step in range(3):
        if step == 2:
            ParamGroup.unshard = counting
        model(tokens).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    ParamGroup.unshard = original
    return dict(counts)


def test_a_borrowed_unit_does_not_waste_gathers() -> None:
    """Two gathers of every layer; the embedding is needed at both ends of both passes."""
    (counts, _) = ranks(2, gathers_per_step)
    assert {name: count for name, count in counts.items() if "layers" in name} == {
        f"layers.{number}.linear.weight": 2 for number in range(3)
    }
    assert counts["embedding.weight"] <= 4


def large_fp16_gradients() -> bool:
    net = nn.Linear(64, 64).half()
    model = fully_shard_model(net, report_nan_in_param_grad=True, zero_dp_strategy=1)
    model(torch.full((4, 64), 40.0, dtype=torch.float16)).float().mul(20).sum().backward()
    return all(torch.isfinite(parameter.grad._local_tensor).all().item() for parameter in model.parameters())


def test_finite_fp16_gradients_whose_sum_overflows_are_no_alarm() -> None:
    assert ranks(2, large_fp16_gradients) == [True, True]


def main_weights_around_a_broadcast(level: int) -> bool:
    net = nn.Linear(8, 8).bfloat16()
    model, optimizer = fully_shard(net, torch.optim.AdamW(net.parameters(), lr=1e-5), zero_dp_strategy=level)
    model(torch.randn(2, 8, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    before = [full_tensor(parameter) for parameter in model.parameters()]
    model.broadcast_params()
    return all(torch.equal(left, full_tensor(right)) for left, right in zip(before, model.parameters()))


@pytest.mark.parametrize("level", range(4))
def test_a_broadcast_keeps_fp32_main_weights(level: int) -> None:
    assert ranks(2, main_weights_around_a_broadcast, level) == [True, True]


def outputs_without_install(level: int) -> list[float]:
    net = nn.Linear(8, 8)
    model, optimizer = fully_shard(net, torch.optim.SGD(net.parameters(), lr=0.5), zero_dp_strategy=level)
    x = torch.ones(1, 8)
    model(x).sum().backward()
    optimizer.step(install_optimized_model_weights=False)
    return model(x).tolist()[0]


@pytest.mark.parametrize("level", range(4))
def test_ranks_agree_on_the_weights_after_a_step_that_installs_none(level: int) -> None:
    first, second = ranks(2, outputs_without_install, level)
    assert first == second


def precision_of_config() -> tuple:
    config = DistributedDataParallelConfig(
        data_parallel_sharding_strategy="optim",
        check_for_nan_in_grad=True,
        megatron_fsdp_main_params_dtype=torch.bfloat16,
        megatron_fsdp_main_grads_dtype=torch.float32,
    )
    model = MegatronFSDP(nn.Linear(4, 4).bfloat16(), FSDPDistributedIndex(), config)
    other = MegatronFSDP(nn.Linear(4, 4), FSDPDistributedIndex(), config, MixedPrecisionPolicy(main_params_dtype=torch.float64))
    precision = model.groups[0].precision
    return precision.main_param, precision.main_grad, model._report_nan, other.groups[0].precision.main_param


def test_the_fields_of_the_config_are_used() -> None:
    assert ranks(1, precision_of_config) == [(torch.bfloat16, torch.float32, True, torch.float64)]


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * x


def nadam_on_a_scalar() -> float:
    torch.manual_seed(0)
    net = Scaled()
    optimizer = torch.optim.NAdam(net.parameters(), lr=0.1)
    net(torch.ones(2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model, optimizer = fully_shard(net, optimizer)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    return full_tensor(next(model.parameters())).item()


def test_counters_of_a_scalar_parameter_are_not_sharded() -> None:
    net = Scaled()
    optimizer = torch.optim.NAdam(net.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.ones(2)).sum().backward()
        optimizer.step()
    assert ranks(2, nadam_on_a_scalar) == pytest.approx([net.scale.item()] * 2)


def gradients_after_a_failed_backward(level: int) -> bool:
    net = nn.Sequential(Layer(), Layer())
    model = fully_shard_model(net, fsdp_unit_modules=[Layer], zero_dp_strategy=level, sync_model_each_microbatch=False)
    x = torch.randn(2, 8)

    def explode(gradient: torch.Tensor) -> None:
        raise RuntimeError("boom")

    with model.no_sync():
        model(x).sum().backward()
        hidden = model.module[0](x)
        hidden.register_hook(explode)
    with pytest.raises(RuntimeError, match="boom"), model.no_sync():
        hidden = model(x)
        broken = hidden * 1
        hidden.register_hook(explode)
        broken.sum().backward()
    model(x).sum().backward()
    model.finish_grad_sync()
    once = [full_tensor(parameter.grad) for parameter in model.parameters()]
    model.zero_grad()
    model(x).sum().backward()
    model.finish_grad_sync()
    return all(torch.equal(left, full_tensor(right.grad)) for left, right in zip(once, model.parameters())) and bool(dist.get_world_size())


@pytest.mark.parametrize("level", range(4))
def test_after_a_failed_backward_every_level_begins_anew(level: int) -> None:
    assert ranks(2, gradients_after_a_failed_backward, level) == [True, True]


def load_by_assignment() -> str:
    model = fully_shard_model(nn.Linear(4, 4))
    with pytest.raises(NotImplementedError) as error:
        model.load_state_dict(model.state_dict(), assign=True)
    return str(error.value)


def test_assigning_a_state_dict_is_refused_not_ignored() -> None:
    assert all("assign" in message for message in ranks(1, load_by_assignment))


def states_after_a_step(overlap: bool) -> set[str]:
    net = nn.Linear(8, 8)
    model, optimizer = fully_shard(
        net, torch.optim.SGD(net.parameters(), lr=0.1), zero_dp_strategy=2, overlap_param_gather=overlap
    )
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    return {group.state.name for group in model.groups}


def test_gathers_after_a_step_overlap_only_if_asked_to() -> None:
    assert ranks(2, states_after_a_step, False) == [{"UNSHARDED"}] * 2
    assert ranks(2, states_after_a_step, True) == [{"GATHERING"}] * 2
