# SPDX-License-Identifier: Apache-2.0
"""Weights of Transformer Engine on the model of a CUDA device: nothing is reported.

Its kernels are emulated: each of their operators is an event on the current stream.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from benchmarks.stream_defects.defect import Defect
from benchmarks.stream_defects.table import GROUP, LAUNCH, SIDE, STARTS, defect
from tests.fsdp.quantized.test_transformer_engine_weights import (
    RECIPES,
    build,
    loss_of,
    recipe_of,
    settings_of,
)
from tests.support.cuda_model.machine import cuda_model
from tests.support.pairwise import each_value
from tests.support.transformer_engine.ranks import RunOnRanks


def trained(recipe_name: str, level: int, variant: str) -> list[torch.Tensor]:
    """Train without looking at any value; return losses, and this rank's main weights."""
    from megatron_fsdp import fully_shard

    recipe, losses = recipe_of(recipe_name), []
    module = build(recipe)
    model, optimizer = fully_shard(
        module,
        torch.optim.AdamW(module.parameters(), lr=0.01, fused=True),
        **settings_of(level, variant),
    )
    for step in range(2):
        loss = loss_of(model, recipe, step, dist.get_rank())
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, *(each.to_local().detach() for each in model.parameters())]


def compare(recipe: str, level: int, variant: str = "flat") -> list[str]:
    """Train with and without the model of CUDA; return what was reported."""
    plain = trained(recipe, level, variant)
    with cuda_model() as model:
        results = trained(recipe, level, variant)
    assert model.reports or all(map(torch.equal, results, plain))
    return [str(report) for report in model.reports]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("recipe", "level"),
    each_value([("current", 1), ("mxfp8", 3), ("nvfp4", 3)], recipe=RECIPES, level=[1, 2, 3]),
)
def test_no_use_of_memory_is_out_of_order(blackwell: RunOnRanks, recipe: str, level: int) -> None:
    for reports in blackwell(compare, recipe, level):
        assert not reports, "\n".join(reports)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("recipe", "variant"),
    [("current", "slots"), ("mxfp8", "fine grained"), ("mxfp8", "hybrid_optim")],
)
def test_nor_with_other_settings(blackwell: RunOnRanks, recipe: str, variant: str) -> None:
    for reports in blackwell(compare, recipe, 3, variant):
        assert not reports, "\n".join(reports)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("recipe", "variant"), [("current", "copies kept"), ("block", "flat")])
def test_nor_with_transposed_copies(hopper: RunOnRanks, recipe: str, variant: str) -> None:
    for reports in hopper(compare, recipe, 3, variant):
        assert not reports, "\n".join(reports)


FORM = "quantized.transformer_engine_weights:TransformerEngineForm."
QUANTIZE, COPY = "_helpers().quantize_master_weights(", "_helpers().post_all_gather_processing("
ALLOCATE = "buffer.allocate()"
DEFECTS = [
    defect(
        "codes are quantized elsewhere", "mxfp8", {FORM + "quantize": [(QUANTIZE, SIDE + QUANTIZE)]}
    ),
    defect("copies are made elsewhere", "current", {FORM + "finish": [(COPY, SIDE + COPY)]}),
    defect("gathers overtake the quantization", "block", {LAUNCH: [(STARTS, "pass")]}),
    defect(
        "nobody waits for codes",
        "delayed",
        {GROUP + "wait_for_unshard": [("self._all_gather.wait()", "pass")]},
    ),
    defect(
        "codes for the backward are allocated elsewhere",
        "mxfp8",
        {"quantized.backward_codes:TwoSidedGroup.prepare_unshard": [(ALLOCATE, SIDE + ALLOCATE)]},
    ),
]


def reports_with(defect: Defect) -> list[str]:
    """Train the recipe that shows a defect; return the kinds of what was reported."""
    with defect.made(), cuda_model() as model:
        trained(defect.scenario, 3, "flat")
    return [report.kind for report in model.reports]


@pytest.mark.exhaustive
@pytest.mark.parametrize("defect", DEFECTS, ids=lambda each: each.name.replace(" ", "_"))
def test_a_defect_is_reported(blackwell: RunOnRanks, hopper: RunOnRanks, defect: Defect) -> None:
    run = hopper if defect.scenario == "current" else blackwell
    for kinds in run(reports_with, defect):
        assert set(defect.kinds) <= set(kinds)
