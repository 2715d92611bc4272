# SPDX-License-Identifier: Apache-2.0
"""The engine on one GPU: what the CPU tests show, through CUDA streams and storage.

Skipped where there is no GPU, but for rehearsals of tests/gpu/check.py: these take the CPU.
"""

import copy
import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

HAS_GPU = torch.cuda.is_available()
IS_REHEARSED = "REHEARSE_GPU_CHECK" in os.environ
DEVICE = torch.device("cuda", 0) if HAS_GPU else torch.device("cpu")
pytestmark = pytest.mark.skipif(not HAS_GPU and not IS_REHEARSED, reason="needs a GPU")


class GpuBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


@pytest.fixture(scope="module", autouse=True)
def world_of_one() -> Iterator[None]:
    if HAS_GPU:
        torch.cuda.set_device(0)
    dist.init_process_group(
        "nccl" if HAS_GPU else "gloo",
        store=dist.HashStore(),
        rank=0,
        world_size=1,
        device_id=DEVICE if HAS_GPU else None,
    )
    yield
    dist.destroy_process_group()


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(64, 32), *[GpuBlock(32) for _ in range(4)], nn.Linear(32, 64))


@pytest.mark.parametrize("level", range(4))
def test_gradients_and_weights_match_the_unsharded_model(level: int) -> None:
    from megatron.fsdp.dtensor.tensor_part import full_tensor
    from megatron_fsdp import fully_shard

    reference = make_model().double().to(DEVICE)
    reference_optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    module = copy.deepcopy(reference).float()
    model, optimizer = fully_shard(
        module,
        torch.optim.AdamW(module.parameters(), lr=1e-2),
        fsdp_unit_modules=[GpuBlock],
        zero_dp_strategy=level,
    )
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(64, (8, 16), generator=generator).to(DEVICE)
        for network, updater in ((model, optimizer), (reference, reference_optimizer)):
            updater.zero_grad()
            network(tokens).logsumexp(-1).square().mean().backward()
        for sharded, whole in zip(model.parameters(), reference.parameters()):
            torch.testing.assert_close(
                full_tensor(sharded.grad).double(), whole.grad, rtol=1e-4, atol=1e-6
            )
        optimizer.step()
        reference_optimizer.step()
    for sharded, whole in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(
            full_tensor(sharded).double(), whole.detach(), rtol=1e-4, atol=1e-5
        )


@pytest.mark.skipif(not HAS_GPU, reason="a CPU has no streams")
def test_collectives_run_on_streams_of_their_own() -> None:
    from megatron.fsdp.engine.device import CudaStreams

    streams = CudaStreams(torch.device("cuda", 0))
    seen = {}
    streams.launch(
        "gather", lambda asynchronous: seen.setdefault("gather", torch.cuda.current_stream())
    ).wait()
    streams.launch(
        "reduce", lambda asynchronous: seen.setdefault("reduce", torch.cuda.current_stream())
    ).wait()
    assert len({seen["gather"], seen["reduce"], torch.cuda.current_stream()}) == 3
