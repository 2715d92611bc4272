# SPDX-License-Identifier: Apache-2.0
"""Published runs: what is wrong with a file of them, and how the plans compare."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from megatron.planning.published.compared_runs import errors_of
from megatron.planning.published.published_runs import read_runs
from tools.plan import main

ROW: dict[str, Any] = {
    "id": "one",
    "source": {"title": "a source"},
    "hardware": {"kind": "h100", "gpus_per_node": 8},
    "model": {
        "seq_length": 64,
        "layers": 2,
        "hidden": 64,
        "ffn": 128,
        "heads": 4,
        "kv_heads": 2,
        "vocab": 100,
        "gated": True,
    },
    "gpus": 2,
    "framework": "any",
    "precision": "bf16",
    "recompute": "none",
    "tp": 1,
    "pp": 1,
    "cp": 1,
    "ep": 1,
    "dp": 2,
    "micro_batch": 1,
    "global_batch": 4,
    "measured": {},
    "seconds_a_step": 1.0,
}


def written(folder: Path, *rows: Any) -> Path:
    path = folder / "runs.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_everything_wrong_with_a_list_of_runs_is_told_at_once(tmp_path: Path) -> None:
    without = {name: value for name, value in ROW.items() if name not in ("gpus", "model")}
    wrong = ROW | {"id": "two", "dp": 3, "hardware": {}, "seconds_a_step": None, "tp": "1"}
    sizes = ROW | {"id": "three", "dp": 4, "model": ROW["model"] | {"layers": 0, "ffn": None}}
    path = written(tmp_path, without, wrong, 3, ROW, ROW, sizes)
    with path.open("a") as file:
        file.write("{\n")
    with pytest.raises(ValueError) as caught:
        read_runs(path)
    message = str(caught.value)
    for part in (
        "line 1: gpus expects a whole number above 0 but got None",
        "line 1: model expects an object but got None",
        "line 2: tp expects a whole number above 0 but got '1'",
        "line 2: hardware.kind expects a text but got None",
        "line 2: seconds_a_step or tokens_per_second_per_gpu is needed, above 0",
        "line 3: an object is expected",
        "line 5: the id one is there twice",
        "line 6: gpus is 2, but tp, pp, cp and dp are 4",
        "line 6: model.layers expects a whole number above 0 but got 0",
        "line 6: model lacks ffn",
        "line 7 is no JSON",
    ):
        assert part in message


MODEL = ROW["model"]
HARDWARE = ROW["hardware"]
MOE = {"experts": 8, "expert_ffn": 64}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"micro_batch": 0}, "micro_batch expects a whole number above 0 but got 0"),
        ({"expert_imbalance": 0.9}, "expert_imbalance expects a number of at least 1 but got 0.9"),
        ({"micro_batch": "2"}, "micro_batch expects a whole number above 0 but got '2'"),
        ({"vpp": 0}, "vpp expects a whole number above 0 but got 0"),
        ({"zero_level": 4}, "zero_level expects one of 0, 1, 2, 3 but got 4"),
        ({"zero_level": []}, "zero_level expects one of 0, 1, 2, 3 but got []"),
        ({"recompute": "fulll"}, "recompute expects one of none, selective, full, unknown but"),
        ({"shard_copies": 3}, "shard_copies is 3, which does not divide"),
        ({"seconds_a_step": "1"}, "seconds_a_step expects a number above 0 but got '1'"),
        ({"gradient_reduction": "f"}, "gradient_reduction expects one of fp32, bf16, fp16 but"),
        ({"not_stated": 3}, "not_stated expects a list but got 3"),
        ({"model": MODEL | {"ffn": "a"}}, "model.ffn expects a whole number above 0 but got 'a'"),
        ({"model": MODEL | {"moe": MOE}}, "model.moe.top_k expects a whole number above 0 but"),
        ({"model": MODEL | {"mla": {}}}, "model.mla.kv_lora expects a whole number above 0 but"),
        (
            {"hardware": HARDWARE | {"memory_gb": "96"}},
            "hardware.memory_gb expects a number",
        ),
        (
            {"hardware": HARDWARE | {"gpus_per_node": 0}},
            "hardware.gpus_per_node expects",
        ),
        ({"measured": {"memory_gib": 0}}, "measured.memory_gib expects a number above 0 but got 0"),
    ],
    ids=str,
)
def test_a_field_that_cannot_be_read_is_told(
    changes: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    path = written(tmp_path, ROW, ROW | {"id": "two"} | changes)
    done = CliRunner().invoke(main, ["--check", str(path)])
    assert done.exit_code == 2
    assert f"line 2: {problem}" in done.output


def test_a_command_line_that_cannot_check_is_refused_with_all_reasons(tmp_path: Path) -> None:
    words = ["--check", str(tmp_path / "none.jsonl"), "--gpus", "8", "--report", "/nowhere/a.md"]
    done = CliRunner().invoke(main, [*words, "--num-layers", "2"])
    assert done.exit_code == 2
    for part in (
        "none.jsonl cannot be read",
        "--gpus does not go with --check",
        "--num-layers does not go with --check",
        "--report /nowhere/a.md: there is no folder /nowhere",
    ):
        assert part in done.output
    alone = CliRunner().invoke(main, ["--report", "a.md"])
    assert alone.exit_code == 2 and "--report is that of --check" in alone.output


def test_errors_are_parts_of_what_was_measured() -> None:
    errors = errors_of([0.5, 0.9, 1.0, 1.1, 1.2])
    assert errors is not None and errors.number == 5
    assert errors.median == pytest.approx(0.1)
    assert errors.ninetieth == pytest.approx(0.38)
    assert errors_of([]) is None
