# SPDX-License-Identifier: Apache-2.0
"""Trainings that copy weights to the host, and run on the model of a CUDA device."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.fsdp import Offload
from megatron.fsdp.optimizer import block_update
from megatron.mcore_adapter.checkpoints.staging import StagingBuffer
from megatron_fsdp import MixedPrecisionPolicy, fully_shard
from tests.support.fsdp.meshes import Meshes, device_type
from tests.support.fsdp.models import ResidualBlock, build_stack
from tests.support.fsdp.reference import batch, loss_of, optimizer_over


def offloaded_by_hand(level: int, meshes: Meshes) -> None:
    """Scale offloaded gradients and step while copies to and from the host are under way."""
    module = build_stack().to(device_type())
    model, optimizer = fully_shard(
        module,
        optimizer_over(module),  # not fused: small shards are updated in blocks
        **meshes.arguments("flat"),
        fsdp_unit_modules=[ResidualBlock],
        zero_dp_strategy=level,
        mixed_precision_policy=MixedPrecisionPolicy(None),
        offload_policy=Offload(),
        sync_model_each_microbatch=False,
    )
    for number in range(2):
        for microbatch in range(2):
            loss_of(model(batch(number, dist.get_rank(), microbatch))).backward()
        model.start_grad_sync()
        model.scale_gradients(0.5)
        model.finish_grad_sync()
        optimizer.step()
        model.start_param_sync()
        optimizer.step()
        optimizer.zero_grad()


def offloaded_in_blocks(optimizer: str, pins: bool, meshes: Meshes) -> Callable[[], None]:
    """Train with offloaded weights, which are updated on the device in four blocks."""

    def steps(module: nn.Module, optimizer: torch.optim.Optimizer, device: str) -> None:
        for number in range(3):
            module(torch.full((2, 64), number + 1.0, device=device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    # Fused kernels update blocks of shards of a multiple of 64 elements. This one has 2048.
    torch.manual_seed(4)
    module = nn.Linear(64, 64, bias=False)
    reference = copy.deepcopy(module)
    model, sharded_optimizer = fully_shard(
        module.to(device_type()),
        optimizer_over(module, optimizer),
        **meshes.arguments("flat"),
        fsdp_unit_modules=[nn.Linear],
        offload_policy=Offload(pins=pins, on_device=True),
    )
    (weight,) = model.parameters()
    copied = [0]
    with patch.object(block_update, "BLOCK_BYTES", 2048), counting_bytes(copied):
        steps(model, sharded_optimizer, device_type())
        assert weight.to_local().isfinite().all()  # the host reads what has come back
    # In each step weights, gradients and two moments to the device, and all but gradients back.
    assert copied[0] == 3 * (4 + 3) * weight.to_local().nbytes > 0

    def compare() -> None:
        steps(reference, optimizer_over(reference, optimizer), "cpu")
        (expected,) = reference.parameters()
        expected_shard = expected.detach().view(-1).chunk(dist.get_world_size())[dist.get_rank()]
        torch.testing.assert_close(weight.to_local().detach().view(-1), expected_shard)

    return compare


@contextmanager
def counting_bytes(copied: list[int]) -> Iterator[None]:
    """Add the bytes of the blocks of offloaded weights that are copied to ``copied[0]``."""
    copy_block = block_update._copy

    def counted(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        copied[0] += sum(source.nbytes for source in sources)
        copy_block(targets, sources)

    with patch.object(block_update, "_copy", counted):
        yield


def saved_behind(level: int, meshes: Meshes) -> None:
    """Copy weights to the buffer of a save, at once and in a thread, and train on."""
    module = nn.Linear(256, 256, bias=False).to(device_type())  # large enough for the thread
    model, optimizer = fully_shard(
        module, optimizer_over(module), **meshes.arguments("flat"), zero_dp_strategy=level
    )
    buffer = StagingBuffer()
    for number in range(4):
        x = torch.full((2, 256), number + 1.0, device=device_type())
        model(x).square().mean().backward()
        buffer.finish()
        optimizer.step()
        optimizer.zero_grad()
        weights = {name: weight.to_local() for name, weight in model.named_parameters()}
        buffer.stage(weights, is_changing=lambda tensor, number=number: number % 2 == 0)
    buffer.finish()
    buffer.close()


def saved_behind_on_another_stream(level: int, meshes: Meshes) -> None:
    """Do the same where the training has a stream of its own."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        saved_behind(level, meshes)
    torch.cuda.current_stream().wait_stream(stream)
