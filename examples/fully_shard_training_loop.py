# SPDX-License-Identifier: Apache-2.0
"""A plain PyTorch training loop with a fully sharded model, on CPU or GPU.

    torchrun --nproc_per_node 2 examples/fully_shard_training_loop.py

Only the line with `fully_shard` differs from training on one device. The model learns to read a
sequence backwards; the program prints the loss, saves a checkpoint with
torch.distributed.checkpoint and continues from it.
"""

import argparse
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from megatron_fsdp import fully_shard

VOCABULARY, LENGTH, WIDTH = 16, 8, 64


class ReverserBlock(nn.Module):
    """Attention and a feed-forward layer: the unit that is gathered and resharded as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, num_heads=4, batch_first=True)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Map float (batch, length, width) to the same shape."""
        normed = self.attention_norm(hidden)
        hidden = hidden + self.attention(normed, normed, normed, need_weights=False)[0]
        return hidden + self.feed_forward(hidden)


class Reverser(nn.Module):
    """Embedding, blocks and an output layer."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.blocks = nn.Sequential(*(ReverserBlock() for _ in range(num_blocks)))
        self.output = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens, int64 (batch, length), to logits, float (batch, length, vocabulary)."""
        return self.output(self.blocks(self.token(tokens) + self.position))


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, steps: int
) -> float:
    """Run training steps, each on fresh random data of this rank.

    Returns:
        The mean loss over the ranks at the last step.
    """
    for step in range(steps):
        tokens = torch.randint(VOCABULARY, (32, LENGTH), device=device)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flip(1).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == steps - 1:
            mean_loss = loss.detach() / dist.get_world_size()
            dist.all_reduce(mean_loss)
            if dist.get_rank() == 0:
                print(f"step {step:4d}  loss {mean_loss.item():.4f}")
    return mean_loss.item()


def build(device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build a sharded model and its optimizer, the same on every call."""
    torch.manual_seed(0)
    model = Reverser(num_blocks=2).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return fully_shard(model, optimizer, fsdp_unit_modules=[ReverserBlock])


def main() -> None:
    """Train, save, load into a freshly built model, and continue training."""
    parser = argparse.ArgumentParser(
        description="Train a small model that reads sequences backwards, fully sharded."
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=200,
        help="training steps before the checkpoint, half as many after it",
    )
    steps = parser.parse_args().steps
    if steps < 2:
        parser.error(f"--steps expects at least 2 but got {steps}")

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if device.type == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())

    model, optimizer = build(device)
    torch.manual_seed(1 + dist.get_rank())  # each rank draws its own data
    train(model, optimizer, device, steps)

    directory = [tempfile.mkdtemp(prefix="fully_shard_") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(directory)
    dcp.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        checkpoint_id=directory[0],
    )

    model, optimizer = build(device)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=directory[0])
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    if dist.get_rank() == 0:
        print(f"continuing from {directory[0]}")
    torch.manual_seed(1001 + dist.get_rank())
    train(model, optimizer, device, steps // 2)
    dist.barrier()  # without it a gloo rank occasionally aborts at exit while others still work
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
