# SPDX-License-Identifier: Apache-2.0
"""Tensors of the optimizer layout ``fully_sharded_model_space``, which are stored block by block.

A tensor that ranks have split in a grid of equal blocks is "reformulated": the stored tensor has
the number of blocks along each axis, and a last axis with the elements of a block, row by row. The
metadata of the file has the original shape.

A 4 x 6 matrix in a grid of 2 x 3 blocks is stored with the shape (2, 3, 4)::

     0  1 |  2  3 |  4  5
     6  7 |  8  9 | 10 11       block (0, 0) is [0 1 6 7], block (0, 1) is [2 3 8 9], ...
    ------+-------+------
    12 13 | 14 15 | 16 17       block (1, 0) is [12 13 18 19], ...
    18 19 | 20 21 | 22 23
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch

from megatron.checkpoint.core.lazy_tensor import LazyTensor, Shape
from megatron.checkpoint.dcp.chunk import Chunk
from megatron.checkpoint.dcp.stored_checkpoint import StoredCheckpoint

_ORIGINAL_SHAPE = "nd_reformulated_orig_global_shape"


def original_shape(stored: StoredCheckpoint, key: str) -> Shape | None:
    """Return the shape of a reformulated tensor; None for a tensor stored in its own shape."""
    tensors = getattr(stored.metadata, "mcore_data", {})
    shape = tensors.get(key, {}).get(_ORIGINAL_SHAPE)
    if shape is None:
        return None
    return tuple(shape)


def reformulated(
    stored: StoredCheckpoint,
    key: str,
    shape: Sequence[int],
    index: Sequence[int] = (),
) -> LazyTensor:
    """Return a reformulated tensor, or its slice at ``index`` of its leading axes.

    Reading rows reads these rows of every block that has some of them, and nothing else.

    Args:
        stored: the checkpoint.
        key: key of the stored tensor.
        shape: original shape of the whole tensor.
        index: position along its leading axes; the result lacks these.

    Raises:
        ValueError: if the stored shape is not that of equal blocks of ``shape``.
    """
    *grid, block_numel = stored.shape(key)
    block = []
    is_divided = len(grid) == len(shape)
    for size, number in zip(shape, grid):
        if number == 0 or size % number != 0:
            is_divided = False
            break
        block.append(size // number)
    if not is_divided or math.prod(block) != block_numel:
        raise ValueError(
            f"{key}: {tuple(stored.shape(key))} is not {tuple(shape)} in equal blocks: expected the"
            " number of blocks along each axis and the elements of one block"
        )
    blocks = _Blocks(stored, key, grid, block, index=index)
    return blocks.tensor()


class _Blocks:
    """The blocks with the elements at an index of the leading axes of a reformulated tensor.

    Args:
        stored: the checkpoint.
        key: key of the stored tensor.
        grid: number of blocks along each axis.
        block: size of a block along each axis.
        index: position along the leading axes.
    """

    def __init__(
        self,
        stored: StoredCheckpoint,
        key: str,
        grid: Sequence[int],
        block: Sequence[int],
        index: Sequence[int],
    ):
        self._stored = stored
        self._key = key
        self._leading = []
        for position, size in zip(index, block):
            self._leading.append(position // size)
        self._grid = grid[len(index) :]
        self._block = block[len(index) :]
        # A block has as many elements at every index, one index after another. With leading sizes
        # of (2, 3), those at the index (1, 2) come after those at 1 * 3 + 2 = 5 other indices.
        before = 0
        for position, size in zip(index, block):
            before = before * size + position % size
        self._start = before * math.prod(self._block)

    def tensor(self) -> LazyTensor:
        """Return the elements at the index as a tensor that is read by rows."""
        shape = tuple(number * size for number, size in zip(self._grid, self._block))
        read = self._read_rows
        if not shape:
            read = self._read_scalar
        dtype = self._stored.dtype(self._key)
        return LazyTensor(shape, dtype, read)

    def _read_scalar(self, start: int, stop: int) -> torch.Tensor:
        element = self._read_elements(self._leading, self._start, 1)
        return element.reshape(())

    def _read_rows(self, start: int, stop: int) -> torch.Tensor:
        """Read the rows ``[start, stop)``.

        In the example of this module, the rows 1 and 2 are in two bands of blocks. Row 1 is the
        second row of the blocks (0, 0), (0, 1) and (0, 2): their elements 2 and 3. Row 2 is the
        first row of the blocks (1, 0), (1, 1) and (1, 2): their elements 0 and 1.
        """
        rows, *sizes = self._block  # of a block, from the axis of the rows on
        columns_of_grid = self._grid[1:]
        row_numel = math.prod(sizes)
        row_shape = []
        for number, size in zip(columns_of_grid, sizes):
            row_shape.append(number * size)
        dtype = self._stored.dtype(self._key)
        out = torch.empty((stop - start, *row_shape), dtype=dtype)
        for band in range(start // rows, math.ceil(stop / rows)):
            first = max(start, band * rows)
            last = min(stop, (band + 1) * rows)
            offset = self._start + (first - band * rows) * row_numel
            numel = (last - first) * row_numel
            for columns in itertools.product(*map(range, columns_of_grid)):
                position = [*self._leading, band, *columns]
                elements = self._read_elements(position, offset, numel)
                corner = []
                for column, size in zip(columns, sizes):
                    corner.append(column * size)
                target = Chunk((first, *corner), (last - first, *sizes))
                origin = [start, *[0] * len(corner)]
                index = target.slices(origin)
                out[index] = elements.reshape(target.sizes)
        return out

    def _read_elements(
        self,
        position: Sequence[int],
        offset: int,
        numel: int,
    ) -> torch.Tensor:
        """Read elements of the block at ``position`` of the grid, a 1-d tensor."""
        sizes = (1,) * len(position) + (numel,)
        chunk = Chunk((*position, offset), sizes)
        elements = self._stored.read_chunk(self._key, chunk)
        return elements.reshape(numel)
