# SPDX-License-Identifier: Apache-2.0
"""Experts with a mesh of their own: expert parallelism beside full sharding, on CPU or GPU.

    torchrun --nproc_per_node 4 examples/expert_mesh_loop.py

Four ranks shard the dense weights four ways. The experts are divided over pairs of ranks, and each
half is sharded over the two ranks that have it. Tokens travel to their expert by an all-to-all. The
losses do not depend on how the experts are divided (`--expert-parallel 1`, `2` or `4`).
"""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron_fsdp import MegatronFSDP, fully_shard

WIDTH, NUM_EXPERTS, TOKENS = 32, 4, 64


class MixtureLayer(nn.Module):
    """A layer whose tokens each go to one of the experts: the unit that is gathered as a whole.

    Parameters in a module called ``experts`` are sharded over the expert mesh.
    """

    def __init__(self, experts_mesh: DeviceMesh) -> None:
        super().__init__()
        self.group = experts_mesh["ep"].get_group()
        here = NUM_EXPERTS // experts_mesh["ep"].size()
        first = here * experts_mesh.get_local_rank("ep")
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, NUM_EXPERTS)
        everywhere = [  # equal weights for every division
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(NUM_EXPERTS)
        ]
        self.experts = nn.ModuleList(everywhere[first : first + here])

    def forward(self, hidden: Tensor) -> Tensor:
        """Map float (tokens, width) to the same shape."""
        normed = self.norm(hidden)
        probability, expert = self.router(normed).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        counts = expert.bincount(minlength=NUM_EXPERTS)
        outputs = torch.empty_like(normed).index_copy(0, order, self.compute(normed[order], counts))
        return hidden + probability[:, None] * outputs

    def compute(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Send tokens, sorted by expert, to their ranks; return what the experts make of them."""
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)  # [sender, expert of this rank]
        to_rank = counts.view(-1, len(self.experts)).sum(1).tolist()
        from_rank = arriving.view(-1, len(self.experts)).sum(1).tolist()
        received = all_to_all_single_autograd(tokens, from_rank, to_rank, self.group)
        parts = received.split(arriving.tolist())
        results = [
            self.experts[index % len(self.experts)](part) for index, part in enumerate(parts)
        ]
        return all_to_all_single_autograd(torch.cat(results), to_rank, from_rank, self.group)


def build(device: torch.device, expert_parallel: int) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    """Build a sharded model and its optimizer."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("shard",))
    sizes = (ranks // expert_parallel, expert_parallel)
    experts_mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("shard", "ep"))
    torch.manual_seed(0)
    layers = [MixtureLayer(experts_mesh) for _ in range(2)]
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers, nn.Linear(WIDTH, WIDTH)).to(device)
    return fully_shard(
        model,
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        fsdp_unit_modules=[MixtureLayer],
        device_mesh=mesh,
        dp_shard_dim="shard",
        expt_device_mesh=experts_mesh,
    )


def main() -> None:
    """Train, and print losses and the number of weights on this rank."""
    parser = argparse.ArgumentParser(description="Train a small mixture of experts.")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--expert-parallel", type=int, default=2, help="ranks that share experts")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if device.type == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    model, optimizer = build(device, args.expert_parallel)
    owned: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(owned, sum(each.to_local().numel() for each in model.parameters()))
    if dist.get_rank() == 0:
        print(f"weights of each rank: {owned}")

    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(1, args.steps + 1):
        inputs = torch.randn(TOKENS, WIDTH, generator=generator).to(device)
        loss = nn.functional.mse_loss(model(inputs), inputs.sort(dim=-1).values)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 25 == 0:
            mean = loss.detach() / dist.get_world_size()
            dist.all_reduce(mean)
            if dist.get_rank() == 0:
                print(f"step {step:4d}  loss {mean.item():.4f}")
    dist.barrier()  # without it a gloo rank occasionally aborts at exit while others still work
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
