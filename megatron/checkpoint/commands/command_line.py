# SPDX-License-Identifier: Apache-2.0
"""Command line of the checkpoint tools, installed as ``checkpoint-inspector``.

Started by ``python`` it is one process without a process group; started by ``torchrun`` its ranks
share conversions. It needs no GPU and no Megatron-Core. Exit code 0: done, and nothing is wrong; 1:
something differs, is broken or failed; 2: wrong usage.
"""

from __future__ import annotations

import click

from megatron.checkpoint.commands.command import Programs
from megatron.checkpoint.commands.conversion_commands import (
    convert_from_hf,
    convert_fsdp_dtensor_to_torch_dist,
    convert_to_hf,
    convert_torch_dist_to_fsdp_dtensor,
    modify_state_dict,
)
from megatron.checkpoint.commands.inspection_commands import (
    compare_two_checkpoint,
    diff,
    inspect,
    print_tensor,
    print_torch_dcp_in_json,
    verify,
)

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 120}


@click.group(cls=Programs, context_settings=SETTINGS)
def main() -> None:
    """Inspect, verify, compare and convert checkpoints.

    The formats are torch_dist, fsdp_dtensor and Hugging Face, in every direction. A CHECKPOINT is
    the directory of an iteration, or the one above it with the tracker file that names the
    iteration. Formats, models and layouts are found out from the files. Start it with python, or
    with torchrun to share the work.
    """


for _command in (
    inspect,
    print_tensor,
    print_torch_dcp_in_json,
    verify,
    compare_two_checkpoint,
    diff,
    convert_torch_dist_to_fsdp_dtensor,
    convert_fsdp_dtensor_to_torch_dist,
    convert_to_hf,
    convert_from_hf,
    modify_state_dict,
):
    main.add_command(_command)

if __name__ == "__main__":
    main()
