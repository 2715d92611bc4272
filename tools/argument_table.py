# SPDX-License-Identifier: Apache-2.0
"""Write the table of arguments of docs/arguments.md: their fields and flags in Megatron-Core.

    python tools/argument_table.py

Each argument of `fully_shard_model` with an equivalent is beside the field of Megatron-Core's
`DistributedDataParallelConfig` and the flag of `pretrain_gpt.py` that set the same.
"""

import inspect
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run directly, without installation

from megatron_fsdp import fully_shard_model

PAGE = Path(__file__).resolve().parents[1] / "docs" / "arguments.md"
BEGIN, END = "<!-- table of arguments -->\n", "<!-- end of the table -->\n"


class OtherWays(NamedTuple):
    """The config field and the flags that set the same as an argument, where there are any."""

    field: str = ""
    flags: tuple[str, ...] = ()


def same_name(name: str, flag: str = "") -> OtherWays:
    """Return the field of this name, and the flag that follows from it or is given."""
    return OtherWays(name, (flag or f"--{name.replace('_', '-')}",))


WAYS = {
    "zero_dp_strategy": same_name("data_parallel_sharding_strategy"),
    "outer_dp_sharding_strategy": same_name("outer_dp_sharding_strategy"),
    "expert_zero_dp_strategy": same_name("expert_data_parallel_sharding_strategy"),
    "expert_outer_dp_sharding_strategy": same_name("expert_outer_dp_sharding_strategy"),
    "embedding_zero_dp_strategy": same_name("embedding_data_parallel_sharding_strategy"),
    "dp_outer_dim": OtherWays(flags=("--num-distributed-optimizer-instances",)),
    "tp_dim": OtherWays(flags=("--tensor-model-parallel-size",)),
    "expt_device_mesh": OtherWays(
        flags=("--expert-model-parallel-size", "--expert-tensor-parallel-size")
    ),
    "fsdp_group_ag": OtherWays(flags=("--create-all-gather-group",)),
    "expt_fsdp_group_ag": OtherWays(flags=("--create-all-gather-group",)),
    "init_model_with_meta_device": OtherWays(flags=("--init-model-with-meta-device",)),
    "mixed_precision_policy": OtherWays(
        "megatron_fsdp_main_params_dtype",
        tuple(
            f"--megatron-fsdp-{part}-dtype" for part in ("main-params", "main-grads", "grad-comm")
        ),
    ),
    "overlap_grad_reduce": same_name("overlap_grad_reduce"),
    "overlap_param_gather": same_name("overlap_param_gather"),
    "report_nan_in_param_grad": same_name(
        "check_for_nan_in_grad", "--no-check-for-nan-in-loss-and-grad"
    ),
    "average_in_collective": same_name("average_in_collective", "--ddp-average-in-collective"),
    "calculate_per_token_loss": OtherWays(flags=("--calculate-per-token-loss",)),
    "nccl_ub": same_name("nccl_ub", "--use-nccl-ub"),
    "fsdp_double_buffer": same_name("fsdp_double_buffer"),
    "fsdp_db_use_persist_buf_on_alloc_fail": same_name("fsdp_db_use_persist_buf_on_alloc_fail"),
    "disable_symmetric_registration": same_name("disable_symmetric_registration"),
    "enable_fine_grained_param_gather": same_name("megatron_fsdp_enable_fine_grained_param_gather"),
    "use_decoupled_grad": OtherWays("megatron_fsdp_use_decoupled_grad"),
    "cuda_graph_mode": OtherWays("megatron_fsdp_cuda_graph_mode"),
    "maxpool_double_buffer": same_name("megatron_fsdp_max_pool_double_buffer"),
    "suggested_communication_unit_size": same_name("suggested_communication_unit_size"),
    "fsdp_manual_registration": same_name("fsdp_manual_registration"),
}
"""Arguments that can be given in another way too."""


def main() -> None:
    """Write the table into the page."""
    PAGE.write_text(with_table(PAGE.read_text()))


def with_table(page: str) -> str:
    """Return the page with the table as it should be."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


def table() -> str:
    """Return the rows of the arguments with equivalents, in the order of the signature."""
    lines = ["| argument | config field | flags |", "|---|---|---|"]
    for name in inspect.signature(fully_shard_model).parameters:
        if name in WAYS:
            ways = WAYS[name]
            field = f"`{ways.field}`" if ways.field else ""
            flags = ", ".join(f"`{flag}`" for flag in ways.flags)
            lines.append(f"| `{name}` | {field} | {flags} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
