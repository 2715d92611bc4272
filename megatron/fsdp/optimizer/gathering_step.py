# SPDX-License-Identifier: Apache-2.0
"""Steps of optimizers that gather whole matrices themselves, such as Muon for DTensors.

They compute an update from the whole gradient, ``gradient.full_tensor()``, and divide it again by
``distribute_tensor`` or ``redistribute``. torch cuts evenly, which a shard of a parameter is not.
"""

from __future__ import annotations

from typing import Any

from megatron.fsdp.optimizer.elementwise import OptimizerClass, why_not_elementwise


def refuse_class(
    kind: OptimizerClass,
    defaults: dict[str, Any],
    groups: list[dict[str, Any]],
    gathers_matrices: bool,
) -> None:
    """Check that an optimizer may step on shards of matrices.

    Args:
        kind: the optimizer's class.
        defaults: its ``defaults``.
        groups: its ``param_groups``.
        gathers_matrices: the user says that it gathers whole matrices itself. torch's own
            optimizers do not: on DTensors they compute with the part that a rank has.

    Raises:
        NotImplementedError: if it neither is element-wise nor gathers matrices.
    """
    if gathers_matrices and kind.__module__.partition(".")[0] != "torch":
        return
    reason = why_not_elementwise(kind, defaults, groups)
    if reason:
        raise NotImplementedError(
            f"{kind.__name__} {reason}. Use AdamW, Adam, SGD, RMSprop, Adagrad or another"
            " element-wise optimizer, or one for DTensors that gathers whole matrices itself, with"
            " optimizer_gathers_matrices=True"
        )
