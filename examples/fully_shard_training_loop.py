# SPDX-License-Identifier: Apache-2.0
"""A plain PyTorch training loop with a fully sharded model, on CPU or GPU.

    torchrun --nproc_per_node 2 examples/fully_shard_training_loop.py

The model learns to read sequences backwards, in bfloat16 with float32 main weights. Gradients of
two microbatches are accumulated and clipped; an average of the weights is evaluated; all of it is
saved. Run it again with more `--steps`, on any number of ranks, and it continues from there.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from megatron.fsdp.weight_average import WeightAverage
from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy, fully_shard

VOCABULARY, LENGTH, WIDTH, MICROBATCHES = 16, 8, 64, 2


class Reverser(nn.Module):
    """Embedding, layers of attention, and an output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH))
        layers = [nn.TransformerEncoderLayer(WIDTH, 4, 256, 0, batch_first=True) for _ in range(2)]
        self.layers = nn.Sequential(*layers)
        self.output = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens, int64 (batch, length), to logits, bfloat16 (batch, length, vocabulary)."""
        return self.output(self.layers(self.token(tokens) + self.position))


def build(device: torch.device, replicas: int) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    """Build a model and its optimizer, sharded over groups of ranks that replicate each other."""
    sizes = (replicas, dist.get_world_size() // replicas)
    torch.manual_seed(0)
    model = Reverser().to(device, torch.bfloat16)
    return fully_shard(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        fsdp_unit_modules=[nn.TransformerEncoderLayer],
        device_mesh=init_device_mesh(device.type, sizes, mesh_dim_names=("replicate", "shard")),
        dp_shard_dim="shard",
        dp_outer_dim="replicate",
        mixed_precision_policy=MixedPrecisionPolicy(main_grads_dtype=torch.float32),
    )


def loss_of(model: nn.Module, device: torch.device, batch: int) -> Tensor:
    """Return the loss of this rank's batch of that number."""
    generator = torch.Generator().manual_seed(batch * dist.get_world_size() + dist.get_rank())
    tokens = torch.randint(VOCABULARY, (32, LENGTH), generator=generator).to(device)
    logits = model(tokens).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flip(1).flatten())


def show(line: str, loss: Tensor) -> None:
    """Print the mean of a loss over the ranks."""
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    if dist.get_rank() == 0:
        print(f"{line}  loss {mean.item():.4f}")


def main() -> None:
    """Continue from the checkpoint if there is one, train, evaluate, and save."""
    parser = argparse.ArgumentParser(description="Train a small model, fully sharded.")
    parser.add_argument("--steps", type=int, default=200, help="the last step")
    parser.add_argument("--replicas", type=int, default=1, help="hybrid sharding: copies of shards")
    parser.add_argument("--checkpoints", type=Path, default="checkpoints/reverser")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if device.type == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    model, optimizer = build(device, args.replicas)
    average = WeightAverage(model, decay=0.9)
    parts = {"model": model, "optimizer": optimizer, "average": average}
    state = {name: part.state_dict() for name, part in parts.items()} | {"step": 0}
    saved = sorted(args.checkpoints.glob("step_*/.metadata"))
    if saved:
        dcp.load(state, checkpoint_id=saved[-1].parent)
        for name, part in parts.items():
            part.load_state_dict(state[name])
        if dist.get_rank() == 0:
            print(f"continuing after step {state['step']}")

    for step in range(state["step"] + 1, args.steps + 1):
        for microbatch in range(MICROBATCHES):
            loss = loss_of(model, device, step * MICROBATCHES + microbatch)
            (loss / MICROBATCHES).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        average.update()
        if step % 50 == 0:
            show(f"step {step:4d}", loss)

    model.eval()
    with torch.no_grad():
        show("evaluation", loss_of(model, device, 0))
        with average.applied():
            show("evaluation of the average", loss_of(model, device, 0))
    state = {name: part.state_dict() for name, part in parts.items()} | {"step": args.steps}
    dcp.save(state, checkpoint_id=args.checkpoints / f"step_{args.steps:06d}")
    dist.barrier()  # without it a gloo rank occasionally aborts at exit while others still work
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
