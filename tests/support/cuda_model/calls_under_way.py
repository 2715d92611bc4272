# SPDX-License-Identifier: Apache-2.0
"""Trainings that call the library while its collectives are under way, or on another stream.

Each is compared with one that does the same without anything under way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_fsdp import MixedPrecisionPolicy
from tests.support.cuda_model.stacks import stack_on, step
from tests.support.fsdp.meshes import Meshes
from tests.support.fsdp.models import ResidualBlock, build_stack
from tests.support.fsdp.reference import batch, close, loss_of

STEPS = 3


def compared(
    train: Callable[[int, Meshes, bool], nn.Module],
    level: int,
    meshes: Meshes,
    tolerance: float = 0.0,
) -> Callable[[], None]:
    """Train with calls under way; return what compares the weights with those without.

    Args:
        train: returns a trained model; the last argument says whether calls are under way.
        level: of sharding.
        meshes: of the device.
        tolerance: of the comparison.
    """
    trained = train(level, meshes, True)

    def compare() -> None:
        expected = train(level, Meshes(), False).parameters()  # on the CPU
        for own, other in zip(trained.parameters(), expected, strict=True):
            close(own.to_local(), other.to_local(), "weight", tolerance)

    return compare


def backward(model: nn.Module, number: int, microbatch: int = 0) -> None:
    """Compute the gradients of a microbatch."""
    loss_of(model(batch(number, dist.get_rank(), microbatch))).backward()


def trained_on_two_streams(level: int, meshes: Meshes, has_two: bool) -> nn.Module:
    """Gather on one stream and compute on another one, as a schedule with two streams does."""
    model, optimizer = stack_on(level, meshes, sync_model_each_microbatch=False)
    compute = torch.cuda.Stream() if has_two else None
    for number in range(STEPS):
        model.start_param_sync()  # the stream that is current here waits for no gather
        if compute is not None:
            compute.wait_stream(torch.cuda.current_stream())
        with nullcontext() if compute is None else torch.cuda.stream(compute):
            backward(model, number)
            model.finish_grad_sync()
        if compute is not None:
            torch.cuda.current_stream().wait_stream(compute)
        optimizer.step()
        optimizer.zero_grad()
    return model


def trained_in_microbatches(level: int, meshes: Meshes, starts_early: bool) -> nn.Module:
    """Start to reduce gradients after each microbatch; the next one is added to them."""
    model, optimizer = stack_on(level, meshes, mesh="outer2", sync_model_each_microbatch=False)
    for number in range(STEPS):
        for microbatch in range(3):
            backward(model, number, microbatch)
            if starts_early:
                model.start_grad_sync()
        model.finish_grad_sync()
        optimizer.step()
        optimizer.zero_grad()
    return model


def trained_after_dropped_gradients(level: int, meshes: Meshes, are_reduced: bool) -> nn.Module:
    """Drop gradients while they are reduced."""
    model, optimizer = stack_on(level, meshes, sync_model_each_microbatch=False)
    for number in range(STEPS):
        if are_reduced:
            backward(model, number, 1)
            model.start_grad_sync()
            model.zero_grad_buffer()
        step(model, optimizer, number)
    return model


def trained_with_scaled_gradients(level: int, meshes: Meshes, are_reduced: bool) -> nn.Module:
    """Scale gradients while they are reduced."""
    model, optimizer = stack_on(level, meshes, sync_model_each_microbatch=False)
    for number in range(STEPS):
        backward(model, number)
        model.start_grad_sync()
        if not are_reduced:
            model.finish_grad_sync()
        model.scale_gradients(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model


def weights_kept(level: int, meshes: Meshes) -> None:
    """Train with compute weights that stay those of before the step until they are installed."""
    model, optimizer = stack_on(
        level,
        meshes,
        module=build_stack().bfloat16(),
        mixed_precision_policy=MixedPrecisionPolicy(torch.float32, torch.float32),
    )
    for number in range(STEPS):
        for microbatch in range(2):
            x = batch(number, dist.get_rank(), microbatch).bfloat16()
            loss_of(model(x)).backward()
            optimizer.step(install_optimized_model_weights=False)
            optimizer.zero_grad()
        model.install_optimized_model_weights()


class FourBlocks(nn.Module):
    """Four units of equal size, the two in the middle of which may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ResidualBlock() for _ in range(4))

    def forward(self, x: Tensor, leaves_out: bool) -> Tensor:
        """Return the output of the blocks, or of the first and the last one."""
        for number, block in enumerate(self.blocks):
            if not (leaves_out and number in (1, 2)):
                x = block(x)
        return x


def slot_left(level: int, meshes: Meshes) -> None:
    """Use a unit in whose memory slot another one is gathered, which is not used this time."""
    # The blocks 1 and 3 have one slot, as 0 and 2 have. After block 0 the next one is prefetched,
    # and block 3 is used: its shard is cast into the slot.
    torch.manual_seed(3)
    model, optimizer = stack_on(
        level,
        meshes,
        module=FourBlocks().bfloat16(),
        fsdp_double_buffer=True,
        mixed_precision_policy=MixedPrecisionPolicy(torch.float32, torch.float32),
    )
    for number in range(4):
        x = batch(number, dist.get_rank(), 0).bfloat16()
        loss_of(model(x, leaves_out=number > 1)).backward()
        optimizer.step()
        optimizer.zero_grad()


def driven_by_hand(level: int, meshes: Meshes) -> None:
    """Gather and reshard units, broadcast weights, and stop communication, between the steps."""
    model, optimizer = stack_on(level, meshes, sync_model_each_microbatch=False)
    for number in range(STEPS):
        model.start_param_sync(force_dispatch=True)
        handle = model.unshard(model.module.blocks[0], async_op=True)
        model.unshard(model.module.blocks[1])
        model.reshard(model.module.blocks[1])
        assert handle is not None
        handle.wait()
        in_float32 = MixedPrecisionPolicy(None, None, torch.float32)
        with model.mixed_precision_context(in_float32) if number == 1 else nullcontext():
            backward(model, number)
            model.start_grad_sync()
        model.stop_communication()
        model.finish_grad_sync()
        optimizer.step()
        optimizer.zero_grad()
        model.broadcast_params()


class BlockOfTwoDtypes(ResidualBlock):
    """A block with a layer in float32, so that its unit has two groups of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm.double()
        self.up.double()
        self.down.float()

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the block, in float64."""
        hidden = torch.tanh(self.up(self.norm(x)))
        return x + self.down(hidden.float()).double()


def reduced_in_two_dtypes(level: int, meshes: Meshes) -> None:
    """Reduce first microbatches in float64, for which gradients in float32 get other buffers."""
    torch.manual_seed(3)
    module = nn.Sequential(*(BlockOfTwoDtypes() for _ in range(3)))
    model, optimizer = stack_on(
        level,
        meshes,
        module=module,
        sync_model_each_microbatch=False,
        mixed_precision_policy=MixedPrecisionPolicy(None, None),
        fsdp_double_buffer=True,
    )
    in_float64 = MixedPrecisionPolicy(None, None, torch.float64)
    for number in range(STEPS):
        with model.mixed_precision_context(in_float64):
            backward(model, number, 0)
        backward(model, number, 1)
        model.finish_grad_sync()
        optimizer.step()
        optimizer.zero_grad()


def loaded_while_gathered(level: int, meshes: Meshes) -> None:
    """Take a state dict while the gathers of the next forward are under way, and write to it."""
    model, optimizer = stack_on(level, meshes)
    for number in range(2):
        step(model, optimizer, number)
        model.start_param_sync()
        state = model.state_dict()
        with torch.no_grad():
            for value in state.values():
                value.mul_(0.99)


def trained_with_edits_between(level: int, meshes: Meshes, has_forwards: bool) -> nn.Module:
    """Edit shards between forwards, in a way that torch does not see.

    A forward without a backward comes before: what it has kept for one is not read any more.
    """
    model, optimizer = stack_on(level, meshes)
    shards = [parameter.to_local().detach() for parameter in model.parameters()]
    for number in range(STEPS):
        if has_forwards:
            model(batch(number, dist.get_rank(), 1))
        with torch.no_grad():
            torch._foreach_mul_(shards, 0.99)
        step(model, optimizer, number)
    return model


class FailedBackward(Exception):  # noqa: N818 (what the training does, not what it finds)
    """The error of a backward that is to fail."""


def trained_after_failed_backwards(level: int, meshes: Meshes, has_failed: bool) -> nn.Module:
    """Begin anew after backward passes that have failed in the middle, on all ranks."""

    def fail(gradient: Tensor) -> None:
        raise FailedBackward

    model, optimizer = stack_on(level, meshes)
    for number in range(STEPS):
        if has_failed:
            hook = model.module.blocks[0].register_forward_hook(
                lambda block, arguments, output: output.register_hook(fail) and None
            )
            with suppress(FailedBackward):
                backward(model, number, 1)
            hook.remove()
        step(model, optimizer, number)
    return model


def trained_from_other_weights(level: int, meshes: Meshes, are_others: bool) -> nn.Module:
    """Begin with weights that are others on each rank: those of the first one count."""
    module = build_stack()
    if are_others:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(1 + dist.get_rank())
    model, optimizer = stack_on(level, meshes, module=module)
    for number in range(2):
        step(model, optimizer, number)
    return model


class ReadInBackward(torch.autograd.Function):
    """The identity; its backward reads the weight of a unit whose own backward comes next."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Linear) -> Tensor:
        ctx.layer = layer
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.layer.weight.square().mean(), None


class ReadsInBackward(FourBlocks):
    """Four units, in whose backward functions of the user read their weights."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the blocks."""
        for block in self.blocks:
            x = ReadInBackward.apply(block(x), next(iter(linear_layers(block))))
        return x


def linear_layers(module: nn.Module) -> Iterator[nn.Linear]:
    """Yield the linear layers of a module."""
    for each in module.modules():
        if isinstance(each, nn.Linear):
            yield each


def read_in_backward(level: int, meshes: Meshes) -> None:
    """Read weights in backward while they are gathered for it."""
    torch.manual_seed(3)
    model, optimizer = stack_on(level, meshes, module=ReadsInBackward().double())
    for number in range(2):
        step(model, optimizer, number)


CALLS_UNDER_WAY = [
    ("two streams", partial(compared, trained_on_two_streams), (1, 3)),
    ("dropped while reduced", partial(compared, trained_after_dropped_gradients), (0, 2)),
    ("scaled while reduced", partial(compared, trained_with_scaled_gradients), (0, 2)),
    ("weights kept", weights_kept, (1, 3)),
    ("slot left", slot_left, (3,)),
    ("read in backward", read_in_backward, (3,)),
    ("other weights", partial(compared, trained_from_other_weights), (0, 3)),
    ("driven by hand", driven_by_hand, (1, 3)),
    ("reduced in two dtypes", reduced_in_two_dtypes, (3,)),
    ("loaded while gathered", loaded_while_gathered, (1, 3)),
    ("edits between forwards", partial(compared, trained_with_edits_between), (3,)),
    ("backward that fails", partial(compared, trained_after_failed_backwards), (2, 3)),
]
"""Ways through the library, with the levels at which they run."""
STARTED_BETWEEN = partial(compared, trained_in_microbatches, 0, tolerance=1e-11)
"""Gradients of whole parameters, reduced over two axes, the second of which is still under way."""
