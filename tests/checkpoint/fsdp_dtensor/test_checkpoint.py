# SPDX-License-Identifier: Apache-2.0
"""Conversions to fsdp_dtensor: prefixes, gated weights, and state that has no counterpart."""

from pathlib import Path

import pytest

from tests.support.checkpoint import small_models
from tests.support.checkpoint.changed_checkpoints import change_common
from tests.support.checkpoint.command_runs import TO_FSDP, run_json
from tests.support.checkpoint.small_models import shapes_of, state_of


def test_common_state_that_has_no_place_is_named(tmp_path: Path) -> None:
    path = small_models.write(state_of(shapes_of()), tmp_path / "in")
    change_common(path, lambda common: common.update(state_of_my_data={"position": 5}))
    notes = run_json(TO_FSDP, path, tmp_path / "out")["notes"]
    assert notes == ["state_of_my_data: this format has no place for it; left out"]


@pytest.mark.parametrize(
    ("option", "prefix"),
    [
        ("--output-optimizer-state-prefix", "optimizer.state.module.module.module."),
        ("--output-optimizer-state-prefix", "opt.state.module"),
        ("--output-optimizer-state-prefix", "optimizer.state"),
        ("--output-model-weight-prefix", ""),
        ("--output-model-weight-prefix", "foo"),
    ],
    ids=["a dot at the end", "another word", "no module", "nothing", "no model"],
)
def test_prefixes_that_no_loader_asks_for_are_refused(
    option: str, prefix: str, tmp_path: Path
) -> None:
    path = small_models.write(state_of(shapes_of()), tmp_path / "in")
    error = run_json(TO_FSDP, path, tmp_path / "out", option, prefix, code=1)["error"]
    assert f"no loader asks for the prefix {prefix!r}" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "module",
    ["self_attention.linear_qkv", "mlp.linear_fc2", "mlp.linear_fc1,embedding.word_embeddings"],
)
def test_modules_that_are_not_gated_are_not_halved(module: str, tmp_path: Path) -> None:
    path = small_models.write(state_of(shapes_of()), tmp_path / "in")
    error = run_json(TO_FSDP, path, tmp_path / "out", "--swiglu-modules", module, code=1)["error"]
    assert f"{module.rpartition(',')[2]}.weight: it is not the first layer of a gated MLP" in error
    assert ".linear_fc1.weight:" not in error
