# SPDX-License-Identifier: Apache-2.0
"""Steps of optimizers that gather whole matrices themselves, such as Muon for DTensors.

They compute an update from the whole gradient, ``gradient.full_tensor()``, and divide it again by
``distribute_tensor`` or ``redistribute``. torch cuts evenly, which a shard of a parameter is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.tensor import DTensor

from megatron.fsdp.dtensor.matching import matched
from megatron.fsdp.optimizer.elementwise import OnLocalShards, OptimizerClass, why_not_elementwise


class OnWholeMatrices(OnLocalShards):
    """A mode in which DTensors that one call combines get the division of the first of them.

    They are those of the same shape, as in ``parameter.add_(update)``, or at the same positions of
    lists, as in ``torch._foreach_add_(parameters, updates)``. The first one may be changed in
    place, so it stays the same object.
    """

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        if args and isinstance(args[0], (list, tuple)):
            first, *others = args
            args = (first, *(_list_like(first, each) for each in others))
        else:
            operands = (*args, *named.values())
            first = next((each for each in operands if isinstance(each, DTensor)), None)
            args = tuple(_match(each, first) for each in args)
            named = {key: _match(each, first) for key, each in named.items()}
        return super().__torch_function__(function, types, args, named)


def _list_like(patterns: Sequence[Any], operand: Any) -> Any:
    """Divide the items of a list like those of another list of the same length."""
    if not isinstance(operand, (list, tuple)) or len(operand) != len(patterns):
        return operand
    return [_match(each, pattern) for each, pattern in zip(operand, patterns)]


def _match(operand: Any, pattern: Any) -> Any:
    if isinstance(operand, DTensor) and isinstance(pattern, DTensor):
        return matched(operand, pattern)
    return operand


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
