# SPDX-License-Identifier: Apache-2.0
"""Programs made of the Python blocks of pages: the names they assume, and a check of each block.

The blocks of a page run in order, as one program, on two ranks of the pool.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.optim.swa_utils import AveragedModel

from megatron_fsdp import fully_shard, fully_shard_model, fully_shard_optimizer
from megatron_fsdp.utils import state_of_other_optimizers
from tests.fsdp.dtensor.test_operations import plain
from tests.support.examples.second_generation import (
    before_second_generation,
    the_model_is_that_of_one_process,
)
from tests.support.fsdp.matrix_optimizers import orthogonal
from tests.support.huggingface.tiny_runs import (
    Sequences,
    build_llama,
    fresh_accelerate,
    training_arguments,
)

Names = dict[str, Any]


@dataclass(frozen=True)
class PageProgram:
    """The Python blocks of a page, as a program.

    Attributes:
        before: gives the names that the page assumes the reader to have.
        checks: a function for each block, which looks at the names that there are after it.
    """

    before: Callable[[], Names]
    checks: tuple[Callable[[Names], None], ...]


def run_page(page: str, blocks: list[str], folder: str) -> None:
    """Job: run the blocks of a page in a folder that all ranks share."""
    os.chdir(folder)
    program = PROGRAMS[page]
    names = {"__name__": "page", "torch": torch, "dist": dist, "nn": nn, "dcp": dcp}
    with fresh_accelerate():
        names |= program.before()
        for number, code in enumerate(blocks):
            exec(compile(code, f"<block {number + 1} of {page}>", "exec"), names)
            program.checks[number](names)


def whole(state: dict[str, Any]) -> dict[str, Tensor]:
    """Gather the tensors of a state dict, under the names of the plain module."""
    return {name.removeprefix("module."): plain(value) for name, value in state.items()}


def assert_same(got: dict[str, Any], expected: dict[str, Any], tolerance: float = 0.0) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=tolerance, msg=name)


# ---- docs/working_with_a_sharded_model.md


class Watched:
    """A loss function that keeps the weights with which it was called."""

    def __init__(self) -> None:
        self.weights: list[dict[str, Tensor]] = []

    def __call__(self, model: nn.Module, batch: Tensor) -> Tensor:
        self.weights.append(whole(model.state_dict()))
        return model(input_ids=batch, labels=batch).loss


def sharded_llama() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return fully_shard(model, optimizer, fsdp_unit_modules=[type(model.model.layers[0])])


def before_working() -> Names:
    """Make a sharded model, a checkpoint of FSDP2, and whole states on rank 0."""
    theirs = build_llama()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.mul_(1.5)
    expected = {name: value.clone() for name, value in theirs.state_dict().items()}
    torch_fully_shard(theirs)
    dcp.save(theirs.state_dict(), checkpoint_id="from_fsdp2")

    trained, optimizer = sharded_llama()
    batches = [torch.arange(start, start + 12).view(1, 12) for start in (3, 9, 5)]
    trained(input_ids=batches[0], labels=batches[0]).loss.backward()
    optimizer.step()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    names: Names = {"expected": expected, "batches": batches, "loss_of": Watched()}
    names["weights"] = get_model_state_dict(trained, options=options)
    names["moments"] = get_optimizer_state_dict(trained, optimizer, options=options)
    names["trained"], names["trained_optimizer"] = trained, optimizer
    names["model"], names["optimizer"] = sharded_llama()
    names["averaged"] = averaged = {}
    names["evaluate"] = lambda model: averaged.update(whole(model.state_dict()))
    names["device"] = torch.device("cpu")
    return names


def any_rank_asks_all(names: Names) -> None:
    assert names["any_rank"](dist.get_rank() == 1) and not names["any_rank"](False)


def the_weights_are_those_of_fsdp2(names: Names) -> None:
    assert_same(whole(names["model"].state_dict()), names["expected"])


def the_states_are_those_of_rank_0(names: Names) -> None:
    assert bool(names["weights"]) == bool(names["moments"]) == (dist.get_rank() == 0)
    assert_same(whole(names["model"].state_dict()), whole(names["trained"].state_dict()))
    own, expected = (
        names[name].state_dict()["state"] for name in ("optimizer", "trained_optimizer")
    )
    for number, state in expected.items():
        assert_same(whole(own[number]), whole(state))


def the_averages_follow_the_weights(names: Names) -> None:
    """They are those computed by hand, saved, and no longer in the model; torch's class works."""
    weights = names["loss_of"].weights
    own = whole(names["model"].state_dict())
    expected = {name: value.clone() for name, value in weights[0].items()}
    for each in [*weights[1:], own]:
        for name, value in each.items():
            expected[name].lerp_(value, 0.001)
    assert len(weights) == len(names["batches"])
    assert_same(names["averaged"], expected, 1e-6)
    dist.barrier()
    saved = type(names["model"].module).from_pretrained("averaged")
    assert_same(saved.state_dict(), names["averaged"])
    average = AveragedModel(names["model"])
    average.update_parameters(names["model"])
    assert_same(whole(average.module.state_dict()), own)


# ---- docs/coming_from_megatron_fsdp.md


class MyNorm(nn.Module):
    """A norm that cannot initialise itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.weight


def before_programs() -> Names:
    """Build a model on the meta device."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), MyNorm(), nn.Linear(8, 8))
    functions = {"fully_shard": fully_shard, "fully_shard_model": fully_shard_model}
    return {"MyNorm": MyNorm, "model": model, "newton_schulz": orthogonal, **functions}


def every_module_has_values(names: Names) -> None:
    """They are those of the function, and of layers that were never on the meta device."""
    state = whole(names["model"].state_dict())
    assert torch.equal(state["1.weight"], torch.ones(8))
    for name in ("0.weight", "2.weight"):
        assert 0 < state[name].abs().max() <= 8**-0.5  # the bounds of nn.Linear
    names["before"] = state
    # The next block shards a model and an optimizer of its own.
    torch.manual_seed(3)
    names["model"] = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False))
    names["before"] = {name: each.clone() for name, each in names["model"].state_dict().items()}


def matrices_are_stepped_as_without_sharding(names: Names) -> None:
    expected = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False))
    expected.load_state_dict(names["before"])
    inputs = torch.randn(6, 8)
    for model in (expected, names["model"]):
        model(inputs).square().mean().backward()
    names["optimizer"].step()
    with torch.no_grad():
        for parameter in expected.parameters():
            parameter.sub_(orthogonal(parameter.grad), alpha=0.02)
    assert_same(whole(names["model"].state_dict()), expected.state_dict(), 1e-6)
    names |= before_second_generation()  # The next block shards a model of its own.


# ---- docs/optimizer_state.md


def before_offload() -> Names:
    return before_matrices() | {"CPUOffloadPolicy": CPUOffloadPolicy}


def the_model_trains_as_on_the_device(names: Names) -> None:
    reference = before_offload()["model"]
    optimizer = torch.optim.AdamW(reference.parameters(), lr=3e-4, fused=True)
    for _ in range(3):
        step_on_tokens(reference, [optimizer])
        step_on_tokens(names["model"], [names["optimizer"]])
    assert_same(whole(names["model"].state_dict()), reference.state_dict(), 1e-6)
    assert all(group.memory.is_offloaded for group in names["model"].groups)


# ---- docs/matrix_optimizers.md


class TwoMatrices(nn.Sequential):
    """A block of two matrices and their biases."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8))


class ModelOfMatrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 8), nn.Linear(8, 5)
        self.blocks = nn.ModuleList([TwoMatrices(), TwoMatrices()])

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)


def before_matrices() -> Names:
    torch.manual_seed(3)
    return {"model": ModelOfMatrices(), "Block": TwoMatrices, "fully_shard": fully_shard}


def step_on_tokens(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    model(torch.arange(5)).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def both_optimizers_step_as_without_sharding(names: Names) -> None:
    """Compare with a plain model of the same values, and optimizers over its parameters."""
    reference = ModelOfMatrices()
    reference.load_state_dict(whole(names["model"].state_dict()))
    named = dict(reference.named_parameters())
    kinds = [(torch.optim.Muon, names["muon"]), (torch.optim.AdamW, names["adamw"])]
    expected = []
    for kind, sharded in kinds:
        (group,) = sharded.param_groups
        own = [named[name.removeprefix("module.")] for name in group["param_names"]]
        expected.append(kind(own, lr=group["lr"]))
    for _ in range(3):
        step_on_tokens(reference, expected)
        step_on_tokens(names["model"], [names["muon"], names["adamw"]])
    assert_same(whole(names["model"].state_dict()), reference.state_dict(), 1e-6)
    names["momentum"] = momentum_of(names["muon"])


def momentum_of(muon: torch.optim.Optimizer) -> list[Tensor]:
    state = muon.state_dict()["state"]
    return [plain(slots["momentum_buffer"]) for slots in state.values()]


def the_momentum_is_that_before(names: Names) -> None:
    assert len(names["momentum"]) == 4
    for value, before in zip(momentum_of(names["muon"]), names["momentum"], strict=True):
        assert torch.equal(value, before) and value.any()


def adam_has_the_momentum_of_both(names: Names) -> None:
    """Compare with the state of both, and the first update with what the page says of it."""
    adam, model = names["adam"], names["model"]
    slots_of = {}
    for other in (names["muon"], names["adamw"]):
        for group in other.param_groups:
            own = other.state_dict()["state"].values()
            slots_of |= dict(zip(group["param_names"], own, strict=True))
    (group,) = adam.param_groups
    for name, slots in zip(group["param_names"], adam.state_dict()["state"].values(), strict=True):
        other = slots_of[name]
        first = plain(other["momentum_buffer" if "momentum_buffer" in other else "exp_avg"])
        second = plain(other["exp_avg_sq"]) if "exp_avg_sq" in other else first.square()
        assert torch.equal(plain(slots["exp_avg"]), first)
        assert torch.equal(plain(slots["exp_avg_sq"]), second) and slots["step"] == 3
    before = whole(model.state_dict())
    group["weight_decay"] = 0.0
    step_on_tokens(model, [adam])
    for name, value in whole(model.state_dict()).items():
        assert (value - before[name]).abs().max() <= 3.3 * group["lr"]
    muon = fully_shard_optimizer(torch.optim.Muon(names["muon"].param_groups[0]["params"]))
    with pytest.raises(ValueError, match="got the state of another optimizer, step, exp_avg"):
        part = adam.state_dict()
        kept = [
            n for n, name in enumerate(group["param_names"]) if "momentum_buffer" in slots_of[name]
        ]
        part["param_groups"][0]["params"] = kept
        part["param_groups"][0]["param_names"] = [group["param_names"][n] for n in kept]
        muon.load_state_dict(part)
    muon.load_state_dict(state_of_other_optimizers(muon, [adam.state_dict()]))
    (own,) = muon.param_groups
    first = dict(zip(group["param_names"], adam.state_dict()["state"].values(), strict=True))
    for name, slots in zip(own["param_names"], muon.state_dict()["state"].values(), strict=True):
        assert slots.keys() == {"momentum_buffer"}
        assert torch.equal(plain(slots["momentum_buffer"]), plain(first[name]["exp_avg"]))


def a_declared_optimizer_has_owners(names: Names) -> None:
    results = []
    for is_sharded in (False, True):
        torch.manual_seed(4)
        model = nn.Sequential(nn.Linear(8, 6, bias=False), nn.Linear(6, 3, bias=False))
        optimizer = names["Orthogonal"](model.parameters())
        if is_sharded:
            model, optimizer = fully_shard(model, optimizer)
        model(torch.eye(8)).square().sum().backward()
        optimizer.step()
        results.append(whole(model.state_dict()))
    assert_same(results[1], results[0], 1e-6)


# ---- docs/hugging_face.md


def before_hugging_face() -> Names:
    """Train to the checkpoint that the page loads."""
    import transformers

    from megatron_fsdp.huggingface import ShardedTrainer

    arguments = training_arguments("out", max_steps=60, save_strategy="steps", save_steps=60)
    trainer = ShardedTrainer(build_llama(), arguments, train_dataset=Sequences())
    trainer.train()
    return {
        "AutoModelForCausalLM": transformers.AutoModelForCausalLM,
        "config": build_llama().config,
        "trainer": trainer,
        "prompt": torch.tensor([[3, 4 + dist.get_rank()]]),
    }


def the_model_has_the_weights_of_the_shards(names: Names) -> None:
    trained = whole(names["trainer"].model_wrapped.state_dict())
    assert_same(names["model"].state_dict(), trained)
    dist.barrier()  # rank 0 has saved the model; transformers leaves it to that
    saved = names["AutoModelForCausalLM"].from_pretrained("final")
    assert_same(saved.state_dict(), trained)


def each_rank_generates_what_a_plain_model_does(names: Names) -> None:
    expected = names["model"].generate(names["prompt"], max_new_tokens=64, do_sample=False)
    assert torch.equal(names["tokens"], expected)


# ---- pages with programs over Megatron-Core


def before_megatron_core() -> Names:
    from megatron.mcore_adapter import cpu

    cpu.install()
    return {}


def the_settings_shard_a_model(names: Names) -> None:
    from tests.support.mcore_adapter.wrapped_models import backward, make_module

    _, config, module = make_module()
    size = sum(parameter.numel() for parameter in module.parameters())
    model = names["FullyShardedDataParallel"](config, names["ddp_config"], module)
    backward(model, 1)
    model.finish_grad_sync(force_all_reduce=False)
    owned = torch.tensor(sum(each.grad.to_local().numel() for each in model.parameters()))
    assert owned < size
    dist.all_reduce(owned)
    assert owned == size


def the_class_is_the_drop_ins(names: Names) -> None:
    import megatron.core.distributed as core_distributed

    from megatron.mcore_adapter import drop_in

    try:
        module = core_distributed.__dict__["FullyShardedDataParallel"].__module__
    finally:
        drop_in.uninstall()
    assert module.startswith("megatron.mcore_adapter.")


PROGRAMS = {
    "docs/working_with_a_sharded_model.md": PageProgram(
        before_working,
        (
            any_rank_asks_all,
            the_weights_are_those_of_fsdp2,
            the_states_are_those_of_rank_0,
            the_averages_follow_the_weights,
        ),
    ),
    "docs/coming_from_megatron_fsdp.md": PageProgram(
        before_programs,
        (
            every_module_has_values,
            matrices_are_stepped_as_without_sharding,
            the_model_is_that_of_one_process,
        ),
    ),
    "docs/matrix_optimizers.md": PageProgram(
        before_matrices,
        (
            both_optimizers_step_as_without_sharding,
            the_momentum_is_that_before,
            adam_has_the_momentum_of_both,
            a_declared_optimizer_has_owners,
        ),
    ),
    "docs/optimizer_state.md": PageProgram(before_offload, (the_model_trains_as_on_the_device,)),
    "docs/hugging_face.md": PageProgram(
        before_hugging_face,
        (the_model_has_the_weights_of_the_shards, each_rank_generates_what_a_plain_model_does),
    ),
    "docs/coming_from_megatron_lm.md": PageProgram(
        before_megatron_core, (the_class_is_the_drop_ins, the_settings_shard_a_model)
    ),
}
