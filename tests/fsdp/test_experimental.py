# SPDX-License-Identifier: Apache-2.0
"""The second generation of the published interface: modules are sharded in place, one by one."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPrecision

from megatron_fsdp.experimental import (
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
    load_checkpoint,
    microbatch,
    save_checkpoint,
)
from tests.support.fsdp.in_place import (
    LEVELS,
    SAME_DTYPE,
    PlacedAxes,
    compare_parts,
    compare_with_unsharded,
    on_one_axis,
    shard_in_place,
    train,
    whole_weights,
)
from tests.support.fsdp.meshes import Meshes, mesh_of, shard_mesh
from tests.support.fsdp.models import build_stack
from tests.support.fsdp.random_models import Drawn, DrawnLayer
from tests.support.fsdp.reference import (
    Case,
    Ranks,
    batch,
    close,
    loss_of,
    on_ranks,
    optimizer_over,
)
from tests.support.fsdp.side_by_side import mean_gradients, plain_backward
from tests.support.fsdp.wrong_calls import message_of

MODELS = [
    "several_units",
    "nested_units",
    "tied_across_units",
    "frozen_in_part",
    "checkpoint_reentrant",
    "everything_is_a_unit",
    "unit_called_twice",
    "tied_weight_as_argument",
    "checkpoint_non_reentrant",
    "returned_weights",
    "unused_parameters",
    "unit_unused_in_some_steps",
    "keyword_inputs",
]


# ---- gradients and weights


def compare_models(level: int, names: list[str]) -> None:
    meshes, mesh = Meshes(), shard_mesh()
    for name in names:
        case = Case(model=name, microbatches=2, clip=2.0)
        compare_with_unsharded(case, on_one_axis(mesh, level, "dp_shard"), meshes)


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: f"zero{level}")
def test_training_is_that_of_the_unsharded_model(ranks: Ranks, level: int) -> None:
    ranks(2, compare_models, level, MODELS[:5] if level == 3 else MODELS[:1])


@pytest.mark.exhaustive
def test_training_of_odd_models_is_that_of_unsharded_ones(ranks: Ranks) -> None:
    ranks(2, compare_models, 3, MODELS[5:])
    ranks(2, compare_models, 1, MODELS[1:])


HYBRID = {
    "hsdp": ("RRR", "SSS"),
    "hsdp_zero2": ("RRR", "RSS"),
    "hfsdp": ("RRS", "SSS"),
    "both_as_one": ("SSS", "SSS"),
}


def compare_hybrid(outer: str, inner: str, has_names: bool) -> None:
    names = ("dp_outer", "dp") if has_names else ()
    mesh = mesh_of(*names, sizes=(2, 2))
    axes = PlacedAxes(mesh, {names[0]: outer, names[1]: inner} if names else {1: inner, 0: outer})
    case = Case(model="several_units", microbatches=2, clip=2.0)
    compare_with_unsharded(case, axes, Meshes())


@pytest.mark.parametrize("has_names", [True, False], ids=["by_name", "by_index"])
@pytest.mark.parametrize("kind", HYBRID)
@pytest.mark.always("hfsdp-by_name", "both_as_one-by_index", "hsdp-by_index")
def test_axes_replicate_and_shard(ranks: Ranks, kind: str, has_names: bool) -> None:
    ranks(4, compare_hybrid, *HYBRID[kind], has_names)


def compare_experts() -> None:
    """Experts that two pairs of ranks have: they are averaged over a pair, and divided by two."""
    meshes = Meshes()
    dense = meshes.arguments("ep2")["device_mesh"]
    experts = meshes.arguments("ep2")["expt_device_mesh"]
    layers = (DrawnLayer(7, num_experts=4), DrawnLayer(5, num_experts=2))
    case = Case(model=Drawn(layers), mesh="ep2", microbatches=2, clip=2.0)
    for level in (1, 3):
        own = on_one_axis(experts, level, "dp_shard"), 2
        compare_with_unsharded(case, on_one_axis(dense, 3, "dp_shard"), meshes, own)


def test_gradients_and_norms_of_experts_are_those_of_the_unsharded_model(ranks: Ranks) -> None:
    ranks(4, compare_experts)


@on_ranks(2)
def test_each_call_has_its_own_placements_and_precision() -> None:
    mesh = shard_mesh()
    reference, model = build_stack(), build_stack()
    fully_shard(model.blocks[0], mesh, on_one_axis(mesh, 3).placements, SAME_DTYPE)
    fully_shard(model.blocks[1], mesh, on_one_axis(mesh, 0).placements, SAME_DTYPE)
    in_fp32 = TorchPrecision(param_dtype=torch.float32, output_dtype=torch.float64)
    fully_shard(model.blocks[2], mesh, on_one_axis(mesh, 2).placements, in_fp32)
    fully_shard(model, mesh, on_one_axis(mesh, 1).placements, SAME_DTYPE)
    seen: list[torch.dtype] = []
    model.blocks[2].up.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    expected = mean_gradients(reference, plain_backward, 0)
    plain_backward(model, 0, dist.get_rank())
    assert seen == [torch.float32]
    gradients = {name: one.grad for name, one in model.named_parameters()}
    compare_parts(model, gradients, expected, "gradient", 1e-5)
    assert {one.dtype for one in model.parameters()} == {torch.float64}


@on_ranks(2)
def test_without_a_policy_main_weights_are_fp32_and_gradients_follow() -> None:
    model = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
    mesh = init_device_mesh("cpu", (2,))  # its axis has no name
    assert fully_shard(model, mesh, on_one_axis(mesh, 3).placements) is model
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=1e-4))
    before = model.weight.full_tensor()
    model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    assert model.weight.dtype == model.weight.grad.dtype == torch.float32
    optimizer.step()
    # The step is lost in bfloat16.
    close(model.weight.full_tensor(), before - 1e-4, "main weight", 1e-8)


@on_ranks(2)
def test_a_model_on_the_meta_device_gets_its_values_call_by_call() -> None:
    mesh = shard_mesh()
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[1], mesh, on_one_axis(mesh, 3).placements)
    second = model[1].weight.full_tensor()
    fully_shard(model, mesh, on_one_axis(mesh, 3).placements)
    close(model[1].weight.full_tensor(), second, "the layer from before")
    assert all(one.abs().sum() > 0 for one in whole_weights(model).values())
    model(torch.ones(1, 4)).sum().backward()


# ---- microbatches


def gradients_by_microbatch(outer: str) -> list[bool]:
    """Return whether parameters show gradients after each of two microbatches."""
    mesh = mesh_of("outer", "dp", sizes=(2, 2))
    model = build_stack()
    context = shard_in_place(model, PlacedAxes(mesh, {"outer": outer, "dp": "SSS"}))
    shown = []
    for number in range(2):
        with microbatch(context, is_last=number == 1):
            plain_backward(model, number, dist.get_rank())
        shown.append(model.embed.weight.grad is not None)
    return shown


def test_gradients_are_final_after_the_last_microbatch_where_an_axis_replicates(
    ranks: Ranks,
) -> None:
    assert ranks(4, gradients_by_microbatch, "RRR") == [[False, True]] * 4
    assert ranks(4, gradients_by_microbatch, "SSS") == [[True, True]] * 4


# ---- checkpoints


def save_trained(path: str, level: int) -> dict[str, torch.Tensor]:
    mesh, model = shard_mesh(), build_stack()
    shard_in_place(model, on_one_axis(mesh, level))
    optimizer = fully_shard_optimizer(optimizer_over(model))
    train(model, optimizer, [batch(0, 0, 0), batch(1, 0, 0)])
    save_checkpoint(model, optimizer, path)
    train(model, optimizer, [batch(2, 0, 0)])
    return whole_weights(model)


def load_and_train(path: str, level: int) -> dict[str, torch.Tensor]:
    mesh, model = shard_mesh(), build_stack()
    shard_in_place(model, on_one_axis(mesh, level))
    optimizer = fully_shard_optimizer(optimizer_over(model))
    load_checkpoint(model, optimizer, path)
    train(model, optimizer, [batch(2, 0, 0)])
    return whole_weights(model)


def test_a_checkpoint_continues_at_other_placements_and_numbers_of_ranks(
    ranks: Ranks, tmp_path: Path
) -> None:
    expected = ranks(2, save_trained, str(tmp_path), 3)[0]
    for number, level in ((1, 3), (2, 1)):
        for name, value in ranks(number, load_and_train, str(tmp_path), level)[0].items():
            close(value, expected[name], name)


def load_without_sync(path: str) -> list[list[float]]:
    """Return the outputs before and after loading, and after loading with sync."""
    mesh = shard_mesh()
    model = nn.Linear(4, 1, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(model.weight)
    fully_shard(model, mesh, on_one_axis(mesh, 3).placements)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    x = torch.ones(1, 4, dtype=torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(3.0)
    save_checkpoint(model, optimizer, path)
    with torch.no_grad():
        model.weight.fill_(2.0)
    outputs = [model(x).item()]
    for sync in (False, True):
        load_checkpoint(model, optimizer, path, sync_model_weights=sync)
        assert model.weight.full_tensor().tolist() == [[3.0] * 4]
        outputs.append(model(x).item())
    return outputs


def test_compute_weights_follow_loaded_ones_unless_told_otherwise(
    ranks: Ranks, tmp_path: Path
) -> None:
    assert ranks(2, load_without_sync, str(tmp_path)) == [[8.0, 8.0, 12.0]] * 2


# ---- wrong calls


def wrong_calls() -> dict[str, str]:
    mesh = shard_mesh()
    whole = on_one_axis(mesh, 3).placements
    unknown_axis = PlacedAxes(mesh, {"x": "SSS"}).placements
    model = build_stack()

    def nested() -> None:
        with fully_shard_context(), fully_shard_context():
            pass

    def forward_inside() -> None:
        with fully_shard_context():
            fully_shard(nn.Linear(4, 4), mesh, whole)(torch.ones(1, 4))

    def symmetric() -> None:
        with fully_shard_context(use_symmetric_memory=True):
            pass

    def elsewhere() -> None:
        with fully_shard_context("cuda"):
            fully_shard(nn.Linear(4, 4), mesh, whole)

    def early_microbatch() -> None:
        with fully_shard_context() as context, microbatch(context, True):
            pass

    def experts() -> None:
        layer = nn.Linear(4, 4)
        layer.weight.allreduce = False
        fully_shard(layer, mesh, whole)

    other = nn.Linear(4, 4)
    found = {
        "nested": message_of(RuntimeError, nested),
        "forward_inside": message_of(RuntimeError, forward_inside),
        "symmetric": message_of(NotImplementedError, symmetric),
        "elsewhere": message_of(ValueError, elsewhere),
        "early_microbatch": message_of(RuntimeError, early_microbatch),
        "experts": message_of(ValueError, experts),
        "mesh": message_of(ValueError, fully_shard, model, None, whole),
        "placements": message_of(ValueError, fully_shard, model, mesh, 3),
        "module": message_of(ValueError, fully_shard, 3, mesh, whole),
        "divisor": message_of(ValueError, fully_shard, model, mesh, whole, None, 0),
        "policy": message_of(ValueError, fully_shard, model, mesh, whole, torch.float32),
        "axis": message_of(ValueError, fully_shard, model, mesh, unknown_axis),
        "stranger": message_of(ValueError, fully_shard_optimizer, optimizer_over(model)),
        "unsharded": message_of(ValueError, save_checkpoint, model, optimizer_over(model), "x"),
    }
    shard_in_place(model, PlacedAxes(mesh, {"dp_shard": "SSS"}))
    found["twice"] = message_of(ValueError, fully_shard, model, mesh, whole)
    found["inside"] = message_of(ValueError, fully_shard, model.blocks[0], mesh, whole)
    around = nn.Sequential(model, nn.Linear(3, 3).double())
    loss_of(model(batch(0, 0, 0))).backward()
    fully_shard(other, mesh, whole)
    fully_shard_optimizer(optimizer_over(other))
    found["optimizer"] = message_of(RuntimeError, fully_shard, nn.ModuleList([other]), mesh, whole)
    found["late"] = message_of(RuntimeError, fully_shard, around, mesh, whole)
    assert not hasattr(around, "is_root")
    return found


def test_wrong_calls_say_what_is_wrong_on_every_rank(ranks: Ranks) -> None:
    found, other = ranks(2, wrong_calls)
    assert found == other
    words = {
        "nested": "inside of another",
        "forward_inside": "leave the context",
        "symmetric": "not built",
        "elsewhere": "the context is on cuda, the mesh on cpu",
        "early_microbatch": "microbatch expects",
        "experts": "grad_divisor",
        "mesh": "mesh expects a torch DeviceMesh",
        "placements": "placements expects Placements",
        "module": "module expects",
        "divisor": "grad_divisor expects a positive int",
        "policy": "mixed_precision_policy expects",
        "axis": "placements.dp_axes expects different axes",
        "stranger": "belong to no sharded model",
        "unsharded": "fully_shard_optimizer",
        "twice": "sharded already",
        "inside": "sharded already",
        "late": "after a forward",
        "optimizer": "after fully_shard_optimizer",
    }
    missing = {name: found[name] for name, word in words.items() if word not in found[name]}
    assert not missing and found.keys() == words.keys()


def test_placements_name_every_axis_and_only_zero_levels() -> None:
    mesh = None
    for placed in ("SRR", "RSR", "SSR", "SRS"):
        with pytest.raises(ValueError, match="axis 'dp': parameter, gradient and optimizer"):
            _ = PlacedAxes(mesh, {"dp": placed}).placements
