# SPDX-License-Identifier: Apache-2.0
"""Weights in FP8 and FP4 on meshes: hybrid sharding, experts, and tensor parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.fsdp.quantized.test_transformer_engine_weights import WIDTH, recipe_of
from tests.support.transformer_engine.ranks import RunOnRanks
from tools import transformer_engine_on_cpu

SIZE: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": "cpu"}


class LayersWithExperts(nn.Module):
    """Two linear layers, a plain one, and two experts of this rank, each with half the rows."""

    def __init__(self, experts: bool, tensor_group: Any) -> None:
        super().__init__()
        te = transformer_engine_on_cpu.use()
        split = {"tp_group": tensor_group, "tp_size": 2} if tensor_group is not None else {}
        columns, rows = ({**split, "parallel_mode": mode} for mode in ("column", "row"))
        self.up = te.Linear(WIDTH, 2 * WIDTH, **SIZE, **(columns if split else {}))
        self.down = te.Linear(2 * WIDTH, WIDTH, bias=False, **SIZE, **(rows if split else {}))
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.bfloat16)
        self.experts = te.GroupedLinear(2, WIDTH, WIDTH, bias=False, **SIZE) if experts else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x + self.down(torch.tanh(self.up(x))))
        return x if self.experts is None else x + self.experts(x, [32, 32])


class Arrangement:
    """A model on a mesh of all ranks, and the ranks that have the same parameters."""

    def __init__(self, recipe: Any, kind: str) -> None:
        from tests.support.fsdp.meshes import mesh_of

        te = transformer_engine_on_cpu.use()
        self.settings: dict[str, Any] = {}
        self.data_group: Any = dist.group.WORLD
        self.expert_group: Any = None
        num_ranks = dist.get_world_size()
        tensor_group = None
        if kind == "hybrid":
            mesh = mesh_of("outer", "inner", sizes=(2, num_ranks // 2))
            self.settings = {"device_mesh": mesh, "dp_shard_dim": "inner", "dp_outer_dim": "outer"}
            self.settings["outer_dp_sharding_strategy"] = 1
        elif kind == "experts":
            mesh = mesh_of("inner", "ep", sizes=(num_ranks // 2, 2))
            self.settings = {"device_mesh": mesh_of("inner"), "expt_device_mesh": mesh}
            self.expert_group = mesh["inner"].get_group()
        elif kind == "tensor":
            mesh = mesh_of("inner", "tp", sizes=(num_ranks // 2, 2))
            self.settings = {"device_mesh": mesh, "dp_shard_dim": "inner", "tp_dim": "tp"}
            self.data_group, tensor_group = mesh["inner"].get_group(), mesh["tp"].get_group()
        models = []
        for _ in range(2):
            torch.manual_seed(5 + (dist.get_rank() if kind in ("experts", "tensor") else 0) % 2)
            with te.quantized_model_init(
                enabled=True, recipe=recipe, preserve_high_precision_init_val=True
            ):
                models.append(LayersWithExperts(kind == "experts", tensor_group))
        self.module, self.reference = models

    def data(self, step: int) -> Tensor:
        """Return data of the step, the same on tensor-parallel ranks."""
        number = dist.get_rank(self.data_group)
        generator = torch.Generator().manual_seed(100 * step + number)
        return torch.randn(64, WIDTH, generator=generator).bfloat16()


@torch.no_grad()
def install(reference: nn.Module, mains: list[Tensor]) -> dict[str, Tensor]:
    """Quantize main weights into the unsharded model; return the values of its codes."""
    values = {}
    for (name, parameter), main in zip(reference.named_parameters(), mains, strict=True):
        parameter.copy_(main.bfloat16())
        parameter.grad = None
        if hasattr(parameter, "_quantizer"):
            values[name] = parameter.dequantize()
    return values


def check(recipe_name: str, kind: str, level: int) -> None:
    """Compare codes, losses and gradients of each step with those of the unsharded model."""
    te = transformer_engine_on_cpu.use()
    from megatron_fsdp import MixedPrecisionPolicy, fully_shard

    recipe = recipe_of(recipe_name)
    made = Arrangement(recipe, kind)
    model, optimizer = fully_shard(
        made.module,
        torch.optim.AdamW(made.module.parameters(), lr=0.01),
        fsdp_unit_modules=[te.Linear, te.GroupedLinear],
        mixed_precision_policy=MixedPrecisionPolicy(torch.float32, torch.float32),
        zero_dp_strategy=level,
        **made.settings,
    )
    read: dict[str, Tensor] = {}

    def note(prefix: str, layer: nn.Module) -> None:
        for name, weight in layer.named_parameters():
            if hasattr(weight, "_quantizer"):
                read[f"{prefix}.{name}"] = weight.dequantize()

    for prefix, layer in made.module.named_children():
        layer.register_forward_pre_hook(lambda layer, _, prefix=prefix: note(prefix, layer))
    names = [name for name, _ in made.reference.named_parameters()]
    for step in range(2):
        both = zip(model.parameters(), made.reference.parameters(), strict=True)
        local = [own_slice(parameter, like) for parameter, like in both]
        codes = install(made.reference, local)
        losses = []
        for each in (model, made.reference):
            with te.autocast(enabled=True, recipe=recipe):
                loss = each(made.data(step)).float().pow(2).mean()
            loss.backward()
            losses.append(float(loss.detach()))
        assert losses[0] == losses[1], step
        assert read.keys() == codes.keys() and len(codes) == (4 if kind == "experts" else 2)
        assert all(torch.equal(read[name], codes[name]) for name in codes), step
        num_data_ranks = dist.get_world_size(made.data_group)
        pairs = zip(names, model.parameters(), made.reference.parameters(), strict=True)
        for name, own, whole in pairs:
            is_expert = "experts" in name
            wanted = whole.grad.float()
            dist.all_reduce(wanted, group=made.expert_group if is_expert else made.data_group)
            found = own_slice(own.grad, wanted)
            torch.testing.assert_close(found, wanted / num_data_ranks, rtol=1e-5, atol=1e-7)
        optimizer.step()
        optimizer.zero_grad()


def own_slice(tensor: Any, like: Tensor) -> Tensor:
    """Return all of a sharded tensor, or what this tensor-parallel rank has of it."""
    from megatron.fsdp.dtensor.tensor_part import full_tensor

    whole: Tensor = full_tensor(tensor)
    for dim, size in enumerate(like.shape):
        if whole.shape[dim] != size:  # ranks with equal data are neighbours
            whole = whole.chunk(2, dim)[dist.get_rank() % 2]
    return whole.contiguous()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("recipe", "kind"),
    [("mxfp8", "hybrid"), ("current", "experts"), ("nvfp4", "experts"), ("block", "tensor")],
)
def test_two_ranks_compute_what_the_unsharded_model_does(
    blackwell: RunOnRanks, recipe: str, kind: str
) -> None:
    blackwell(check, recipe, kind, 3)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("recipe", "kind", "level"),
    [
        ("nvfp4", "flat", 1),
        ("block", "hybrid", 3),
        ("mxfp8", "experts", 2),
        ("nvfp4", "experts", 3),
        ("current", "tensor", 3),
        ("mxfp8", "tensor", 3),
    ],
)
def test_four_ranks_compute_what_the_unsharded_model_does(
    four_of_blackwell: RunOnRanks, recipe: str, kind: str, level: int
) -> None:
    four_of_blackwell(check, recipe, kind, level)
