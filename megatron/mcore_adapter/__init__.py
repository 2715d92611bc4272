# SPDX-License-Identifier: Apache-2.0
"""The engine behind Megatron-Core's interfaces."""

try:
    from megatron.mcore_adapter.data_parallel import FullyShardedDataParallel
except ModuleNotFoundError as error:
    absent = (error.name or "megatron").partition(".")[0]
    if absent == "megatron":
        raise
    # Newer releases of Megatron-Core import modules that their packages do not declare.
    raise ModuleNotFoundError(
        f"Megatron-Core needs the module {absent}, which is not installed: pip install {absent}",
        name=absent,
    ) from None

__all__ = ["FullyShardedDataParallel"]
