# SPDX-License-Identifier: Apache-2.0
"""One test for each defect that a reviewer found in the engine, named by what must hold."""

import collections
import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.fsdp import (
    DistributedDataParallelConfig,
    FSDPDistributedIndex,
    MegatronFSDP,
    MixedPrecisionPolicy,
    fully_shard,
    fully_shard_model,
)
from megatron.fsdp.dtensor.uneven import full_tensor
from megatron.fsdp.engine.param_group import ParamGroup
from tests.fsdp import random_models
from tests.fsdp.reference import Case, Meshes, compare
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
        before = self._all_gather
        original(self)
        if self._all_gather is not None and self._all_gather is not before:
            counts[self.names[0]] += 1

    net = Tied()
    model, optimizer = fully_shard(
        net,
        torch.optim.SGD(net.parameters(), lr=0.1),
        fsdp_unit_modules=[Layer, nn.Embedding, Output],
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
    counts, _ = ranks(2, gathers_per_step)
    assert {name: count for name, count in counts.items() if "layers" in name} == {
        f"layers.{number}.linear.weight": 2 for number in range(3)
    }
    assert counts["embedding.weight"] <= 4


def large_fp16_gradients() -> bool:
    net = nn.Linear(64, 64).half()
    model = fully_shard_model(net, report_nan_in_param_grad=True, zero_dp_strategy=1)
    model(torch.full((4, 64), 40.0, dtype=torch.float16)).float().mul(20).sum().backward()
    return all(
        torch.isfinite(parameter.grad._local_tensor).all().item()
        for parameter in model.parameters()
    )


def test_finite_fp16_gradients_whose_sum_overflows_are_no_alarm() -> None:
    assert ranks(2, large_fp16_gradients) == [True, True]


def main_weights_around_a_broadcast(level: int) -> bool:
    net = nn.Linear(8, 8).bfloat16()
    model, optimizer = fully_shard(
        net, torch.optim.AdamW(net.parameters(), lr=1e-5), zero_dp_strategy=level
    )
    model(torch.randn(2, 8, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    before = [full_tensor(parameter) for parameter in model.parameters()]
    model.broadcast_params()
    return all(
        torch.equal(left, full_tensor(right)) for left, right in zip(before, model.parameters())
    )


@pytest.mark.parametrize("level", range(4))
def test_a_broadcast_keeps_fp32_main_weights(level: int) -> None:
    assert ranks(2, main_weights_around_a_broadcast, level) == [True, True]


def outputs_without_install(level: int) -> list[float]:
    net = nn.Linear(8, 8)
    model, optimizer = fully_shard(
        net, torch.optim.SGD(net.parameters(), lr=0.5), zero_dp_strategy=level
    )
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
    other = MegatronFSDP(
        nn.Linear(4, 4),
        FSDPDistributedIndex(),
        config,
        MixedPrecisionPolicy(main_params_dtype=torch.float64),
    )
    precision = model.groups[0].precision
    return (
        precision.main_param,
        precision.main_grad,
        model._report_nan,
        other.groups[0].precision.main_param,
    )


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
    model = fully_shard_model(
        net, fsdp_unit_modules=[Layer], zero_dp_strategy=level, sync_model_each_microbatch=False
    )
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
    return all(
        torch.equal(left, full_tensor(right.grad)) for left, right in zip(once, model.parameters())
    ) and bool(dist.get_world_size())


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
        net,
        torch.optim.SGD(net.parameters(), lr=0.1),
        zero_dp_strategy=2,
        overlap_param_gather=overlap,
    )
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    return {group.state.name for group in model.groups}


def test_gathers_after_a_step_overlap_only_if_asked_to() -> None:
    assert ranks(2, states_after_a_step, False) == [{"UNSHARDED"}] * 2
    assert ranks(2, states_after_a_step, True) == [{"UNSHARDING"}] * 2


def train_drawn(case: Case) -> None:
    compare(case, Meshes())


def test_a_block_called_plainly_and_then_recomputed_keeps_its_weights_to_the_end() -> None:
    """The pass inside a reentrant checkpoint brought all gradients of the whole model's unit, which was freed; the plain call
    of the same block was still to come. Found by fuzzing (seed 12, draw 872).
    """
    first = random_models.Layer(3, norm=True, recompute="reentrant", calls=2, frozen=("up", "down"))
    drawn = random_models.Drawn((first, random_models.Layer(2)), frozen_embedding=True)
    for level in (2, 3):
        settings = {
            "zero_dp_strategy": level,
            "disable_bucketing": True,
            "overlap_grad_reduce": False,
        }
        ranks(2, train_drawn, Case(model=drawn, settings=settings))


class Tree(nn.Module):
    """Calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        if depth == 0:
            return self.linear(x) * self.scale
        return self(x, depth - 1) + self.linear(self(x * 2, depth - 1)) * self.scale


def train_a_tree() -> None:
    torch.manual_seed(0)
    module = Tree().double()
    reference = copy.deepcopy(module)
    model = fully_shard_model(module, preserve_fp32_weights=False)
    for step in range(2):
        x = torch.full((2, 4), step + 1.0, dtype=torch.float64)
        for each in (model, reference):
            each.zero_grad()
            each(x).pow(2).mean().backward()
        for sharded, parameter in zip(model.parameters(), reference.parameters()):
            torch.testing.assert_close(full_tensor(sharded.grad), parameter.grad)


def test_a_model_may_call_itself() -> None:
    ranks(2, train_a_tree)


def two_layers(level: int = 3, **settings: object) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    return fully_shard(
        module, torch.optim.AdamW(module.parameters(), lr=0.1), zero_dp_strategy=level, **settings
    )


def whole_weights(model: MegatronFSDP) -> list[torch.Tensor]:
    return [full_tensor(parameter) for parameter in model.parameters()]


def write_after_steps(level: int) -> None:
    model, optimizer = two_layers(level)
    wanted = {name: torch.full(value.shape, 0.25) for name, value in model.state_dict().items()}
    for _ in range(12):
        model(torch.randn(4, 64)).sum().backward()
        optimizer.step()
        model.load_state_dict(wanted)
        assert all(bool((weight == 0.25).all()) for weight in whole_weights(model))
        expected = torch.full((4, 64), 0.25 + 64 * 0.25 * (0.25 + 64 * 0.25))
        torch.testing.assert_close(model(torch.ones(4, 64)), expected)


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_weights_written_after_a_step_are_not_overwritten_by_its_gather(level: int) -> None:
    """Gloo writes a rank's own part too, at any time before an in-place gather ends."""
    ranks(2, write_after_steps, level)


def build_in_two_ways() -> str:
    with torch.device("meta" if dist.get_rank() else "cpu"):
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(ValueError) as error:
        fully_shard_model(module, init_model_with_meta_device=True)
    return str(error.value)


def test_ranks_must_agree_on_what_is_on_the_meta_device() -> None:
    first, second = ranks(2, build_in_two_ways)
    assert first == second and "on meta" in first


def freeze_inside(level: int) -> None:
    model, optimizer = two_layers(level)
    model(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.module[0].requires_grad_(False)
    before = whole_weights(model)
    model(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    assert [bool(torch.equal(old, new)) for old, new in zip(before, whole_weights(model))] == [
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_freezing_the_modules_own_parameters_counts(level: int) -> None:
    ranks(2, freeze_inside, level)


def scale_early(level: int) -> None:
    results = []
    x = torch.ones(4, 64)
    for factor in (1.0, 0.5):
        model, _ = two_layers(level, sync_model_each_microbatch=False)
        model(x).sum().backward()
        if factor != 1.0:
            model.scale_gradients(factor)
        model.finish_grad_sync()
        results.append([full_tensor(parameter.grad) for parameter in model.parameters()])
    for whole, half in zip(*results):
        torch.testing.assert_close(half, whole / 2)


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_gradients_are_scaled_whether_reduced_or_not(level: int) -> None:
    ranks(2, scale_early, level)


def scale_after_clipping() -> None:
    torch.manual_seed(0)
    module = nn.Linear(8, 8).bfloat16()
    model, _ = fully_shard(module, torch.optim.AdamW(module.parameters()))
    model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    model.scale_gradients(2.0)
    norm = float(
        torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    )
    assert norm == pytest.approx(2e-3, rel=1e-2)


def test_scaling_gradients_does_not_undo_clipping() -> None:
    ranks(2, scale_after_clipping)


def clear_one() -> None:
    model, _ = two_layers()
    x = torch.ones(4, 64)
    model(x).sum().backward()
    once = [full_tensor(parameter.grad) for parameter in model.parameters()]
    next(model.parameters()).grad = None
    model(x).sum().backward()
    now = [full_tensor(parameter.grad) for parameter in model.parameters()]
    for number, (first, second) in enumerate(zip(once, now)):
        torch.testing.assert_close(second, first * (2 if number else 1))


def test_the_gradient_of_one_parameter_can_be_cleared() -> None:
    ranks(2, clear_one)


def look_inside_after_a_step(level: int) -> None:
    model, optimizer = two_layers(level)
    for _ in range(4):
        model(torch.randn(4, 64)).sum().backward()
        optimizer.step()
        inside = model.module.state_dict().values()
        for shown, weight in zip(inside, whole_weights(model)):
            assert torch.equal(full_tensor(shown) if isinstance(shown, DTensor) else shown, weight)
        optimizer.zero_grad()


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_the_module_inside_shows_the_weights_of_the_last_step(level: int) -> None:
    ranks(2, look_inside_after_a_step, level)


def move_a_target(level: int) -> None:
    torch.manual_seed(0)
    module = nn.Linear(8, 8).requires_grad_(False)
    model = fully_shard_model(nn.Sequential(module, nn.Linear(8, 8)), zero_dp_strategy=level)
    for parameter in model.parameters():
        parameter.detach()._local_tensor.zero_()
    model.install_optimized_model_weights()
    assert model(torch.ones(1, 8)).abs().max() == 0


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_weights_of_frozen_parameters_can_be_installed(level: int) -> None:
    ranks(2, move_a_target, level)


class ForceField(nn.Module):
    """Differentiates inside its forward, and goes on with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Linear(4, 1)
        self.shift = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (force,) = torch.autograd.grad((self.energy(x) * self.shift.sum()).sum(), x)
        return force + self.shift


def differentiate_inside() -> None:
    torch.manual_seed(0)
    module = ForceField()
    reference = copy.deepcopy(module)
    model = fully_shard_model(
        nn.Sequential(module), fsdp_unit_modules=[ForceField], preserve_fp32_weights=False
    )
    for _ in range(2):
        torch.testing.assert_close(model(torch.ones(2, 4)), reference(torch.ones(2, 4)))


def test_a_forward_that_differentiates_keeps_its_weights() -> None:
    ranks(2, differentiate_inside)


def train_a_sparse_embedding() -> None:
    torch.manual_seed(0)
    module = nn.Embedding(16, 4, sparse=True)
    reference = nn.Embedding.from_pretrained(module.weight.detach().clone(), freeze=False)
    model = fully_shard_model(module, preserve_fp32_weights=False)
    tokens = torch.tensor([1, 2, 2, 15])
    for each in (model, reference):
        each(tokens).pow(2).sum().backward()
    torch.testing.assert_close(full_tensor(next(model.parameters()).grad), reference.weight.grad)


def test_sparse_gradients_become_dense() -> None:
    ranks(2, train_a_sparse_embedding)
