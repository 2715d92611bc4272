# SPDX-License-Identifier: Apache-2.0
"""The most exact value of each weight: the optimizer's main weight, if it agrees with the model's.

Megatron-Core 0.16.1 to 0.19 can write a parameter's main weight and moments from the wrong position
in the optimizer's buffer. The weight in the model is right then. Whether this happened is known
only when the parameter is read.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron.checkpoint.core.lazy_tensor import LazyTensor, Tensors, zeros
from megatron.checkpoint.core.training_state import Freshness, TrainingState


def add_optimizer_state(
    state: TrainingState,
    main: Tensors,
    moments: Mapping[str, Tensors],
) -> None:
    """Replace the model's weights by main weights, and add the moments, if both agree.

    Args:
        state: state of the model; ``weights``, ``moments`` and ``is_fresh`` change. Its ``notes``
            get a line for each parameter that is read and does not agree.
        main: name -> main weight.
        moments: name -> slot -> tensor.

    Raises:
        ValueError: for the state of a parameter that the model does not have, or of another shape.
    """
    for name, slots in moments.items():
        if name not in state.weights:
            raise ValueError(f"the optimizer has state for {name}, which the model does not have")
        model = state.weights[name]
        main_weight = main.get(name)
        if main_weight is None:
            state.moments[name] = {**slots}
            state.is_fresh[name] = Freshness()
            continue
        checked = _CheckedParameter(name, model, main_weight, state.notes)
        state.weights[name] = checked.weight()
        state.moments[name] = {}
        for slot, tensor in slots.items():
            state.moments[name][slot] = checked.moment(tensor)
        state.is_fresh[name] = checked.contradicts


class _CheckedParameter:
    """A parameter whose main weight counts if, cast to the model's dtype, it is the model's weight.

    Args:
        name: canonical name.
        model: the weight in the model, in the dtype in which the model computes.
        main: the optimizer's main weight, fp32.
        notes: list that gets a line if both do not agree.

    Raises:
        ValueError: if the shapes differ.
    """

    def __init__(
        self,
        name: str,
        model: LazyTensor,
        main: LazyTensor,
        notes: list[str],
    ):
        if main.shape != model.shape:
            raise ValueError(
                f"{name} has the shape {model.shape} in the model and {main.shape} in the optimizer"
            )
        self._name = name
        self._model = model
        self._main = main
        self._notes = notes
        self.contradicts = Freshness(lambda: self._differs(main.read()))

    def _differs(self, main: torch.Tensor) -> bool:
        cast = main.to(self._model.dtype)
        model = self._model.read()
        is_same = torch.equal(cast, model)
        if not is_same:  # unless NaN is NaN
            is_same = torch.allclose(cast, model, rtol=0, atol=0, equal_nan=True)
        if not is_same:
            self._notes.append(
                f"{self._name}: its main weight in the optimizer is not its weight in the model."
                " The model's is kept, and the moments are dropped: they begin at zero, at step 0"
            )
        return not is_same

    def weight(self) -> LazyTensor:
        """Return the weight in the main weight's dtype: the main weight, or else the model's."""

        def read_rows(start: int, stop: int) -> torch.Tensor:
            is_whole = (start, stop) == (0, self._main.num_rows)
            if self.contradicts.known is None and is_whole:  # one read serves both purposes
                main = self._main.read()
                self.contradicts.known = self._differs(main)
                if not self.contradicts.known:
                    return main
            source = self._main
            if self.contradicts():
                source = self._model
            return source.read_rows(start, stop).to(self._main.dtype)

        return LazyTensor(self._main.shape, self._main.dtype, read_rows)

    def moment(self, stored: LazyTensor) -> LazyTensor:
        """Return a moment: the stored one, or zeros if the main weight does not agree."""

        def read_rows(start: int, stop: int) -> torch.Tensor:
            source = stored
            if self.contradicts():
                source = zeros(stored.shape, stored.dtype)
            return source.read_rows(start, stop)

        return LazyTensor(stored.shape, stored.dtype, read_rows)
