# SPDX-License-Identifier: Apache-2.0
"""Owners of matrices that tensor parallelism divides, of experts, and their assignment to ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.fsdp.optimizer.matrix.owners import UpdateCost, assign, cost_of, steps_whole_matrices
from megatron_fsdp import fully_shard, fully_shard_model, fully_shard_optimizer
from tests.fsdp import test_expert_tensor_parallel as with_experts
from tests.fsdp import test_tensor_parallel as divided
from tests.support.fsdp.optimizers import IN_ONE_GROUP
from tests.support.fsdp.reference import Ranks, close, on_ranks
from tests.support.fsdp.wrong_calls import message_of

EXACT = 1e-9
"""For float64: Muon iterates in bfloat16, to which a difference of 1e-16 is nothing."""


def optimizers_of(model: nn.Module) -> list[torch.optim.Optimizer]:
    parameters = list(model.parameters())
    matrices = [parameter for parameter in parameters if parameter.ndim == 2]
    others = [parameter for parameter in parameters if parameter.ndim != 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.02)]


def assert_owned(optimizer: torch.optim.Optimizer) -> None:
    """Check that momentum is whole on one rank of those that have a parameter, and empty else."""
    for parameter, slots in optimizer.state.items():
        momentum = slots["momentum_buffer"]
        own = momentum.to_local().numel()
        assert own in (0, parameter.numel())
        total = torch.tensor(own)
        for number in range(momentum.device_mesh.ndim):
            dist.all_reduce(total, group=momentum.device_mesh.get_group(number))
        assert int(total) == parameter.numel()


def step_all(optimizers: list[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def compare(model: nn.Module, reference: nn.Module, step: int) -> None:
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        wanted = expected[name.removeprefix("module.")].detach()
        close(divided.whole(parameter), wanted, f"weight after step {step}: {name}", EXACT)


def train_divided(mesh: str, level: int, hidden: int, style: str, outer: int) -> None:
    place = divided.mesh_arguments(mesh)
    data_rank, data_size = divided.data_place(place["device_mesh"])
    reference = divided.build(hidden)
    module = divided.split(divided.build(hidden), place["device_mesh"]["tp"], style)
    expected = optimizers_of(reference)
    settings = {"zero_dp_strategy": level, "preserve_fp32_weights": False}
    model, optimizers = fully_shard(
        module,
        optimizers_of(module),
        fsdp_unit_modules=[divided.SplitBlock],
        outer_dp_sharding_strategy=outer,
        **place,
        tp_dim="tp",
        **settings,
    )
    for step in range(3):
        for rank in range(data_size):
            (divided.loss_on(reference, step, rank) / data_size).backward()
        divided.loss_on(model, step, data_rank).backward()
        step_all(expected)
        step_all(optimizers)
        compare(model, reference, step)
    if style == "tensor" and hidden % 2 == 0:  # otherwise some slices are uneven
        assert_owned(optimizers[0])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("level", "style"), [(0, "tensor"), (1, "sequence"), (3, "tensor"), (3, "sequence")]
)
def test_owners_get_all_slices_of_tensor_parallel_matrices(
    ranks: Ranks, level: int, style: str
) -> None:
    ranks(4, train_divided, "dp2_tp2", level, 10, style, 0)


@pytest.mark.exhaustive
def test_slices_of_unequal_sizes_are_gathered(ranks: Ranks) -> None:
    ranks(4, train_divided, "dp2_tp2", 3, 7, "tensor", 0)


@pytest.mark.exhaustive
def test_hybrid_sharding_with_tensor_parallel_matrices(ranks: Ranks) -> None:
    ranks(8, train_divided, "outer2_dp2_tp2", 3, 10, "tensor", 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "level"), [("plain", 3), ("over_four", 1), ("over_one", 0)])
@on_ranks(4)
def test_matrices_of_experts_have_owners_on_their_own_mesh(kind: str, level: int) -> None:
    module, place = with_experts.parallelized(kind)
    reference = with_experts.build()
    expected = optimizers_of(reference)
    settings = {"zero_dp_strategy": level, "preserve_fp32_weights": False}
    model, optimizers = fully_shard(
        module,
        optimizers_of(module),
        fsdp_unit_modules=[with_experts.LayerWithExpert],
        **place,
        **settings,
    )
    for step in range(2):
        for rank in range(2):
            (with_experts.loss_on(reference, step, rank) / 2).backward()
        with_experts.loss_on(model, step, dist.get_rank() // 2).backward()
        step_all(expected)
        step_all(optimizers)
        compare(model, reference, step)
    assert_owned(optimizers[0])


# ---- assignment


def loads_of(costs: list[UpdateCost], num_ranks: int) -> list[int]:
    loads = [0] * num_ranks
    for pairs in assign(costs, [range(num_ranks)] * len(costs))[0]:
        assert len({owner for _, owner in pairs}) == len(pairs) <= num_ranks
        for index, owner in pairs:
            loads[owner] += costs[index].flops
    return loads


def test_owners_have_equal_work_to_within_one_matrix() -> None:
    shapes = [(64, 192), (64, 64), (64, 256), (256, 64)] * 5 + [(512, 64)]
    costs = [cost_of(shape, 4) for shape in shapes]
    for num_ranks in (1, 2, 3, 8, 40):
        loads = loads_of(costs, num_ranks)
        assert sum(loads) == sum(cost.flops for cost in costs)
        assert max(loads) - min(loads) <= max(cost.flops for cost in costs)


def test_a_matrix_costs_what_its_products_cost() -> None:
    # X X^T, A A and B X of X (2, 3): 2 * (2 * 2 * 3 + 2 * 2 * 2 + 2 * 2 * 3) for each iteration.
    assert cost_of((2, 3), 4, steps=5) == cost_of((3, 2), 4, steps=5) == UpdateCost(5 * 64, 24)


def test_equal_flops_are_balanced_by_bytes() -> None:
    wide, narrow = UpdateCost(8, 4), UpdateCost(8, 1)
    rounds, most = assign([wide, narrow, narrow, narrow], [range(2)] * 4)
    assert most == 16
    assert rounds == [[(0, 0), (1, 1)], [(2, 1), (3, 0)]]


# ---- errors


def wrong_lists() -> list[str]:
    """Return the messages of wrong calls, each of which changes nothing."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    muon = torch.optim.Muon([module[0].weight], lr=0.02)
    muon.add_param_group({"params": [module[0].bias, module[1].bias]})  # torch checks the first
    adamw = torch.optim.AdamW(module.parameters())
    messages = [message_of(ValueError, fully_shard, module, [muon, adamw, "sgd"])]
    assert type(muon) is torch.optim.Muon and type(module[0].weight) is nn.Parameter
    model = fully_shard_model(nn.Linear(4, 4))
    optimizer = torch.optim.Muon([next(model.parameters())], lr=0.02)
    optimizer.add_param_group({"params": list(model.parameters())[1:]})
    messages.append(message_of(ValueError, fully_shard_optimizer, optimizer))
    for wrong in (torch.optim.AdamW, nn.Linear, 3):
        messages.append(message_of(ValueError, steps_whole_matrices, wrong))
    return messages


def test_wrong_lists_of_optimizers_are_refused_alike_on_every_rank(ranks: Ranks) -> None:
    first, second = ranks(2, wrong_lists)
    assert first == second
    both, sharded, *undeclared = first
    assert "Muon updates matrices, but got 2 other parameters" in both
    assert "param_groups[1]['params'][0] (4,), param_groups[1]['params'][1] (4,)" in both
    assert "3 parameters are in more than one optimizer" in both
    assert "optimizer expects a torch.optim.Optimizer but got str" in both
    assert "got 1 other parameters: bias (4,)" in sharded
    assert len(undeclared) == 3
    assert all("a torch Optimizer that is not element-wise" in text for text in undeclared)


# ---- what steps change


def data(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(5, 6, generator=generator, dtype=torch.float64)


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [0, 2, 3])
@on_ranks(3)
def test_groups_settings_and_weights_may_change_between_steps(level: int) -> None:
    """Freeze a matrix, add a group after steps, and edit weights between steps."""
    modules = []
    for _ in range(2):
        torch.manual_seed(1)
        modules.append(nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(4))).double())
    reference, module = modules
    module[3].requires_grad_(False)
    reference[3].requires_grad_(False)
    model = fully_shard_model(module, zero_dp_strategy=level, **IN_ONE_GROUP)
    pairs = []
    for each in (reference, model):
        first, second, third, frozen = each.parameters()
        optimizer = torch.optim.Muon([first, second, frozen], lr=0.02)
        if each is model:
            fully_shard_optimizer(optimizer)
        pairs.append((each, optimizer, first, third))
    for step in range(6):
        for each, optimizer, first, third in pairs:
            if step == 2:
                optimizer.add_param_group({"params": [third], "lr": 0.05})
            if step == 4:
                with torch.no_grad():
                    first.mul_(2.0)
                optimizer.param_groups[0]["lr"] = 0.01
            each(data(step)).square().mean().backward()
            optimizer.step()
            each.zero_grad()
        compare(model, reference, step)
