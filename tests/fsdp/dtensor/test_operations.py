# SPDX-License-Identifier: Apache-2.0
"""Operations of torch on sharded parameters and gradients give what whole tensors give."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from megatron.fsdp.dtensor.operations import NO_GRADIENT, STALE_VIEW
from megatron.fsdp.dtensor.tensor_part import full_tensor
from megatron_fsdp import MegatronFSDP, fully_shard_model
from tests.support.fsdp.dtensor.operations import ELEMENTWISE, IN_PLACE, REFUSED, WHOLE, Operation
from tests.support.fsdp.meshes import mesh_of
from tests.support.fsdp.reference import Ranks, on_ranks


class Weight(nn.Module):
    """A unit of one parameter."""

    def __init__(self, *shape: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))

    def forward(self) -> Tensor:
        return (self.weight * self.weight).sum()


class OddWeights(nn.Module):
    """Parameters of sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = Weight(5, 7)
        self.wide = Weight(3, 33)
        self.cube = Weight(7, 3, 2)
        self.vector = Weight(3)
        self.one = Weight(1)

    def forward(self) -> Tensor:
        total = torch.zeros(())
        for index, module in enumerate(self.children()):
            total = total + module() * (index + 1)
        return total


def odd_model(level: int) -> MegatronFSDP:
    torch.manual_seed(3)
    model = fully_shard_model(OddWeights(), fsdp_unit_modules=[Weight], zero_dp_strategy=level)
    model().backward()
    return model


def plain(value: Any) -> Any:
    """Return a result with whole tensors in place of sharded ones, in nested lists."""
    if isinstance(value, DTensor):
        return full_tensor(value)
    if isinstance(value, Tensor):
        return value.detach().as_subclass(Tensor)
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    return list(map(plain, value)) if isinstance(value, list | tuple) else value


def is_same(left: Any, right: Any) -> bool:
    if isinstance(left, list):
        return len(left) == len(right) and all(map(is_same, left, right))
    if isinstance(left, Tensor):
        close = torch.allclose(left, right, rtol=1e-6, atol=1e-7, equal_nan=True)
        return left.dtype == right.dtype and left.shape == right.shape and close
    return bool(left == right)


def outcome(operation: Operation, tensor: Tensor) -> Any:
    """Return the result of an operation, or the name of its error."""
    torch.manual_seed(5)
    try:
        return operation(tensor)
    except Exception as error:
        return type(error).__name__


def differences(
    tensors: dict[str, Tensor], operations: dict[str, Operation], is_odd: bool
) -> list[str]:
    """Compare each operation on every other tensor, the second ones first if `is_odd`."""
    found = []
    wholes = {name: full_tensor(tensor) for name, tensor in tensors.items()}
    for number, (title, operation) in enumerate(operations.items()):
        for name in list(tensors)[(number + is_odd) % 2 :: 2]:
            ours, theirs = tensors[name], wholes[name]
            if operations is IN_PLACE:
                ours, theirs = ours.detach().clone(), theirs.clone()
            result, expected = outcome(operation, ours), outcome(operation, theirs)
            first = result[0] if isinstance(result, list | tuple) and result else result
            # A vector may be its own result, as of `flatten`.
            is_right = isinstance(first, DTensor) is (operations is ELEMENTWISE) or theirs.ndim == 1
            result, expected = plain(result), plain(expected)
            if operations is IN_PLACE and not isinstance(expected, str):
                result, expected = [result, plain(ours)], [expected, theirs]
            elif not is_right and operations is not IN_PLACE and not isinstance(expected, str):
                found.append(f"{title} of {name} is{' not' * (operations is ELEMENTWISE)} sharded")
            if type(result) is not type(expected) or not is_same(result, expected):
                found.append(f"{title} of {name}: {result} instead of {expected}")
    return found


def compare(level: int, is_odd: bool) -> tuple[list[str], set[str]]:
    model = odd_model(level)
    tensors = {}
    kinds = set()
    for number, (name, parameter) in enumerate(model.named_parameters()):
        # Parameters and gradients in turn, since an operation takes a millisecond or more.
        tensors[name] = parameter if number % 2 == 0 else parameter.grad
        local = parameter.to_local()
        if 0 < local.numel() < parameter.numel():
            kinds.add("rows" if local.ndim == parameter.ndim > 1 else "flat")
        elif not local.numel():
            kinds.add("empty")
    found = []
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of sums over one element and the like
        for operations in (ELEMENTWISE, WHOLE, IN_PLACE):
            found += differences(tensors, operations, is_odd)
    return found, kinds


@pytest.mark.always("2-3-*")
@pytest.mark.parametrize(
    ("num_ranks", "level", "is_odd"), [(2, 3, False), (3, 1, True), (2, 0, False)]
)
def test_operations_give_what_the_whole_tensor_gives(
    ranks: Ranks, num_ranks: int, level: int, is_odd: bool
) -> None:
    assert len(ELEMENTWISE) + len(WHOLE) + len(IN_PLACE) >= 60
    kinds = set()
    for found, own_kinds in ranks(num_ranks, compare, level, is_odd):
        assert not found, "\n".join(found)
        kinds |= own_kinds
    if level == 3:
        assert kinds == {"rows", "flat", "empty"}


@on_ranks(2)
def test_a_parameter_is_copied_into_a_tensor_that_torch_has_divided() -> None:
    parameter = odd_model(3).get_parameter("module.matrix.weight").detach()
    copy = distribute_tensor(torch.zeros(5, 7), parameter.device_mesh, [Shard(0)])
    copy.copy_(parameter)
    assert torch.equal(copy.full_tensor(), full_tensor(parameter))


@on_ranks(2)
def test_writes_that_would_be_lost_are_refused_on_every_rank() -> None:
    messages = []
    parameter = odd_model(3).get_parameter("module.matrix.weight")
    before = full_tensor(parameter)
    for title, operation in REFUSED.items():
        try:
            operation(parameter.detach())
            messages.append(f"{title}: not refused")
        except (RuntimeError, ValueError) as error:
            if "changed since" in title and str(error) != STALE_VIEW:
                messages.append(f"{title}: {error}")
    if not torch.equal(full_tensor(parameter), before):
        messages.append("something was written")
    assert messages == [], messages


def draw(level: int, outer: int) -> list[Any]:
    torch.manual_seed(3)
    mesh: dict[str, Any] = {}
    if outer > 1:
        mesh = {"device_mesh": mesh_of("outer", "shard", sizes=(outer, 2))}
        mesh |= {"dp_outer_dim": "outer", "dp_shard_dim": "shard"}
    model = fully_shard_model(
        OddWeights(), zero_dp_strategy=level, fsdp_unit_modules=[Weight], **mesh
    )
    torch.manual_seed(torch.distributed.get_rank())
    kept = torch.get_rng_state()
    named = dict(model.named_parameters())
    with torch.no_grad():
        for parameter in named.values():
            parameter.normal_()
    drawn = [
        torch.bernoulli(named["module.matrix.weight"].detach().sigmoid()),
        nn.functional.dropout(named["module.vector.weight"].detach(), 0.5),
    ]
    weights = [each.to_local().tolist() for each in model.parameters()]
    assert not torch.equal(kept, torch.get_rng_state())
    return [model().item(), weights if level == 0 else None, [each.tolist() for each in drawn]]


@pytest.mark.always("3-1")
@pytest.mark.parametrize(("level", "outer"), [(0, 1), (3, 1), (3, 2)])
def test_ranks_with_different_seeds_draw_the_same_weights(
    ranks: Ranks, level: int, outer: int
) -> None:
    first, *others = ranks(2 * outer, draw, level, outer)
    assert others == [first] * len(others)


@on_ranks(2)
def test_a_penalty_on_sharded_parameters_is_refused_in_backward() -> None:
    model = odd_model(3)
    messages = []
    for term in (lambda p: p.square().sum(), lambda p: (p * 2).sum(), lambda p: p[0].norm()):
        loss = model()
        for parameter in model.parameters():
            loss = loss + term(parameter)
        try:
            loss.backward()
        except RuntimeError as error:
            messages.append(str(error))
    assert messages == [NO_GRADIENT] * 3, messages


def show_on_one_rank() -> str:
    parameter = odd_model(3).get_parameter("module.matrix.weight")
    if torch.distributed.get_rank() == 1:
        return ""
    return f"{parameter}" + repr(parameter.grad)


def test_a_parameter_is_printed_by_one_rank_alone(ranks: Ranks) -> None:
    text, _ = ranks(2, show_on_one_rank)
    assert "shape=(5, 7)" in text
    assert "of 35 elements" in text
    assert "ShardedGradient" in text


@pytest.mark.always("1", "3")
@pytest.mark.parametrize("level", range(4))
@on_ranks(2)
def test_the_next_forward_uses_edited_weights(level: int) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    model = fully_shard_model(module, zero_dp_strategy=level)
    x = torch.ones(1, 3)
    outputs = [model(x).item()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    outputs.append(model(x).item())
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5
    outputs.append(model(x).item())
    for parameter in model.state_dict().values():
        parameter[0] = 0.0
    outputs.append(model(x).item())
    first, twice, again, cut = outputs
    assert twice != first
    assert again == first
    assert cut == 0.0
