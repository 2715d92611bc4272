# SPDX-License-Identifier: Apache-2.0
"""One communication unit: parameters of a unit that share dtype and trainability.

[Note: the tensors of a group]
    compute parameter  what the module's forward uses; a view into ``compute``, whose storage comes and goes at level 3
    compute shard      this rank's slice of the compute weights, always there; what gathers send
    main shard         what the optimizer updates; the compute shard itself where the dtypes agree
    local gradient     what backward passes on this rank have left since the last reduction, whole, in ``grads``
    gradient shard     the reduced gradient of this rank's slice, summed over reductions until ``zero_grad``
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Sequence

import torch
from torch import nn

from megatron.fsdp.buffer import FlatBuffer, shard_view
from megatron.fsdp.collectives import Communicator
from megatron.fsdp.device import Pending
from megatron.fsdp.layout import plan
from megatron.fsdp.policy import Precision, ShardingStrategy


class GatherState(Enum):
    SHARDED = auto()  # the compute parameters are away (level 3) or older than the main weights (levels 1 and 2)
    GATHERING = auto()  # a gather is under way
    UNSHARDED = auto()  # the compute parameters may be read


class ParamGroup:
    """Weights and gradients of some parameters, sharded together.

    Args:
        names: of the parameters, for messages and checkpoints.
        parameters: compute parameters on ``device``; they become views into the group's buffer.
        strategy: what is sharded.
        precision: dtypes of main weights and gradients.
        communicator: the shard axis.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        strategy: ShardingStrategy,
        precision: Precision,
        communicator: Communicator,
        device: torch.device,
    ):
        self.names = list(names)
        self.parameters = list(parameters)
        self.strategy = strategy
        self.precision = precision
        self.requires_grad = parameters[0].requires_grad
        self._communicator = communicator
        shards = communicator.size if strategy.shards_optimizer else 1
        self.rank = communicator.rank if strategy.shards_optimizer else 0
        self.layout = plan([tuple(parameter.shape) for parameter in parameters], shards)
        self._comes_and_goes = strategy.shards_parameters and shards > 1

        self._init_weights(device)
        self._grads: FlatBuffer | None = None  # made at the first backward
        self._has_local_grad = False
        self.grad_shard: torch.Tensor | None = None
        self._has_grad = False
        self._optimizer_grad: torch.Tensor | None = None  # the gradient shard in the main dtype, where they differ
        self._reduction: tuple[Pending, torch.Tensor, torch.Tensor] | None = None

    # ---- weights -------------------------------------------------------------------------------------------------

    def _init_weights(self, device: torch.device) -> None:
        self.compute = FlatBuffer(self.layout, self.precision.compute, device)
        with torch.no_grad():
            self.compute.flat.zero_()
            for index, parameter in enumerate(self.parameters):
                view = self.compute.view(index)
                view.copy_(parameter)
                # `.data` gives a version counter of its own: gathers do not look like in-place edits to autograd.
                parameter.data = view.data
            # Ranks that began with different seeds would train different replicas.
            self._communicator.broadcast(self.compute.flat)
            mine = self.compute.shard(self.rank)
            self.compute_shard = mine.clone() if self._comes_and_goes else mine
            same = self.precision.main_param == self.precision.compute
            self.main_shard = self.compute_shard if same else self.compute_shard.to(self.precision.main_param)
        self.state = GatherState.UNSHARDED
        self._gather: Pending | None = None
        self.reshard()

    def main_view(self, index: int) -> torch.Tensor:
        """This rank's piece of main parameter ``index``."""
        return shard_view(self.main_shard, self.layout, index, self.rank)

    def unshard(self) -> None:
        """Begin to gather the compute parameters, unless they are there or on their way."""
        if self.state is GatherState.SHARDED:
            self.compute.allocate()
            self._gather = self._communicator.all_gather(self.compute.flat, self.compute_shard)
            self.state = GatherState.GATHERING

    def wait_for_unshard(self) -> None:
        """Return when the compute parameters may be read."""
        if self.state is GatherState.GATHERING:
            self._gather.wait()
            self._gather = None
            self.state = GatherState.UNSHARDED

    def reshard(self) -> None:
        """Free the gathered compute parameters, at level 3."""
        if self._comes_and_goes:
            self.wait_for_unshard()
            self.compute.free()
            self.state = GatherState.SHARDED

    @torch.no_grad()
    def install_main_weights(self) -> None:
        """Cast main weights into the compute shard; what was gathered from the old ones is out of date."""
        self.wait_for_unshard()
        if self.main_shard is not self.compute_shard:
            self.compute_shard.copy_(self.main_shard)
        if self.layout.world_size > 1:
            gathered = self._comes_and_goes and self.state is GatherState.UNSHARDED
            self.state = GatherState.SHARDED
            if gathered:  # someone holds the unit: refresh in place
                self.unshard()
                self.wait_for_unshard()

    @torch.no_grad()
    def broadcast(self) -> None:
        """Take the main weights of the first rank of the axis. Where they are sharded every piece has one owner, and
        there is nothing to take."""
        if not self.strategy.shards_optimizer:
            self._communicator.broadcast(self.main_shard)
            self.install_main_weights()

    # ---- gradients -----------------------------------------------------------------------------------------------

    @property
    def has_local_grad(self) -> bool:
        """Whether this rank holds gradients that no reduction has taken yet."""
        return self._has_local_grad

    @torch.no_grad()
    def accumulate(self) -> None:
        """Move the gradients that autograd left on the compute parameters into the group's buffer."""
        arrived = [index for index, parameter in enumerate(self.parameters) if parameter.grad is not None]
        if not arrived:
            return
        views = self._open_grads(complete=len(arrived) == len(self.parameters))
        targets = [views[index] for index in arrived]
        grads = [self.parameters[index].grad for index in arrived]
        if self._has_local_grad:
            torch._foreach_add_(targets, grads)
        else:
            torch._foreach_copy_(targets, grads)
        self._has_local_grad = True
        for index in arrived:
            self.parameters[index].grad = None

    def _open_grads(self, complete: bool) -> list[torch.Tensor]:
        """Storage for local gradients, zero where nothing is about to be written."""
        if self._grads is None:
            # Between reductions gradients add up in the main dtype. Where every backward is reduced, the buffer
            # holds one contribution only and is in the dtype that travels.
            dtype = self.precision.grad_comm if self.strategy.shards_gradients else self.precision.main_grad
            self._grads = FlatBuffer(self.layout, dtype, self.compute.flat.device)
            self._grad_views = [self._grads.view(index) for index in range(len(self.parameters))]
        if not self._has_local_grad:
            self._grads.allocate()
            self._grads.zero_padding() if complete else self._grads.flat.zero_()
        return self._grad_views

    @torch.no_grad()
    def reduce(self) -> None:
        """Begin to reduce the local gradients; without any, this rank adds zeros to what the others have."""
        self.wait_for_reduce()
        if not self._has_local_grad:
            self._open_grads(complete=False)
        full = self._grads.flat.to(self.precision.grad_comm)
        if self.layout.world_size > 1:
            direct = not self._has_grad and self.precision.grad_comm == self.precision.main_grad
            result = self._shard_buffer() if direct else full.new_empty(self.layout.shard_size)
            pending = self._communicator.reduce_scatter(full, result)
        else:
            result, pending = full, self._communicator.all_reduce(full)
        self._has_local_grad = False
        self._reduction = (pending, full, result)

    @torch.no_grad()
    def wait_for_reduce(self) -> None:
        """Return when the reduction is in the gradient shard; its buffer is given back."""
        if self._reduction is None:
            return
        (pending, _, result), self._reduction = self._reduction, None
        pending.wait()
        shard = self._shard_buffer()
        if result is not shard:
            shard.add_(result) if self._has_grad else shard.copy_(result)
        self._has_grad = True
        self._grads.free()

    def _shard_buffer(self) -> torch.Tensor:
        if self.grad_shard is None:
            self.grad_shard = torch.zeros_like(self.main_shard, dtype=self.precision.main_grad)
        return self.grad_shard

    @torch.no_grad()
    def final_grad(self) -> torch.Tensor:
        """The reduced gradient of this rank's slice in the dtype of the main shard, zero where nothing was used."""
        shard = self._shard_buffer()
        if not self._has_grad:
            shard.zero_()
            self._has_grad = True
        if shard.dtype == self.main_shard.dtype:
            return shard
        if self._optimizer_grad is None:
            self._optimizer_grad = torch.empty_like(self.main_shard)
        return self._optimizer_grad.copy_(shard)

    @torch.no_grad()
    def scale_grad(self, factor: float | torch.Tensor) -> None:
        """Multiply the reduced gradient."""
        if self._has_grad:
            self._shard_buffer().mul_(factor)

    def forget_reduced_grad(self) -> None:
        """The next reduction begins a new sum."""
        self.wait_for_reduce()
        self._has_grad = False

    def zero_grad(self) -> None:
        """Forget all gradients: reduced, local and those still on the compute parameters."""
        self.forget_reduced_grad()
        if self._grads is not None:
            self._grads.free()
        self._has_local_grad = False
        for parameter in self.parameters:
            parameter.grad = None
