# SPDX-License-Identifier: Apache-2.0
"""Weights of Transformer Engine that are stored in FP8 or FP4: `quantized_model_init`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from fractions import Fraction
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from megatron.fsdp.engine.buffer import shard_view
from megatron.fsdp.engine.device import in_backward
from megatron.fsdp.engine.layout import PREFER_ROWS, Layout, ParamPosition
from megatron.fsdp.engine.param_group import StoredForm
from megatron.fsdp.quantized.frozen_bytes import allocated
from megatron.fsdp.quantized.tensor_subclasses import users_attributes

# [Note: weights of Transformer Engine] Its functions for sharded training do all that depends on a
# format; they take all weights of a group in one call:
#
#     quantize_master_weights     writes the codes of this rank's main weights to its shard, and the
#                                 scales of whole weights, which a few all-reduces of maxima over
#                                 the group make the same on all ranks
#     post_all_gather_processing  makes transposed copies of gathered codes for the backward
#
# Copies are made when a backward gathers the codes, or by the module itself if it has the codes.
#
# So only codes are gathered, in the layout of the weights, and a shard may cut a weight anywhere.
# They are quantized once after main weights have changed: in the backward, delayed scaling has
# other scales.
#
# Main weights are cast to the dtype of the weight before they are quantized, as in the library.
#
# MXFP8 has other codes for the backward than for the forward, and a buffer for each: see
# [Note: codes for the backward].


class Codes(NamedTuple):
    """The codes of a quantized class."""

    bytes: Fraction  # bytes of an element
    sides: tuple[str, ...]  # the attributes with gathered codes; a second one for the backward


# By the name of the class of a weight.
CODES = {
    "Float8Tensor": Codes(Fraction(1), ("_data",)),  # delayed and current scaling
    "Float8BlockwiseQTensor": Codes(Fraction(1), ("_rowwise_data",)),
    "MXFP8Tensor": Codes(Fraction(1), ("_rowwise_data", "_columnwise_data")),
    "NVFP4Tensor": Codes(Fraction(1, 2), ("_rowwise_data",)),
}


def initial_values(parameter: nn.Parameter) -> torch.Tensor | None:
    """Return the values before quantization; None if they were not kept, or are used up."""
    get = getattr(parameter, "get_high_precision_init_val", None)
    if get is None:
        return None
    values: torch.Tensor | None = get()
    return values


def is_written(parameter: nn.Parameter) -> bool:
    """Return True if the codes of a weight are not those of its values before quantization."""
    # Code that loads a checkpoint, or initialises the weight itself, does not change these values.
    weight: Any = parameter.detach()
    kept = initial_values(parameter)
    if kept is None:
        return False  # they are used up
    values = kept.detach().to(parameter.device)
    quantize = weight._get_quantizer()
    quantized = quantize(values)
    return not torch.equal(quantized.dequantize(), weight.dequantize())


def replace_meta_weights(
    root: nn.Module,
    parameters: dict[str, nn.Parameter],
    initialise: Callable[[nn.Module], None],
) -> dict[nn.Parameter, nn.Parameter]:
    """Initialise modules on the meta device that create new parameters, which are quantized.

    Args:
        root: a unit, whose modules get the new parameters.
        parameters: those of the unit, by name; the new ones replace the old ones in it.
        initialise: initialises one module.

    Returns:
        the old parameters, by the new ones.
    """
    names = {parameter: name for name, parameter in parameters.items()}
    replaced = {}
    num_owners = Counter[nn.Parameter | None]()
    for module in root.modules():
        num_owners.update(module._parameters.values())
    for module in root.modules():
        weights = {}
        for name, weight in module._parameters.items():
            if weight is not None:
                weights[name] = weight
        if not weights or not hasattr(module, "param_init_meta"):
            continue
        # Others are refused when they are initialised.
        are_alone = all(
            weight.is_meta and weight in names and num_owners[weight] == 1
            for weight in weights.values()
        )
        if not are_alone:
            continue
        quantized: Any = module
        quantized.preserve_high_precision_init_val = True  # they are the first main weights
        with torch.enable_grad():  # as in its constructor: otherwise codes are for forward alone
            initialise(module)
        for name, old in weights.items():
            new = module._parameters[name]
            assert new is not None
            for attribute, value in users_attributes(old).items():
                vars(new).setdefault(attribute, value)
            replaced[new] = old
            parameters[names[old]] = new
    return replaced


class TransformerEngineForm(StoredForm):
    """Weights of one quantized class. See [Note: weights of Transformer Engine].

    Args:
        parameters: the weights.
        owners: the modules that own them.
        group: the ranks that shard them.
        keeps_copies: make copies for the backward in forward, and keep them until the backward.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        owners: Sequence[nn.Module],
        group: dist.ProcessGroup,
        keeps_copies: bool,
    ):
        super().__init__(PREFER_ROWS)
        self.owners = owners
        self._weights: list[Any] = list(parameters)
        self._group = group
        self._keeps_copies = keeps_copies
        self._has_copies = False  # True if there are copies of the last codes
        class_name = type(parameters[0]).__name__
        self._format = CODES[class_name]
        self.num_sides = len(self._format.sides)
        self._codes: Layout | None = None
        self._stale = set()
        for parameter in parameters:
            if is_written(parameter):
                self._stale.add(parameter)
        # The tensors of each side of a weight, by attribute, also while the attribute is None.
        self._sides: dict[Any, list[dict[str, torch.Tensor]]] = {}
        for weight in self._weights:
            sides = []
            for data in self._format.sides:
                tensors = {}
                if self.num_sides > 1:
                    scales = data.replace("_data", "_scale_inv")
                    tensors[scales] = getattr(weight, scales)
                sides.append(tensors)
            self._sides[weight] = sides

    def values(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the values before quantization, or the codes' where these were written later."""
        weight: Any = parameter
        values = initial_values(weight)
        if weight in self._stale:
            values = weight.detach().dequantize()
        assert values is not None  # checked with the module
        return values.detach().to(parameter.device)

    def buffer(
        self,
        layout: Layout,
        dtype: torch.dtype,
    ) -> tuple[Layout, torch.dtype]:
        """Return the layout of the codes, as bytes."""
        bytes_each = self._format.bytes
        positions = []
        for position in layout.positions:  # sizes and starts are multiples of 8
            size = int(position.numel * bytes_each)
            start = int(position.start * bytes_each)
            positions.append(ParamPosition((size,), start, False))
        self._codes = Layout(
            layout.world_size,
            int(layout.shard_size * bytes_each),
            tuple(positions),
        )
        return self._codes, torch.uint8

    def point(
        self,
        parameter: nn.Parameter,
        view: torch.Tensor,
    ) -> nn.Parameter:
        """Put the weight's codes into the buffer, and free the values before quantization."""
        self.place(parameter, 0, view)
        return parameter

    def place(
        self,
        parameter: nn.Parameter,
        side: int,
        view: torch.Tensor,
    ) -> None:
        """Put the codes of a side of a weight into a buffer, which is filled before its use.

        Args:
            parameter: a weight of this form.
            side: the position in ``Codes.sides``.
            view: the weight's part of the buffer, uint8, flat.
        """
        *rows, columns = parameter.shape
        row_bytes = int(columns * self._format.bytes)
        with allocated(view) as flat:
            codes = flat.view(*rows, row_bytes)
        attribute = self._format.sides[side]
        tensors = self._sides[parameter][side]
        tensors[attribute] = codes
        self._clear()
        parameter.clear_high_precision_init_val()  # type: ignore[attr-defined]  # see `values`
        self.show([0])

    def show(self, sides: Collection[int]) -> None:
        """Give weights the tensors of these sides, and None in place of those of others."""
        for weight, all_sides in self._sides.items():
            for side, tensors in enumerate(all_sides):
                is_shown = side in sides
                for name, tensor in tensors.items():
                    setattr(weight, name, tensor if is_shown else None)
            if len(all_sides) > 1:  # modules ask for the sides that the quantizer names
                weight._quantizer.set_usage(
                    rowwise=0 in sides,
                    columnwise=1 in sides,
                )

    def fill(
        self,
        shard: torch.Tensor,
        main: torch.Tensor,
        layout: Layout,
        rank: int,
    ) -> None:
        """Quantize this rank's main weights into its shard; a collective.

        Args:
            shard: this rank's shard of the codes, uint8.
            main: this rank's shard of the main weights, flat.
            layout: that of the main weights.
            rank: the number of the shards.
        """
        self.quantize([shard], main, layout, rank)

    def quantize(
        self,
        shards: Sequence[torch.Tensor],
        main: torch.Tensor,
        layout: Layout,
        rank: int,
    ) -> None:
        """Quantize this rank's main weights into its shard of each side; a collective.

        Args:
            shards: this rank's shard of the codes of each side, uint8.
            main: this rank's shard of the main weights, flat.
            layout: that of the main weights.
            rank: the number of the shards.
        """
        assert self._codes is not None
        mains: list[torch.Tensor | None] = []
        offsets: list[int | None] = []
        fragments: list[Any] = []
        for index in range(len(self._weights)):
            owned = layout.owned(index, rank)
            if not owned.numel:
                mains.append(None)
                offsets.append(None)
                fragments.append(None)
                continue
            shard_of_main = shard_view(main, layout, index, rank)
            mains.append(shard_of_main.view(-1))
            offsets.append(owned.start)
            start, stop = self._codes.shard_range(index, rank)
            parts = [shard[start:stop] for shard in shards]
            if len(parts) > 1:
                fragments.append(parts)
            else:
                fragments.append(parts[0])
        self._has_copies = False
        self.show(range(self.num_sides))  # scales are written to the weight
        _helpers().quantize_master_weights(
            self._weights,
            mains,
            offsets,
            self._group,
            fragments,
            manual_post_all_gather_processing=True,
        )

    @torch.no_grad()
    def finish(self, flat: torch.Tensor) -> None:
        """Make the copies for the backward, in a backward or where they are kept until then."""
        if self.num_sides > 1:
            return
        needs_copies = in_backward() or self._keeps_copies
        if not needs_copies:
            self._clear()
        elif not self._has_copies:
            _helpers().post_all_gather_processing(self._weights)
            self._has_copies = True
        for weight in self._weights:  # modules make the copies that the quantizer asks for
            weight._get_quantizer().set_usage(columnwise=needs_copies)

    def release(self) -> None:
        """Free these copies, unless a backward needs them."""
        if in_backward() or not self._keeps_copies:
            self._clear()

    def _clear(self) -> None:
        helpers = _helpers()
        for weight in self._weights:
            helpers.clear_columnwise_cache(weight)
        self._has_copies = False


def _helpers() -> ModuleType:
    # Only where there are such weights, so that this package does not need the library.
    from transformer_engine.pytorch.tensor import utils

    module: ModuleType = utils
    return module
