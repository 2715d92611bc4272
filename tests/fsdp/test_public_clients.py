# SPDX-License-Identifier: Apache-2.0
"""Programs written for the published package, FSDP2 or DDP find what they look for."""

import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron.fsdp.dtensor.tensor_part import full_tensor
from megatron_fsdp import MegatronFSDP, fully_shard, fully_shard_model
from tests.support.fsdp import models
from tests.support.fsdp.meshes import mesh_of, shard_mesh
from tests.support.fsdp.models import WIDTH, ResidualBlock, build_stack
from tests.support.fsdp.reference import LEVELS, Ranks, batch, close, loss_of, on_ranks
from tests.support.fsdp.side_by_side import (
    compare_plain_gradients,
    inner,
    plain_backward,
    shard,
    train_side_by_side,
)
from tests.support.fsdp.wrong_calls import message_of

# ---- the view of parameters and gradients


@pytest.mark.always("1-2", "3-1")
@pytest.mark.parametrize(
    ("level", "num_ranks"), [*((level, 2) for level in LEVELS), (0, 1), (3, 1)]
)
@on_ranks()
def test_gradients_are_on_the_parameters_of_the_module_too(level: int, num_ranks: int) -> None:
    """Look for gradients on the module inside the wrapper, as tests of strategies do."""
    model, optimizer = shard(build_stack(), level)
    outside = dict(model.named_parameters())
    for _ in range(2):
        compare_plain_gradients(model, build_stack(), 0, "gradient")
        inside = dict(model.module.named_parameters())
        assert {f"module.{name}" for name in inside} == set(outside)
        for name, parameter in inside.items():
            assert parameter is outside[f"module.{name}"]
            assert isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor)
        optimizer.zero_grad()


class ReadsItself(nn.Module):
    """A model that lists its own parameters in its forward, and recomputes without a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.block = ResidualBlock()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        assert not any(isinstance(parameter, DTensor) for parameter in self.parameters())
        x = torch.utils.checkpoint.checkpoint(lambda x: x * self.scale, x, use_reentrant=False)
        return self.block(x)


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [0, 3])
@on_ranks(2)
def test_a_forward_lists_what_it_computes_with(level: int) -> None:
    torch.manual_seed(3)
    reference = ReadsItself().double()
    torch.manual_seed(3)
    model, _ = shard(ReadsItself().double(), level)
    x = batch(0, 0, 0).requires_grad_()
    loss_of(model(x)).backward()
    loss_of(reference(batch(0, 0, 0).requires_grad_())).backward()
    scale = dict(model.named_parameters())["module.scale"]
    close(full_tensor(scale.grad), reference.scale.grad, "gradient")


# ---- members that clients call


@on_ranks(2)
def test_members_that_exchange_parameters_elsewhere_have_nothing_to_do() -> None:
    """NeMo Automodel calls this after sharding, Megatron-Core's overlapped schedule the other."""
    model = fully_shard_model(build_stack(), shard_mesh(), fsdp_unit_modules=[ResidualBlock])
    model._replace_param_with_distributed_if_needed()
    assert model.is_param_fsdp_distributed
    optimizer = torch.optim.AdamW(model.module.parameters())
    assert set(optimizer.param_groups[0]["params"]) == set(model.parameters())
    model._replace_param_with_raw_if_needed()
    plain_backward(model, 0, dist.get_rank())
    model._replace_param_with_distributed_if_needed()
    assert all(parameter.grad is not None for parameter in model.module.parameters())


# ---- tied weights


class TiedPair(nn.Module):
    units = ()

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, WIDTH)
        if tied:
            self.tie_weights()

    def tie_weights(self) -> None:
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(x)))


def tie_and_train(model: nn.Module, step: int, rank: int) -> None:
    module = inner(model)
    module.head.weight = module.embed.weight
    module.tie_weights()
    module.head.register_parameter("weight", module.embed.weight)
    plain_backward(model, step, rank)


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [0, 3])
@on_ranks(2)
def test_tied_weights_can_be_tied_again(level: int) -> None:
    _, model = train_side_by_side(lambda: TiedPair().double(), tie_and_train, level, steps=2)
    assert set(dict(model.named_parameters())) == {"module.embed.weight", "module.head.bias"}
    assert model.module.head.weight is model.module.embed.weight


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [0, 3])
@on_ranks(2)
def test_weights_that_were_two_when_sharded_cannot_be_tied(level: int) -> None:
    model, _ = shard(TiedPair(tied=False).double(), level)
    message = message_of(ValueError, model.module.tie_weights)
    loss_of(model(batch(0, 0, 0))).backward()  # nothing has changed
    assert "head.weight cannot be tied to embed.weight" in message, message
    assert "before fully_shard" in message, message


# ---- pickles


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [0, 3])
@on_ranks(2)
def test_parameters_and_gradients_pickle_as_dtensors_of_torch(level: int) -> None:
    model, _ = shard(build_stack(), level)
    plain_backward(model, 0, dist.get_rank())
    weight = dict(model.named_parameters())["module.blocks.0.up.weight"]
    weight.is_special = True
    whole_gradient, whole_weight = full_tensor(weight.grad), full_tensor(weight)
    for value, whole in ((weight, whole_weight), (weight.grad, whole_gradient)):
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, value)
        if level:
            flat = torch.cat([each.to_local().detach().reshape(-1) for each in gathered])
            close(flat.view(whole.shape), whole.detach(), "shards of all ranks")
        copy = pickle.loads(pickle.dumps(value))
        assert isinstance(copy, DTensor) and copy.placements == value.placements
        assert copy.shape == value.shape and copy.requires_grad == value.requires_grad
        assert torch.equal(copy.to_local(), value.to_local())
        close(full_tensor(copy), whole, "of the copy")
        assert len(pickle.dumps(value)) < 4000 + 2 * 8 * value.to_local().numel()  # not the buffer
        file = io.BytesIO()
        torch.save({"value": value}, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)["value"]
        assert torch.equal(loaded.to_local(), value.to_local())
    assert isinstance(pickle.loads(pickle.dumps(weight)), nn.Parameter)
    assert pickle.loads(pickle.dumps(weight)).is_special


# ---- full tensors into the module


def load_into_module(level: int, dtype: torch.dtype) -> None:
    torch.manual_seed(11)
    source = models.build("tied_across_units").to(dtype)
    x = batch(0, 0, 0).to(dtype)
    for assign in (False, True):
        module = models.build("tied_across_units").to(dtype)
        model, optimizer = fully_shard(
            module,
            torch.optim.AdamW(module.parameters(), fused=True),
            shard_mesh(),
            fsdp_unit_modules=[ResidualBlock],
            zero_dp_strategy=level,
        )
        loss_of(model(x)).backward()  # weights are gathered now, at some levels
        state = {name: value.detach().clone() for name, value in source.state_dict().items()}
        result = model.module.load_state_dict(state, assign=assign)
        assert not result.missing_keys and not result.unexpected_keys
        check_loaded(model, source, x)
        model.load_state_dict(build_other(dtype), assign=assign)
        model.module.blocks[0].load_state_dict(source.blocks[0].state_dict(), assign=assign)
        weight = model.module.blocks[0].up.weight
        whole = full_tensor(weight) if isinstance(weight, DTensor) else weight
        close(whole.to(dtype), source.blocks[0].up.weight.detach(), "weight of a submodule")
        optimizer.zero_grad()
        loss_of(model(x)).backward()
        optimizer.step()


def build_other(dtype: torch.dtype) -> dict[str, Tensor]:
    torch.manual_seed(12)
    return models.build("tied_across_units").to(dtype).state_dict()


def check_loaded(model: MegatronFSDP, source: nn.Module, x: Tensor) -> None:
    for name, parameter in model.named_parameters():
        expected = source.get_parameter(name.removeprefix("module.")).detach()
        close(full_tensor(parameter), expected.to(parameter.dtype), name)
    with torch.no_grad():
        for actual, expected in zip(models_output(model(x)), models_output(source(x)), strict=True):
            close(actual, expected, "output", 1e-11 if x.dtype == torch.float64 else 1e-2)


def models_output(output: object) -> list[Tensor]:
    return [output] if isinstance(output, Tensor) else list(output)


@pytest.mark.always("1-main", "3-bf16")
@pytest.mark.parametrize(
    ("level", "dtype"), [(0, "bf16"), (1, "main"), (2, "bf16"), (3, "main"), (3, "bf16")]
)
def test_the_module_loads_full_tensors(ranks: Ranks, level: int, dtype: str) -> None:
    ranks(2, load_into_module, level, torch.float64 if dtype == "main" else torch.bfloat16)


@on_ranks(2)
def test_what_does_not_fit_the_module_is_listed_as_torch_does() -> None:
    model, _ = shard(build_stack(), 3)
    before = full_tensor(model.module.head.weight)
    state = build_stack().state_dict()
    del state["embed.bias"]
    state["head.weight"] = torch.zeros(2, 2)
    message = message_of(RuntimeError, model.module.load_state_dict, state)
    close(full_tensor(model.module.head.weight), before, "weight of a wrong shape")
    assert "Missing key" in message and "embed.bias" in message, message
    assert "size mismatch for head.weight" in message, message


# ---- weights that no loss reaches


class PartlyUsed(nn.Module):
    """Branches that some ranks, all or none of them use."""

    units = (ResidualBlock,)

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.spare_block = ResidualBlock()
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, which: int) -> Tensor:
        # All modules are called on all ranks, as sharding needs it; the loss reaches some of them.
        outputs = [branch(self.first(x)) for branch in self.branches]
        self.spare_block(x)
        return self.last(outputs[which])


def build_partly_used() -> PartlyUsed:
    torch.manual_seed(5)
    return PartlyUsed().double()


WHICH = ((0, 0), (0, 1), (1, 1))
"""The branch that each of two ranks uses, in every step; nobody uses the third one."""


@pytest.mark.always("1-False", "3-True")
@pytest.mark.parametrize(
    ("level", "sync_each"), [(0, True), (1, True), (1, False), (2, True), (3, False), (3, True)]
)
@on_ranks(2)
def test_weights_that_no_loss_reaches_are_left_alone(level: int, sync_each: bool) -> None:
    reference, module = build_partly_used(), build_partly_used()
    settings: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.3, "fused": True}
    expected_optimizer = torch.optim.AdamW(reference.parameters(), **settings)
    model, optimizer = fully_shard(
        module,
        torch.optim.AdamW(module.parameters(), **settings),
        shard_mesh(),
        fsdp_unit_modules=[ResidualBlock],
        zero_dp_strategy=level,
        preserve_fp32_weights=False,
        find_unused_parameters=True,
        sync_model_each_microbatch=sync_each,
        # At levels 0 and 1 the loss may reach whole units on some ranks only.
        suggested_communication_unit_size=None if level < 2 else 1 << 20,
    )
    rank, size = dist.get_rank(), dist.get_world_size()
    for step, which in enumerate(WHICH):
        expected_optimizer.zero_grad()
        for each in range(size):
            (loss_of(reference(batch(step, each, 0), which[each])) / size).backward()
        optimizer.zero_grad()
        loss_of(model(batch(step, rank, 0), which[rank])).backward()
        model.finish_grad_sync()
        expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        close(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5), expected, "norm", 1e-6)
        for name, parameter in model.named_parameters():
            other = reference.get_parameter(name.removeprefix("module."))
            assert (parameter.grad is None) == (other.grad is None), (step, name)
        expected_optimizer.step()
        optimizer.step()
        for name, parameter in model.named_parameters():
            other = reference.get_parameter(name.removeprefix("module.")).detach()
            close(full_tensor(parameter), other, f"{name} after step {step}", 1e-6)


def with_optimizer(module: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    module = module.float()
    return module, torch.optim.AdamW(module.parameters())


@on_ranks(2)
def test_use_is_counted_until_gradients_are_cleared() -> None:
    """Count a parameter as used if one of the microbatches, on one of the ranks, has used it."""
    model, optimizer = fully_shard(
        *with_optimizer(build_partly_used()),
        shard_mesh(),
        fsdp_unit_modules=[ResidualBlock],
        find_unused_parameters=True,
        disable_bucketing=True,
    )
    named = dict(model.named_parameters())
    for which, expected in ((0, {0}), (1, {0, 1})):
        loss_of(model(batch(0, 0, 0).float(), which if dist.get_rank() else 0)).backward()
        used = {n for n in range(3) if named[f"module.branches.{n}.weight"].grad is not None}
        assert used == expected
    optimizer.zero_grad()
    loss_of(model(batch(0, 0, 0).float(), 1)).backward()
    assert named["module.branches.0.weight"].grad is None
    torch.optim.Optimizer.zero_grad(optimizer)  # clears what is on the parameters, nothing else
    loss_of(model(batch(0, 0, 0).float(), 2)).backward()
    assert named["module.branches.1.weight"].grad is None
    assert named["module.branches.2.weight"].grad is not None


# ---- whole rows


def local_shapes(granularity: str) -> list[tuple[int, ...]]:
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(37, 3), nn.Linear(3, 301))
    model = fully_shard_model(module, mesh_of("dp"), granularity=granularity)
    loss_of(model(torch.ones(2, 37))).backward()
    expected = nn.Sequential(nn.Linear(37, 3), nn.Linear(3, 301))
    model.load_state_dict(expected.state_dict())
    for name, parameter in model.named_parameters():
        whole = expected.get_parameter(name.removeprefix("module.")).detach()
        close(full_tensor(parameter), whole, name)
    return [tuple(parameter.to_local().shape) for parameter in model.parameters()]


def test_local_parts_are_whole_rows_if_the_user_wants_rows(ranks: Ranks) -> None:
    weights = [shapes[0] for shapes in ranks(4, local_shapes, "prefer_rows")]
    assert any(len(shape) == 1 for shape in weights)  # a matrix is cut inside rows
    for shapes in ranks(4, local_shapes, "rows"):
        for shape, width in zip(shapes[::2], (37, 3), strict=True):
            assert len(shape) == 2 and shape[1] == width
