# SPDX-License-Identifier: Apache-2.0
"""Weights with FSDP2's all-gather extension: what is gathered, computed, trained and saved."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPrecision
from torch.utils.checkpoint import checkpoint

from megatron.fsdp import Strategy, trace
from megatron.fsdp import fully_shard as fully_shard_by_settings
from megatron.fsdp.dtensor.tensor_part import full_tensor
from megatron.fsdp.engine.observe import GATHER
from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy, fully_shard
from tests.support.fsdp.meshes import mesh_of, shard_mesh
from tests.support.fsdp.reference import TOLERANCE, Ranks, on_ranks, shard_with_sgd
from tests.support.fsdp.subclasses import (
    CODES,
    Master,
    RoundedLayer,
    RowScaled,
    StraightLayer,
    Wrapper,
    code,
    scale_of,
)
from tests.support.fsdp.wrong_calls import message_of

KINDS = {"one_tensor": Master, "several_tensors": RowScaled}
FLOAT64 = MixedPrecisionPolicy(torch.float64, torch.float64)
SHAPES = [(16, 24), (24, 11), (11, 16), (16, 3)]
"""Inputs and outputs: of 24 rows every rank has as many, of 11 and of 3 some have fewer or none."""


def layers(kind: type[Master], *, sharded: bool, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(4)
    make = RoundedLayer if sharded else StraightLayer
    # Rows have a multiple of 8 elements, so one layer has a plain weight.
    plain = nn.Sequential(nn.Linear(11, 16), nn.Tanh())
    first, second, last = (make(*shape, kind) for shape in (SHAPES[0], SHAPES[1], SHAPES[3]))
    return nn.Sequential(first, second, plain, last).to(dtype)


def data(step: int, rank: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(6, 16, generator=generator, dtype=torch.float64).to(dtype)


def loss_of(model: nn.Module, step: int, rank: int, recomputes: bool = False) -> Tensor:
    x = data(step, rank)
    output = checkpoint(model, x, use_reentrant=False) if recomputes else model(x)
    return output.pow(2).mean()


def compare(kind: str, level: int, variant: str) -> None:
    """Train three steps beside the unsharded model, and compare every weight after each."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    reference = layers(KINDS[kind], sharded=False)
    module = layers(KINDS[kind], sharded=True)
    settings: dict[str, Any] = {"zero_dp_strategy": level, "mixed_precision_policy": FLOAT64}
    if variant != "one_unit":
        settings["fsdp_unit_modules"] = [RoundedLayer]
    if variant == "hybrid":
        mesh = mesh_of("outer", "inner", sizes=(2, world_size // 2))
        settings |= {"device_mesh": mesh, "dp_shard_dim": "inner", "dp_outer_dim": "outer"}
    plain_optimizer = torch.optim.AdamW(reference.parameters(), lr=0.01, weight_decay=0.1)
    model, optimizer = fully_shard(
        module, torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.1), **settings
    )
    microbatches = 2 if variant == "accumulation" else 1
    for step in range(3):
        for number in range(microbatches):
            for each in range(world_size):
                (loss_of(reference, step + 100 * number, each) / world_size).backward()
            loss = loss_of(model, step + 100 * number, rank, variant == "recomputation")
            loss.backward()
        for plain, own in zip(reference.parameters(), model.parameters()):
            error = (full_tensor(own.grad) - plain.grad).abs().max()
            assert error <= TOLERANCE * plain.grad.abs().max(), (step, error)
        plain_optimizer.step()
        optimizer.step()
        for one in (plain_optimizer, optimizer):
            one.zero_grad()
        for plain, own in zip(reference.parameters(), model.parameters()):
            torch.testing.assert_close(full_tensor(own), plain, rtol=0, atol=1e-11)
        with torch.no_grad():
            torch.testing.assert_close(
                model(data(step, 0)), reference(data(step, 0)), rtol=0, atol=1e-9
            )


@pytest.mark.always("one_tensor-1-2-*", "several_tensors-3-2-*")
@pytest.mark.parametrize(
    ("kind", "level", "num_ranks", "variant"),
    [
        ("one_tensor", 3, 4, "plain"),
        ("one_tensor", 1, 2, "one_unit"),
        ("one_tensor", 2, 1, "plain"),
        ("several_tensors", 3, 2, "recomputation"),
        ("several_tensors", 2, 2, "accumulation"),
        ("several_tensors", 1, 4, "plain"),
    ],
)
def test_training_is_that_of_the_unsharded_model(
    ranks: Ranks, kind: str, level: int, num_ranks: int, variant: str
) -> None:
    ranks(num_ranks, compare, kind, level, variant)


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [2, 3])
def test_training_is_that_of_the_unsharded_model_in_hybrid_sharding(
    ranks: Ranks, level: int
) -> None:
    ranks(4, compare, "one_tensor", level, "hybrid")


def shard(kind: type[Wrapper] = Master, level: int = 3, **settings: Any) -> Any:
    module = layers(kind, sharded=True, dtype=settings.pop("dtype", torch.float64))
    settings.setdefault("mixed_precision_policy", FLOAT64)
    return shard_with_sgd(
        module, fsdp_unit_modules=[RoundedLayer], zero_dp_strategy=level, **settings
    )


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [1, 3])
@on_ranks(2)
def test_classes_are_called_as_fsdp2_calls_them(level: int) -> None:
    """Look at the arguments of a class, and at what its forward reads."""
    mesh = shard_mesh()
    model, _ = shard(level=level, device_mesh=mesh, dp_shard_dim="dp_shard")
    read: list[Any] = []
    layer = model.module[0]
    layer.register_forward_pre_hook(
        lambda *_: read.append((type(layer.weight).__name__, layer.weight.codes.clone()))
    )
    model(data(0, 0))
    ((kind, codes),) = read
    # The last layer is the last one that was gathered.
    given, size, stride, module, policy = Master.seen
    values = full_tensor(next(iter(model.parameters()))).detach()
    seen = {
        "mesh": given.get_group() is mesh.get_group(),
        "size": (tuple(size), tuple(stride)),
        "module": module is model.module[3],
        "dtypes": (policy.param_dtype, policy.reduce_dtype),
        "read": kind,
        "codes of the main weights": torch.equal(codes, code(values, scale_of(values))),
        "outside": type(layer.weight).__name__,
    }
    assert seen == {
        "mesh": True,
        "size": ((3, 16), (16, 1)),
        "module": True,
        "dtypes": (torch.float64, torch.float64),
        "read": "Coded",
        "codes of the main weights": True,
        "outside": "UnevenDTensor",
    }


def gathered_bytes(kind: type[Wrapper] | None) -> tuple[int, int]:
    """Return the bytes that a forward gathers, and the number of its all-gathers."""
    torch.manual_seed(0)
    module = nn.Sequential(*(RoundedLayer(32, 32, kind) for _ in range(3)))
    model, _ = shard_with_sgd(module, fsdp_unit_modules=[RoundedLayer])
    with torch.no_grad():
        model(torch.randn(2, 32))
        with trace.record() as recording:
            model(torch.randn(2, 32))
    gathers = [entry for entry in recording.collectives if entry.track == GATHER]
    return sum(entry.num_bytes for entry in gathers), len(gathers)


def test_codes_travel_and_not_the_values(ranks: Ranks) -> None:
    (plain, launches), _ = ranks(2, gathered_bytes, None)
    (codes, own_launches), _ = ranks(2, gathered_bytes, Master)
    assert plain >= 3 * (32 * 32 + 32) * 4
    assert codes == 3 * (32 * 32 + 32 * 4)  # the bytes of codes, and of the plain biases
    assert own_launches == launches  # those of a unit are one launch


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_nothing_stays_gathered_between_uses(kind: str) -> None:
    """Count the bytes of the storages of a unit, inside a forward and between uses."""
    model, optimizer = shard(KINDS[kind])
    layer, sizes = model.module[0], []
    group = next(one for one in model.groups if one.names == ["0.weight"])

    def measure() -> None:
        gc.collect()
        known = {group.compute.flat.untyped_storage(): None}
        parameter = group.parameters[0]
        for tensor in parameter.inner() if isinstance(parameter, Wrapper) else [parameter]:
            known[tensor.untyped_storage()] = None
        for tensor in group.form._outputs:
            known[tensor.untyped_storage()] = None
        storages = {storage._cdata: storage.nbytes() for storage in known}
        sizes.append(sum(storages.values()))

    handle = layer.register_forward_pre_hook(lambda *_: measure())
    model(data(0, 0)).sum().backward()
    handle.remove()
    measure()
    optimizer.step()
    measure()
    inside, *between = sizes
    assert inside >= 24 * 16, sizes
    assert between == [0, 0], sizes


def save_and_load(folder: str, level: int) -> None:
    """Save a trained model, and load it with another level and into a plain model."""
    model, optimizer = shard(level=level)
    model(data(0, dist.get_rank())).sum().backward()
    optimizer.step()
    state = model.state_dict()
    assert all(value.dtype == torch.float64 for value in state.values())
    whole = {name: full_tensor(value) for name, value in state.items()}
    dcp.save({"model": state}, checkpoint_id=folder)
    other, _ = shard(level=4 - level)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    loaded = other.state_dict()
    dcp.load({"model": loaded}, checkpoint_id=folder)
    other.load_state_dict(loaded)
    for name, value in other.state_dict().items():
        assert torch.equal(full_tensor(value), whole[name]), name
    with torch.no_grad():
        assert torch.equal(other(data(3, 0)), model(data(3, 0)))
    plain = nn.Sequential(
        RoundedLayer(16, 24), RoundedLayer(24, 11), nn.Sequential(nn.Linear(11, 16))
    )
    plain.append(RoundedLayer(16, 3)).double()
    own = {f"module.{name}": value for name, value in plain.state_dict().items()}
    dcp.load({"model": own}, checkpoint_id=folder)
    for name, value in own.items():
        assert torch.equal(value, whole[name]), name


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [1, 3])
def test_checkpoints_hold_the_main_weights(ranks: Ranks, tmp_path: Path, level: int) -> None:
    ranks(2, save_and_load, str(tmp_path / "checkpoint"), level)


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [1, 2, 3])
@on_ranks(2)
def test_parameters_are_used_as_plain_ones_are(level: int) -> None:
    """Attributes, tied weights, freezing, writes, frozen weights, copies and mixed precision."""
    module = layers(Master, sharded=True)
    module[0].weight.of_mine = "attribute"
    module.append(nn.Sequential(RoundedLayer(3, 16), RoundedLayer(16, 24, Master)).double())
    module[4][1].weight = module[0].weight  # tied
    module[1].weight.requires_grad_(False)
    model, optimizer = fully_shard(
        module,
        torch.optim.SGD([one for one in module.parameters() if one.requires_grad], lr=0.1),
        fsdp_unit_modules=[RoundedLayer],
        zero_dp_strategy=level,
        mixed_precision_policy=FLOAT64,
    )
    names = [name for name, _ in model.named_parameters()]
    assert "module.4.1.weight" not in names and len(names) == 11
    weight = model.module[0].weight
    assert weight.of_mine == "attribute" and not hasattr(weight, "values_")
    frozen = full_tensor(model.module[1].weight)
    x = data(0, dist.get_rank())
    model(x).sum().backward()
    assert model.module[1].weight.grad is None
    optimizer.step()
    optimizer.zero_grad()
    assert torch.equal(full_tensor(model.module[1].weight), frozen)
    before = model(x)
    with torch.no_grad():
        weight.mul_(2.0)  # the next forward quantizes what was written
    after = model(x)
    assert not torch.equal(before, after)
    scale = scale_of(full_tensor(weight).detach())
    inside: list[Tensor] = []
    layer = model.module[0]
    layer.register_forward_hook(lambda *_: inside.append(layer.weight.plain()))
    model(x)
    rounded = code(full_tensor(weight).detach(), scale).double() * scale
    assert torch.equal(inside[0], rounded)
    half, half_optimizer = shard(
        level=level,
        dtype=torch.float32,
        mixed_precision_policy=TorchPrecision(torch.bfloat16, torch.float32),
    )
    output = half(data(0, 0).float())
    output.float().sum().backward()
    half_optimizer.step()
    assert output.dtype == torch.bfloat16
    assert {one.dtype for one in half.parameters()} == {torch.float32}


class Uncalled(Master):
    """Is refused before it is asked for anything."""

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        raise AssertionError("a refused class must not be called")


class NoInside(torch.Tensor):
    """Has the methods, and nothing that tells of what it is made."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any: ...

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, dtype: Any, *, out: Any) -> Any: ...


REFUSED: dict[str, tuple[Any, dict[str, Any], tuple[str, ...]]] = {
    "at level 0": (Uncalled, {"zero_dp_strategy": 0}, ("0.weight, 3.weight (Uncalled)", "level 1")),
    "memory slots": (Uncalled, {"fsdp_double_buffer": True}, ("(Uncalled)", "memory slots")),
    "the outer axis": (Uncalled, {"outer_dp_sharding_strategy": "optim"}, ("(Uncalled)", "outer")),
    "nothing inside": (
        lambda values: values.as_subclass(NoInside),
        {},
        ("0.weight, 3.weight (NoInside)", "__tensor_flatten__"),
    ),
}


def refuse(name: str) -> str:
    make, settings, _ = REFUSED[name]
    torch.manual_seed(1)
    linear = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Linear(8, 8))
    for index in (0, 3):
        linear[index].weight = nn.Parameter(make(linear[index].weight.detach()))
    if name == "the outer axis":
        mesh = mesh_of("outer", "inner", sizes=(2, 1))
        settings = {**settings, "device_mesh": mesh, "dp_shard_dim": "inner"}
        settings["dp_outer_dim"] = "outer"
    before = dict(linear.named_parameters())
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    message = message_of(NotImplementedError, fully_shard, linear, optimizer, **settings)
    assert all(one is before[own] for own, one in linear.named_parameters())
    return message


def refuse_all() -> list[str]:
    return [refuse(name) for name in REFUSED]


def test_what_cannot_be_gathered_is_refused_on_all_ranks(ranks: Ranks) -> None:
    first, second = ranks(2, refuse_all)
    assert first == second
    for message, (*_, parts) in zip(first, REFUSED.values(), strict=True):
        assert all(words in message for words in parts), message


@on_ranks(4)
def test_rows_that_shards_would_cut_are_refused() -> None:
    module = nn.Sequential(RoundedLayer(10, 4, Master))
    message = message_of(
        NotImplementedError, fully_shard_by_settings, module, strategy=Strategy(level=3)
    )
    assert "0.weight: a Master is sharded by rows of a multiple of 8 elements" in message, message
    assert "10 in a row" in message, message


def fill(layer: RoundedLayer) -> None:
    with torch.no_grad():
        inner = layer.weight.values if isinstance(layer.weight, Master) else layer.weight
        inner.fill_(0.5)
        layer.bias.zero_()


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [1, 3])
@on_ranks(2)
def test_weights_are_initialised_from_the_meta_device(level: int) -> None:
    """Initialise on the meta device, and train as from values."""
    torch.manual_seed(0)
    with torch.device("meta"):
        module = layers(Master, sharded=True)
    assert isinstance(module[0].weight, Master)
    for layer in (module[0], module[1], module[3]):
        layer.reset_parameters = lambda layer=layer: fill(layer)
    model, _ = shard_with_sgd(
        module,
        fsdp_unit_modules=[RoundedLayer],
        zero_dp_strategy=level,
        init_model_with_meta_device=True,
        mixed_precision_policy=FLOAT64,
    )
    assert isinstance(model, MegatronFSDP)
    weight = full_tensor(model.module[0].weight)
    assert torch.equal(weight, torch.full_like(weight, 0.5))
    with torch.no_grad():
        first = torch.tanh(data(0, 0) @ torch.full((16, 24), 0.5).double())
        seen: list[Tensor] = []
        model.module[0].register_forward_hook(lambda *given: seen.append(given[-1]))
        model(data(0, 0))
        torch.testing.assert_close(seen[0], first, rtol=0, atol=1.0 / CODES)


def copy_model() -> str:
    model, _ = shard()
    return message_of(NotImplementedError, copy.deepcopy, model)


def test_copies_are_refused(ranks: Ranks) -> None:
    assert all("save its state_dict()" in message for message in ranks(2, copy_model))
