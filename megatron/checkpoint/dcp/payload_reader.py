# SPDX-License-Identifier: Apache-2.0
"""Bytes of stored tensors, read after their checksums were compared."""

from __future__ import annotations

import torch

from megatron.checkpoint.dcp.stored_metadata import DamagedCheckpointError
from megatron.checkpoint.dcp.tensor_payload import TensorPayload
from megatron.checkpoint.integrity.checksum import crc32

_BLOCK = 1 << 22
"""Bytes that are read at once to compute a checksum."""


class PayloadReader:
    """Reader of the bytes of tensors.

    Args:
        compares: compare the checksum of a storage before any of it is used. It is not needed where
            the digest of the file was compared.
    """

    def __init__(self, compares: bool):
        self._compares = compares
        self._unchanged: set[tuple[str, int]] = set()

    def read(self, payload: TensorPayload, start: int, length: int) -> torch.Tensor:
        """Read some bytes of a storage, as uint8."""
        is_all = not start and length == payload.num_bytes
        if self._compares and not is_all:
            self.check(payload)
        data = torch.empty(length, dtype=torch.uint8)
        view: memoryview = data.numpy().data
        with open(payload.file, "rb", buffering=0) as file:
            file.seek(payload.offset + start)
            done = 0
            while done < length:
                count = file.readinto(view[done:])
                if not count:
                    raise DamagedCheckpointError(f"{payload.file} is cut off in {payload.key}")
                done += count
        if self._compares and is_all:
            self._compare(payload, crc32(view))
        return data

    def check(self, payload: TensorPayload) -> None:
        """Read all of a storage once and compare its checksum.

        Raises:
            DamagedCheckpointError: if it differs.
        """
        if (str(payload.file), payload.offset) in self._unchanged:
            return
        checksum, left = 0, payload.num_bytes
        with open(payload.file, "rb", buffering=0) as file:
            file.seek(payload.offset)
            while left and (block := file.read(min(left, _BLOCK))):
                checksum, left = crc32(block, checksum), left - len(block)
        self._compare(payload, checksum)

    def _compare(self, payload: TensorPayload, checksum: int) -> None:
        if payload.checksum is not None and checksum != payload.checksum:
            raise DamagedCheckpointError(
                f"{payload.file} has changed since it was written: the checksum of {payload.key}"
                f" at byte {payload.offset} differs"
            )
        self._unchanged.add((str(payload.file), payload.offset))
