# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages: which layers each of them has."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.planning.costs.model_sizes import ModelSizes, RunLayout


@dataclass(frozen=True)
class Stage:
    """A pipeline stage.

    Attributes:
        dense: layers without experts.
        experts: layers with experts.
        has_embedding: it is the first one.
        has_output: it is the last one.
    """

    dense: int
    experts: int
    has_embedding: bool
    has_output: bool


def stages_of(
    sizes: ModelSizes,
    mesh: RunLayout,
    is_balanced: bool = False,
) -> list[Stage]:
    """Return the pipeline stages of a model.

    Layers that do not divide evenly are one fewer in the first and in the last stage, if embedding
    and output then count as layers, and otherwise fewer in the last ones.

    Args:
        sizes: of the model.
        mesh: the layout of the run.
        is_balanced: layers and the output layer go to the stages by the size of their matrices.
    """
    num_stages = mesh.pipeline
    if is_balanced and sizes.experts is None and num_stages > 1:
        counts = _balanced_counts(sizes, num_stages)
    else:
        counts = _even_counts(sizes.layers, num_stages)
    stages: list[Stage] = []
    begin = 0
    for number, count in enumerate(counts):
        dense = count
        if sizes.experts is not None:
            dense = max(0, min(sizes.dense_layers - begin, count))
        stages.append(
            Stage(
                dense=dense,
                experts=count - dense,
                has_embedding=number == 0,
                has_output=number == num_stages - 1,
            )
        )
        begin += count
    return stages


def _even_counts(layers: int, num_stages: int) -> list[int]:
    """Return the layers of each stage."""
    counts = [layers // num_stages] * num_stages
    rest = layers % num_stages
    if rest and (layers + 2) % num_stages == 0:
        counts = [(layers + 2) // num_stages] * num_stages
        counts[0] -= 1
        counts[-1] -= 1
        return counts
    first = 0
    if num_stages > rest + 1:  # the first stage has the embedding
        first = 1
    for number in range(first, first + rest):
        counts[number] += 1
    return counts


def _balanced_counts(sizes: ModelSizes, num_stages: int) -> list[int]:
    """Return the layers of each stage: it is given some until its share of the work is reached."""
    of_layer = sizes.attention_weights + sizes.dense_weights
    whole = sizes.layers * of_layer + sizes.vocabulary_weights
    share = whole / num_stages
    counts = [0] * num_stages
    stage = 0
    work = 0.0
    for _ in range(sizes.layers):
        if work >= (stage + 1) * share and stage < num_stages - 1:
            stage += 1
        counts[stage] += 1
        work += of_layer
    return counts
