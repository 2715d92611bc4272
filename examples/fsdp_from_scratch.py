# SPDX-License-Identifier: Apache-2.0
"""Fully sharded data parallelism (ZeRO level 3) from scratch, with torch alone.

    torchrun --nproc_per_node 2 examples/fsdp_from_scratch.py

Every rank has a part of every weight, of its gradient and of its optimizer state. A layer's weights
are gathered from all ranks just before the layer uses them and freed just after, in the forward and
again in the backward; its gradients are summed over the ranks and divided among them at once.

Read `Unit` first: what is done to the weights of one layer. `Schedule` says when, by hooks that
PyTorch calls. `train` is the loop. The losses are those of `megatron_fsdp.fully_shard` and of one
process that trains on all batches. What is missing: GPUs, several dtypes, weights that are frozen,
unused or tied, layers called in any order or several times, and checkpoints.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

VOCABULARY, WIDTH, LAYERS, BATCH = 64, 32, 4, 16

# torch has renamed both: the second name is that of releases before.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Unit:
    """The parameters of a layer, which are gathered and freed together.

    They lie one after another in a flat buffer, so that one all-gather fills all of them and one
    reduce-scatter takes all of their gradients. Rank r owns the elements
    [r * shard_size, (r + 1) * shard_size) of the buffer, no matter which parameters they cut.

    Attributes:
        parameters: what the layer computes with; their memory is `flat`, which comes and goes
        flat: the flat buffer of all ranks' shards
        shard: this rank's shard, which stays and which the optimizer updates
        gather, reduction: the collectives under way, if any; the latter with its input and output
    """

    def __init__(self, layer: nn.Module) -> None:
        self.parameters = list(layer.parameters())
        self.sizes = [parameter.numel() for parameter in self.parameters]
        # Rounded up: shards have one size, so the buffer may end with padding.
        self.shard_size = -(-sum(self.sizes) // dist.get_world_size())
        self.flat = torch.zeros(self.shard_size * dist.get_world_size())
        for parameter, part in zip(self.parameters, self.split(self.flat)):
            parameter.data = part.copy_(parameter.data)
        shards = self.flat.chunk(dist.get_world_size())
        self.shard = nn.Parameter(shards[dist.get_rank()].clone())
        self.gather: dist.Work | None = None
        self.reduction: tuple[dist.Work, Tensor, Tensor] | None = None
        self.missing_gradients = len(self.parameters)
        self.reshard()

    def split(self, buffer: Tensor) -> list[Tensor]:
        """Return the parts of a flat buffer that belong to the parameters, in their shapes."""
        parts = buffer[: sum(self.sizes)].split(self.sizes)
        return [part.view(own.shape) for part, own in zip(parts, self.parameters)]

    def start_unshard(self) -> None:
        """Start the all-gather of the weights, unless they are there or on their way."""
        if self.flat.untyped_storage().size() == 0:
            # The parameters, and what autograd saves of them, are views of this storage.
            self.flat.untyped_storage().resize_(self.flat.numel() * self.flat.element_size())
            self.gather = all_gather(self.flat, self.shard.detach(), async_op=True)

    def wait_for_unshard(self) -> None:
        """Wait until the weights are there."""
        if self.gather is not None:
            self.gather.wait()
            self.gather = None

    def reshard(self) -> None:
        """Free the gathered weights; the shard remains."""
        self.flat.untyped_storage().resize_(0)

    def start_reduction(self) -> None:
        """Start the reduce-scatter of the gradients, and free those of single parameters."""
        whole = torch.zeros(self.flat.numel())
        for parameter, part in zip(self.parameters, self.split(whole)):
            # Divided, because the sum over the ranks should be the mean over all of their batches.
            part.copy_(parameter.grad / dist.get_world_size())
            parameter.grad = None
        own = torch.empty(self.shard_size)
        self.reduction = reduce_scatter(own, whole, async_op=True), whole, own

    def finish_reduction(self) -> None:
        """Add this rank's shard of the summed gradients to the gradient that the optimizer sees."""
        if self.reduction is not None:
            work, _, own = self.reduction
            work.wait()
            # A sum: several backwards may come before a step (gradient accumulation).
            self.shard.grad = own if self.shard.grad is None else self.shard.grad + own
            self.reduction = None


class Schedule:
    """The time at which units are unsharded, resharded and reduced.

    While a unit computes, the weights of the next one are on their way, and so are the gradients of
    the one before, so communication costs time only where it is slower than compute. The price is
    memory, and it is bounded: two units have whole weights, and two have whole gradients.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self.units: list[Unit] = []
        for number, layer in enumerate(layers):
            self.units.append(Unit(layer))
            self.add_hooks(number, layer)

    def add_hooks(self, number: int, layer: nn.Module) -> None:
        """Let PyTorch call the methods below as a step passes through a unit."""
        layer.register_forward_pre_hook(lambda *_: self.use(number, number + 1))
        layer.register_forward_hook(lambda _, inputs, output: self.after_forward(number, output))
        for parameter in self.units[number].parameters:
            parameter.register_post_accumulate_grad_hook(lambda _: self.after_gradient(number))

    def use(self, number: int, following: int) -> None:
        """Unshard a unit, and start with the one that follows."""
        # All ranks start the same collectives in the same order, or they would wait forever.
        self.units[number].start_unshard()
        if 0 <= following < len(self.units):
            self.units[following].start_unshard()
        self.units[number].wait_for_unshard()

    def after_forward(self, number: int, output: Tensor) -> None:
        """Reshard a unit until the gradient of its output is known, which begins its backward."""
        self.units[number].reshard()
        if output.requires_grad:  # the backward passes through the units in the opposite order
            output.register_hook(lambda _: self.use(number, number - 1))

    def after_gradient(self, number: int) -> None:
        """Reshard and reduce a unit once the last of its parameters has its gradient."""
        unit = self.units[number]
        unit.missing_gradients -= 1
        if unit.missing_gradients == 0:
            unit.missing_gradients = len(unit.parameters)
            # Operations that read a weight in backward also compute its gradient: all have run.
            unit.reshard()
            self.finish_reductions()  # one at a time, which bounds the memory of whole gradients
            unit.start_reduction()

    def finish_reductions(self) -> None:
        """Wait for the gradients under way: all must be there before the optimizer steps."""
        for unit in self.units:
            unit.finish_reduction()


class Residual(nn.Sequential):
    """Layers whose result is added to their input, float32 (batch, width)."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + super().forward(hidden)


def build_model() -> nn.Sequential:
    """Build a model with the same weights on every rank: its children are the units."""
    torch.manual_seed(0)
    layers = [
        Residual(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, WIDTH))
        for _ in range(LAYERS)
    ]
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *layers, nn.Linear(WIDTH, VOCABULARY))


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    """Return the loss of a rank's batch: the model learns which token follows a token."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(VOCABULARY, (BATCH,), generator=generator)
    return nn.functional.cross_entropy(model(tokens), (5 * tokens + 3) % VOCABULARY)


def train(steps: int) -> list[float]:
    """Train a sharded model, and return the mean loss over the ranks of every step."""
    model = build_model()
    schedule = Schedule(model)
    # Adam treats every element by itself, so shards are updated as whole parameters would be.
    optimizer = torch.optim.AdamW([unit.shard for unit in schedule.units], lr=1e-2)
    losses = []
    for step in range(steps):
        loss = loss_of(model, step, dist.get_rank())
        loss.backward()
        schedule.finish_reductions()  # the one line that other loops do not have
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        losses.append(mean.item())
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for step, loss in enumerate(train(steps=20), 1):
        if dist.get_rank() == 0 and step % 5 == 0:
            print(f"step {step:3d}  loss {loss:.4f}")
    dist.destroy_process_group()
