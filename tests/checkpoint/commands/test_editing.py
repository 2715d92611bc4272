# SPDX-License-Identifier: Apache-2.0
"""The command that removes and renames entries of a checkpoint."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.commands.comparison import compare_states, same
from megatron.checkpoint.commands.formats import open_checkpoint
from megatron.checkpoint.dcp.stored_checkpoint import StoredCheckpoint
from tests.support.checkpoint import samples
from tests.support.checkpoint.command_runs import run, run_json


def options(operations: Iterable[str]) -> list[str]:
    """Return the words of a command line that give these operations."""
    words: list[str] = []
    for operation in operations:
        words += ["--op", operation]
    return words


def edited(plain: Callable[..., Path], out: Path, *operations: str) -> dict[str, Any]:
    path = plain("in", a=torch.ones(2), ab=torch.zeros(3), b=[1])
    words = options(operations)
    run("modify-state-dict", path, out, *words)
    stored = StoredCheckpoint(out)
    return {
        key: stored.lazy(key).read() if key in stored.tensors else stored.read_object(key)
        for key in stored.metadata.state_dict_metadata
    }


@pytest.mark.parametrize(
    ("operations", "expected"),
    [
        (["remove ^a$"], {"ab": torch.zeros(3), "b": [1]}),
        (["remove a"], {"b": [1]}),
        (["rename ^a$ x.y"], {"x.y": torch.ones(2), "ab": torch.zeros(3), "b": [1]}),
        ([r"rename ^(a)(b?)$ \2\1"], {"a": torch.ones(2), "ba": torch.zeros(3), "b": [1]}),
        (["rename ^a$ c", "remove ^a", "rename c a"], {"a": torch.ones(2), "b": [1]}),
        (["remove ^a$", "rename ^ab$ a"], {"a": torch.zeros(3), "b": [1]}),
    ],
)
def test_rules_are_applied_in_their_order(
    operations: list[str], expected: dict[str, Any], plain: Callable[..., Path], tmp_path: Path
) -> None:
    assert same(edited(plain, tmp_path / "out", *operations), expected)


@pytest.mark.parametrize(
    ("operations", "message"),
    [
        ([], "no operation"),
        (["remove"], "an operation is"),
        (["remove a b"], "an operation is"),
        (["rename a"], "an operation is"),
        (["drop a"], "an operation is"),
        ([""], "an operation is"),
        (["remove ("], "no regular expression"),
        (["remove a*"], "matches every key"),
        (["remove ()"], "matches every key"),
        (["remove zzz"], "fits no key"),
        (["rename ^a$ b"], "would both be 'b'"),
        (["remove ."], "no key would be left"),
        ([r"rename a \7"], "does not fit"),
    ],
)
def test_rules_that_cannot_be_meant_are_refused(
    operations: list[str], message: str, plain: Callable[..., Path], tmp_path: Path
) -> None:
    words = options(operations)
    path = plain("in", a=torch.ones(2), ab=torch.zeros(3), b=[1])
    assert message in run_json("modify-state-dict", path, tmp_path / "out", *words, code=1)["error"]
    assert not (tmp_path / "out").exists()


@pytest.mark.exhaustive
def test_a_changed_checkpoint_keeps_all_the_rest(tmp_path: Path) -> None:
    for sample in (samples.torch_dist(samples.DENSE), samples.FSDP_DTENSOR):
        out = tmp_path / sample.parent.name
        run("modify-state-dict", sample, out, "--op", "remove ^rng_state")
        result = run_json("compare-two-checkpoint", sample, out, code=1)
        assert all(key.startswith("rng_state") for key in result["only_first"])
        assert result["only_first"]
        assert not any(result[name] for name in ("only_second", "kinds", "values", "objects"))
        before, after = (StoredCheckpoint(samples.iteration(path)) for path in (sample, out))
        assert {key: after.tensors[key].chunks for key in after.tensors} == {
            key: before.tensors[key].chunks for key in after.tensors
        }
        paths = before.metadata.planner_data
        assert after.metadata.planner_data == (
            {key: paths[key] for key in after.metadata.state_dict_metadata} if paths else None
        )
        assert open_checkpoint(out).state().iteration == 3


def test_an_edited_file_of_an_old_release_can_still_be_read(tmp_path: Path) -> None:
    sample = samples.torch_dist("v015_dense_tp2_dp2_model_space")
    before = open_checkpoint(sample)
    pieces = before.stored.metadata.mcore_data
    key = "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight"
    assert pieces[key]
    run_json("modify-state-dict", sample, tmp_path / "renamed", "--op", f"rename ^{key}$ other")
    renamed = open_checkpoint(tmp_path / "renamed").stored.metadata.mcore_data
    assert renamed == {"other" if each == key else each: cut for each, cut in pieces.items()}
    run_json("modify-state-dict", sample, tmp_path / "out", "--op", "remove _extra_state")
    first, second = before.state(), open_checkpoint(tmp_path / "out").state()
    assert second.moments and not compare_states(first, second, weights_only=False).differs
