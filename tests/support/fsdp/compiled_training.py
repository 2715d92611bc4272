# SPDX-License-Identifier: Apache-2.0
"""Train compiled models, sharded, and compare them with plain ones."""

from collections.abc import Callable

import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters

from megatron.fsdp.dtensor.sharded_param import sharded_param_of
from tests.support.fsdp import models
from tests.support.fsdp.inductor_training import compiling
from tests.support.fsdp.reference import batch, close, loss_of, optimizer_over
from tests.support.fsdp.side_by_side import inner, mean_gradients, shard

BACKEND = "aot_eager"
"""It also traces the backward pass."""
STEPS = 3
WARM = 2
"""Steps after which nothing may be compiled: in the second one gradients are as they stay."""


class CompiledUnit(nn.Module):
    """A unit whose code is a compiled function of its own."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = torch.compile(block, backend=BACKEND)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


def blocks_compiled_in_place(module: models.Stack) -> None:
    for block in module.blocks:
        block.compile(backend=BACKEND)


def blocks_wrapped(module: models.Stack) -> None:
    module.blocks = nn.ModuleList(torch.compile(block, backend=BACKEND) for block in module.blocks)


def blocks_in_units(module: models.Stack) -> None:
    module.blocks = nn.ModuleList(CompiledUnit(block) for block in module.blocks)


def nothing(module: models.Stack) -> None:
    pass


WAYS: dict[str, tuple[Callable[[models.Stack], None], list[type]]] = {
    "block.compile": (blocks_compiled_in_place, [models.ResidualBlock]),
    "torch.compile(block)": (blocks_wrapped, [torch._dynamo.eval_frame.OptimizedModule]),
    "block_in_unit": (blocks_in_units, [CompiledUnit]),
    "model": (nothing, [models.ResidualBlock]),
    "model.compile": (nothing, [models.ResidualBlock]),
}


def backward(model: nn.Module, step: int, rank: int) -> None:
    loss_of(model(batch(step, rank, 0))).backward()


def train_all(runs: list[tuple[int, str]]) -> None:
    with compiling():
        for level, way in runs:
            torch._dynamo.reset()
            train_compiled(level, way)


def train_compiled(level: int, way: str) -> None:
    counters.clear()
    reference, module = models.build("several_units"), models.build("several_units")
    prepare, units = WAYS[way]
    prepare(module)
    expected_optimizer = optimizer_over(reference, "fused_adamw")
    model, optimizer = shard(module, level, fsdp_unit_modules=units)
    called = torch.compile(model, backend=BACKEND) if way == "model" else model
    if way == "model.compile":
        model.compile(backend=BACKEND)
    for step in range(STEPS):
        expected = mean_gradients(reference, backward, step)
        optimizer.zero_grad()
        with torch._dynamo.config.patch(error_on_recompile=step >= WARM):
            before = counters["stats"]["unique_graphs"]
            backward(called, step, dist.get_rank())
            assert step < WARM or counters["stats"]["unique_graphs"] == before, (
                f"compiled again in step {step}"
            )
        named = {clean(name): parameter for name, parameter in model.named_parameters()}
        check(
            model,
            {name: parameter.grad for name, parameter in named.items()},
            expected,
            f"gradient in step {step}",
        )
        expected_optimizer.step()
        optimizer.step()
        check(
            model,
            named,
            {name: p.detach() for name, p in reference.named_parameters()},
            f"weight after step {step}",
        )
    assert counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
    evaluate(called, reference)
    assert inner(model) is module


def evaluate(model: nn.Module, reference: nn.Module) -> None:
    for each in (model, reference):
        each.eval()
    with torch.no_grad():
        torch.testing.assert_close(
            model(batch(9, 0, 0)), reference(batch(9, 0, 0)), rtol=1e-11, atol=1e-11
        )


def clean(name: str) -> str:
    """Return a parameter's name without the parts that wrappers add."""
    return name.removeprefix("module.").replace("._orig_mod", "").replace(".block.", ".")


def check(
    model: nn.Module, actual: dict[str, Tensor], expected: dict[str, Tensor], what: str
) -> None:
    assert list(actual) == list(expected)
    members = {clean(name): sharded_param_of(each) for name, each in model.named_parameters()}
    for name, whole in expected.items():
        run = members[name].flat_range
        shard = actual[name].to_local().detach().reshape(-1)
        wanted = whole.detach().reshape(-1)[run.start : run.stop]
        close(shard, wanted, f"{what}: {name}")
