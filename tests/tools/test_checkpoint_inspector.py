# SPDX-License-Identifier: Apache-2.0
"""The command line of tools/checkpoint/checkpoint_inspector.py: what it prints, and how it ends."""

import io
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner, Result

from megatron.checkpoint.commands import conversion_commands
from megatron.checkpoint.commands.command_line import main
from megatron.checkpoint.commands.comparison import same
from megatron.checkpoint.commands.formats import open_checkpoint
from megatron.checkpoint.core.lazy_tensor import in_memory
from megatron.checkpoint.core.stored_checkpoint import StoredCheckpoint
from tests.checkpoint import samples, small_models
from tests.checkpoint.crafted_files import archive, touch

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "tools" / "checkpoint" / "checkpoint_inspector.py"
TO_FSDP, TO_TORCH_DIST = "convert-torch-dist-to-fsdp-dtensor", "convert-fsdp-dtensor-to-torch-dist"
COMMANDS = [
    *(
        "inspect",
        "print-tensor",
        "print-torch-dcp-in-json",
        "verify",
        "compare-two-checkpoint",
        "diff",
        "modify-state-dict",
    ),
    *(TO_FSDP, TO_TORCH_DIST, "convert-to-hf", "convert-from-hf"),
]


def run(*words: Any, code: int = 0) -> Result:
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    assert result.exit_code == code, result.output
    return result


def run_json(*words: Any, code: int = 0) -> Any:
    """The one object on stdout."""
    lines = run(*words, "--json", code=code).stdout.splitlines()
    assert len(lines) == 1
    return json.loads(
        lines[0], parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON")
    )


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same run in both formats, directories above the iteration."""
    root = tmp_path_factory.mktemp("small")
    state = small_models.state_of(small_models.shapes_of(layers=["gated"]), num_layers=1)
    for form in ("torch_dist", "fsdp_dtensor"):
        small_models.write(state, root / form, form)
    return {form: root / form for form in ("torch_dist", "fsdp_dtensor")}


@pytest.fixture
def plain(tmp_path: Path) -> Callable[..., Path]:
    def save(name: str, **tensors: Any) -> Path:
        dcp.save(tensors, checkpoint_id=tmp_path / name, no_dist=True)
        return tmp_path / name

    return save


# ---- in general
# --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    text = run(command, "--help").stdout
    assert "--json" in text and "--enable-msc" in text and len(text.splitlines()) > 5


def test_all_commands_are_there() -> None:
    assert sorted(main.commands) == sorted(COMMANDS)
    published = {
        TO_FSDP: {
            "swiglu",
            "swiglu_modules",
            "param_to_param_group_map_json",
            "output_optimizer_state_prefix",
            "output_model_weight_prefix",
            "rename_mtp_keys",
            "oom_traceback",
            "enable_msc",
        },
        "inspect": {"not_ignore_param_to_group_meta", "enable_msc"},
        "modify-state-dict": {"operations", "enable_msc"},
    }
    for command, options in published.items():
        assert options <= {parameter.name for parameter in main.commands[command].params}


@pytest.mark.parametrize(
    "words",
    [
        ["nothing"],
        ["inspect"],
        ["diff", "one"],
        ["inspect", "x", "--unknown"],
        ["inspect", "x", "--enable-msc"],
    ],
)
def test_wrong_usage_ends_with_2(words: list[str]) -> None:
    assert "Error" in run(*words, code=2).output


def arguments(command: str, path: Path, out: Path) -> list[Any]:
    """Of a command that reads ``path``."""
    more = {
        "print-tensor": ["key"],
        "modify-state-dict": [out, "--op", "remove x"],
        "diff": [path],
        "compare-two-checkpoint": [path],
    }
    return [command, path, *more.get(command, [out] if command.startswith("convert") else [])]


BROKEN: dict[str, Callable[[Path], Any]] = {
    "absent": lambda path: None,
    "a file": lambda path: path.write_text("x"),
    "empty": lambda path: path.mkdir(),
    "no pickle": lambda path: (path.mkdir(), (path / ".metadata").write_text("x")),
    "hostile": lambda path: (
        path.mkdir(),
        (path / ".metadata").write_bytes(touch(path / "executed")),
    ),
    "another pickle": lambda path: (
        path.mkdir(),
        (path / ".metadata").write_bytes(pickle.dumps([1])),
    ),
    "unreadable": lambda path: path.symlink_to(path),
}


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_no_checkpoint_ends_with_1_and_one_object(
    command: str, kind: str, tmp_path: Path
) -> None:
    BROKEN[kind](tmp_path / "in")
    result = run_json(*arguments(command, tmp_path / "in", tmp_path / "out"), code=1)
    assert set(result) == {"error"} and len(result["error"]) > 20
    assert not (tmp_path / "out").exists() and not (tmp_path / "in" / "executed").exists()


def test_without_json_the_error_goes_to_stderr(tmp_path: Path) -> None:
    result = run("verify", tmp_path / "absent", code=1)
    assert (
        result.stdout == ""
        and result.stderr.startswith("Error: ")
        and str(tmp_path / "absent") in result.stderr
    )


@pytest.mark.parametrize(
    "command", [TO_FSDP, "verify", "diff", "compare-two-checkpoint", "convert-to-hf"]
)
def test_a_hostile_common_file_is_refused_by_name(
    command: str, small: dict[str, Path], tmp_path: Path
) -> None:
    copy, marker = shutil.copytree(small["torch_dist"], tmp_path / "copy"), tmp_path / "executed"
    (copy / "iter_0000003" / "common.pt").write_bytes(archive(touch(marker)))
    result = run_json(*arguments(command, copy, tmp_path / "out"), code=1)
    assert "posix.system" in str(result) and "common.pt" in str(result)
    assert not marker.exists() and not (tmp_path / "out").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_files_that_may_not_be_read_are_an_error(small: dict[str, Path], tmp_path: Path) -> None:
    copy = shutil.copytree(small["torch_dist"], tmp_path / "copy")
    (copy / "iter_0000003" / "__0_0.distcp").chmod(0)
    assert "PermissionError" in run_json(TO_FSDP, copy, tmp_path / "out", code=1)["error"]


def test_an_unexpected_kind_of_content_is_one_message(
    small: dict[str, Path], tmp_path: Path
) -> None:
    copy = shutil.copytree(small["torch_dist"], tmp_path / "copy")
    torch.save(
        {"optimizer": {"optimizer": {"param_groups": 7}}, "args": 3},
        copy / "iter_0000003" / "common.pt",
    )
    for words in ([TO_FSDP, copy, tmp_path / "out"], ["diff", copy, copy]):
        assert "Traceback" not in run_json(*words, code=1)["error"]


def test_memory_that_runs_out_is_one_message(
    small: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*args: Any, **options: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(conversion_commands.fsdp_dtensor, "target", exhausted)
    assert "memory" in run_json(TO_FSDP, small["torch_dist"], tmp_path / "out", code=1)["error"]
    assert (
        "Traceback"
        in run(TO_FSDP, small["torch_dist"], tmp_path / "out", "--oom-traceback", code=1).stderr
    )


# ---- looking
# -----------------------------------------------------------------------------------------------------------


def test_inspect_lists_keys_shapes_dtypes_and_sizes(small: dict[str, Path]) -> None:
    text = run("inspect", small["torch_dist"]).stdout
    assert "format torch_dist" in text
    row = next(
        line
        for line in text.splitlines()
        if line.startswith("decoder.layers.mlp.linear_fc1.weight")
    )
    assert "bfloat16" in row and "[1, 24, 8]" in row
    result = run_json("inspect", small["fsdp_dtensor"])
    entries = {entry["key"]: entry for entry in result["entries"]}
    assert result["format"] == "fsdp_dtensor"
    entry = entries["model.module.decoder.layers.0.mlp.linear_fc1.weight_w"]
    assert (entry["dtype"], entry["shape"]) == ("float32", [12, 8]) and entry["bytes"] > 384
    assert entries["args"]["dtype"] == "object" and entries["args"]["shape"] is None
    assert not any("param_to_group_meta" in key for key in entries)
    everything = run_json("inspect", small["fsdp_dtensor"], "--not-ignore-param-to-group-meta")[
        "entries"
    ]
    assert sum("param_to_group_meta" in entry["key"] for entry in everything) > 100


def test_print_tensor_prints_tensors_and_objects(small: dict[str, Path]) -> None:
    path = small["fsdp_dtensor"]
    expected = small_models.values("output_layer.weight", (32, 8))
    result = run_json("print-tensor", path, "model.module.output_layer.weight")
    assert torch.equal(torch.tensor(result["value"]), expected)
    assert result["max"] == expected.max().item() and result["shape"] == [32, 8]
    assert "shape [32, 8]" in run("print-tensor", path, "model.module.output_layer.weight").stdout
    assert run_json("print-tensor", path, "opt_param_scheduler.max_lr")["value"] == 0.5
    assert "Namespace" in run("print-tensor", path, "args").stdout
    assert "Namespace" in run_json("print-tensor", path, "args")["value"]
    step = run_json(
        "print-tensor", path, "optimizer.state.module.module.module.output_layer.weight.step"
    )
    assert step["value"] == 3.0 and step["shape"] == []
    missing = run_json("print-tensor", path, "output_layer", code=1)["error"]
    assert "did you mean" in missing and "model.module.output_layer.weight" in missing


def test_print_tensor_prints_every_kind(plain: Callable[..., Path]) -> None:
    path = plain(
        "odd",
        empty=torch.empty(0, 2),
        nan=torch.tensor([float("nan"), float("inf")]),
        flags=torch.tensor([True]),
        complex=torch.tensor([1 + 2j]),
        half=torch.ones(2, dtype=torch.bfloat16),
        none=None,
        odd=[{(1, 2): 1.0}],
    )
    for key in ("empty", "nan", "flags", "complex", "half", "none"):
        assert run_json("print-tensor", path, key)["key"] == key
        run("print-tensor", path, key)
    assert run_json("print-tensor", path, "nan")["value"] == ["NaN", "Infinity"]


def test_the_map_of_param_groups_is_written_as_json(plain: Callable[..., Path]) -> None:
    path = plain("map", **{"module.module.a.weight": 0, "module.module.b.bias": 1})
    expected = {"model.module.a.weight": 0, "model.module.b.bias": 1}
    assert run_json("print-torch-dcp-in-json", path)["content"] == expected
    assert json.loads((path / "param_to_param_group_map.json").read_text()) == expected
    error = run_json("print-torch-dcp-in-json", plain("other", a="text"), code=1)["error"]
    assert "no map of param groups" in error


# ---- comparing
# ---------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_the_same_as_itself_and_as_its_conversion(small: dict[str, Path]) -> None:
    for form in small:
        assert run_json("compare-two-checkpoint", small[form], small[form])["same"] is True
        assert "there is no difference" in run("diff", small[form], small[form]).stdout
    assert run_json("diff", *small.values())["same"] is True
    result = run_json("compare-two-checkpoint", *small.values(), code=1)
    assert result["same"] is False and result["only_first"] and result["only_second"]


PAIRS: dict[str, tuple[Any, Any, str]] = {
    "another value": (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]), "values"),
    "one bit": (
        torch.tensor([1.0]),
        torch.nextafter(torch.tensor([1.0]), torch.tensor([2.0])),
        "values",
    ),
    "minus zero": (torch.tensor([0.0]), torch.tensor([-0.0]), "values"),
    "NaN and a number": (torch.tensor([float("nan")]), torch.tensor([1.0]), "values"),
    "infinity and a number": (torch.tensor([float("inf")]), torch.tensor([1.0]), "values"),
    "two infinities": (torch.tensor([float("inf")]), torch.tensor([float("-inf")]), "values"),
    "0-d": (torch.tensor(1.0), torch.tensor(2.0), "values"),
    "0-d and 1-d": (torch.tensor(1.0), torch.tensor([1.0]), "kinds"),
    "dtype": (torch.ones(2), torch.ones(2, dtype=torch.bfloat16), "kinds"),
    "shape": (torch.ones(2, 3), torch.ones(3, 2), "kinds"),
    "empty of another shape": (torch.empty(0, 2), torch.empty(0, 3), "kinds"),
    "tensor and object": (torch.ones(1), "text", "kinds"),
    "complex": (torch.tensor([1 + 1j]), torch.tensor([1 - 1j]), "values"),
    "flags": (torch.tensor([True]), torch.tensor([False]), "values"),
    "large integers": (torch.tensor([2**60]), torch.tensor([2**60 + 1]), "values"),
    "objects": ({"x": 1}, {"x": 2}, "objects"),
    "a list less": ([1, 2], [1], "objects"),
}
EQUAL = {
    "NaN": torch.tensor([float("nan"), 1.0]),
    "empty": torch.empty(0, 2),
    "no columns": torch.empty(2, 0),
    "0-d": torch.tensor(float("nan")),
    "object with NaN": float("nan"),
    "complex": torch.tensor([1j]),
    "infinity": torch.tensor([float("-inf")]),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_what_differs_is_told(kind: str, plain: Callable[..., Path]) -> None:
    first, second, where = PAIRS[kind]
    paths = plain("first", entry=first, other=1), plain("second", entry=second, other=1)
    result = run_json("compare-two-checkpoint", *paths, code=1)
    assert result["same"] is False
    told = {
        name for name in ("values", "kinds", "objects", "only_first", "only_second") if result[name]
    }
    assert told == {where} or (where == "objects" and told <= {"only_first", "objects"}), result
    assert "the checkpoints differ" in run("compare-two-checkpoint", *paths, code=1).stdout


@pytest.mark.parametrize("kind", EQUAL)
def test_what_is_the_same_is_not_told(kind: str, plain: Callable[..., Path]) -> None:
    assert (
        run_json(
            "compare-two-checkpoint",
            plain("first", entry=EQUAL[kind]),
            plain("second", entry=EQUAL[kind]),
        )["same"]
        is True
    )


def test_the_largest_differences_come_first(tmp_path: Path, small: dict[str, Path]) -> None:
    state = small_models.state_of(small_models.shapes_of(layers=["gated"]), num_layers=1)
    changes = {
        "output_layer.weight": 0.5,
        "decoder.final_layernorm.weight": 4.0,
        "embedding.word_embeddings.weight": float("nan"),
    }
    for name, change in changes.items():
        tensor = state.weights[name].read()
        tensor.view(-1)[3] += change
        state.weights[name] = in_memory(tensor)
    state.args.seed, state.groups[0].fields["lr"], state.iteration = 5, 0.5, 3
    small_models.write(state, tmp_path / "other", "fsdp_dtensor")
    result = run_json("diff", small["torch_dist"], tmp_path / "other", code=1)
    names = [
        "embedding.word_embeddings.weight",
        "decoder.final_layernorm.weight",
        "output_layer.weight",
    ]
    assert [value["name"] for value in result["values"]] == [f"{name} (weight)" for name in names]
    assert [value["count"] for value in result["values"]] == [1, 1, 1]
    assert result["values"][0]["absolute"] == "NaN"  # JSON has none
    assert abs(result["values"][1]["absolute"] - 4) < 1e-6
    assert result["only_second"] == ["args.seed"]
    assert any(line.startswith("output_layer.weight: lr: 0.25, 0.5") for line in result["objects"])
    text = run("diff", small["torch_dist"], tmp_path / "other", "--rows", 1, code=1).stdout
    assert "1 of 256" in text and "largest difference" in text and "… and" in text
    assert (
        run_json("diff", "--weights-only", small["torch_dist"], tmp_path / "other", code=1)[
            "objects"
        ]
        == []
    )


# ---- verifying
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["torch_dist", "fsdp_dtensor"])
def test_a_good_checkpoint_is_sound(form: str, small: dict[str, Path]) -> None:
    assert run_json("verify", small[form]) == {
        "directory": str(small[form] / "iter_0000003"),
        "format": form,
        "sound": True,
        "problems": [],
        "notes": [],
    }


def spoiled(kind: str, path: Path) -> Path:
    """A checkpoint with one thing wrong."""
    state = small_models.state_of(small_models.shapes_of(layers=["gated"]), num_layers=1)
    name = "decoder.layers.0.mlp.linear_fc2.weight"
    if kind in ("NaN", "infinite"):
        tensor = state.weights[name].read()
        tensor[0, 0] = float("nan") if kind == "NaN" else float("inf")
        state.weights[name] = in_memory(tensor)
    elif kind == "negative":
        state.moments[name]["exp_avg_sq"] = in_memory(-torch.ones(8, 12))
    elif kind == "shape":
        state.args.hidden_size = 16
    elif kind == "a moment less":
        del state.moments[name]["exp_avg_sq"]
    elif kind == "unknown parameter":
        state.weights["decoder.layers.0.strange.weight"] = in_memory(torch.ones(2))
    return small_models.write(state, path, "fsdp_dtensor")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("NaN", "1 values are NaN"),
        ("infinite", "1 values are NaN or infinite"),
        ("negative", "96 values .* negative"),
        ("shape", "the arguments of the run make it"),
        ("a moment less", "lacks exp_avg_sq"),
        ("unknown parameter", "no rule knows"),
    ],
)
def test_verify_finds(kind: str, message: str, tmp_path: Path) -> None:
    problems = run_json("verify", spoiled(kind, tmp_path / "bad"), code=1)["problems"]
    assert any(re.search(message, problem) for problem in problems), problems


def test_verify_finds_changed_bytes_and_main_weights_that_contradict(
    small: dict[str, Path], tmp_path: Path
) -> None:
    copy = shutil.copytree(small["torch_dist"], tmp_path / "copy")
    stored = StoredCheckpoint(copy / "iter_0000003")
    payload = stored._payload(
        "output_layer.weight", stored.tensors["output_layer.weight"].chunks[0]
    )
    data = bytearray(payload.file.read_bytes())
    data[payload.offset] ^= 1
    payload.file.write_bytes(data)
    assert "checksum" in str(run_json("verify", copy, code=1)["problems"])
    assert "- " in run("verify", copy, code=1).stdout


# ---- converting
# --------------------------------------------------------------------------------------------------------


def test_a_conversion_says_what_it_did(tmp_path: Path) -> None:
    sample = samples.torch_dist(samples.DENSE)
    result = run_json(TO_FSDP, sample, tmp_path / "out")
    assert (
        result["output"] == str(tmp_path / "out" / "iter_0000003")
        and result["notes"] == []
        and result["parameters"] == 21
    )
    assert run_json("diff", sample, tmp_path / "out")["same"] is True
    text = run(TO_TORCH_DIST, tmp_path / "out", tmp_path / "back" / "iter_0000003").stdout
    assert "21 parameters with 122,304 elements, optimizer state of 21, iteration 3" in text
    assert (tmp_path / "back" / "latest_checkpointed_iteration.txt").read_text() == "3"
    assert run_json("diff", sample, tmp_path / "back")["same"] is True


def test_a_conversion_overwrites_nothing(small: dict[str, Path], tmp_path: Path) -> None:
    for make in (
        lambda: (tmp_path / "out").write_text("x"),
        lambda: ((tmp_path / "out").unlink(), (tmp_path / "out" / "a").mkdir(parents=True)),
    ):
        make()
        assert "exists" in run_json(TO_FSDP, small["torch_dist"], tmp_path / "out", code=1)["error"]
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "a"]
    error = run_json(TO_FSDP, small["torch_dist"], tmp_path / "iter_0000004", code=1)["error"]
    assert "iter_0000003, not iter_0000004" in error
    assert "exists" in run_json(TO_FSDP, small["torch_dist"], small["torch_dist"], code=1)["error"]


@pytest.mark.parametrize(
    ("command", "form", "hint"),
    [
        (TO_FSDP, "fsdp_dtensor", TO_TORCH_DIST),
        (TO_TORCH_DIST, "torch_dist", TO_FSDP),
        ("convert-from-hf", "torch_dist", TO_FSDP),
    ],
)
def test_the_right_command_is_named(
    command: str, form: str, hint: str, small: dict[str, Path], tmp_path: Path
) -> None:
    assert hint in run_json(command, small[form], tmp_path / "out", code=1)["error"]
    assert not (tmp_path / "out").exists()


def test_gated_or_not_is_found_out(tmp_path: Path) -> None:
    gelu = small_models.write(
        small_models.state_of(small_models.shapes_of(["gelu", "gelu"]), swiglu=False),
        tmp_path / "gelu",
    )
    assert "not gated" in run_json(TO_FSDP, gelu, tmp_path / "refused", "--swiglu", code=1)["error"]
    run(TO_FSDP, gelu, tmp_path / "out")
    keys = StoredCheckpoint(tmp_path / "out" / "iter_0000003").tensors
    assert "model.module.decoder.layers.0.mlp.linear_fc1.weight" in keys and not any(
        key.endswith("_w") for key in keys
    )


def test_modules_that_are_named_as_gated_must_be(small: dict[str, Path], tmp_path: Path) -> None:
    run(
        TO_FSDP,
        small["torch_dist"],
        tmp_path / "out",
        "--swiglu",
        "--swiglu-modules",
        "mlp.linear_fc1",
    )
    for wrong, told in (
        ("nothing", "there is no module nothing"),
        ("self_attention.linear_proj", "not the first layer"),
    ):
        error = run_json(
            TO_FSDP, small["torch_dist"], tmp_path / "no", "--swiglu-modules", wrong, code=1
        )["error"]
        assert told in error and not (tmp_path / "no").exists()


def test_prefixes_are_those_that_are_asked_for(small: dict[str, Path], tmp_path: Path) -> None:
    words = [
        "--output-model-weight-prefix",
        "model.module.module",
        "--output-optimizer-state-prefix",
        "optimizer.state.module",
    ]
    run(TO_FSDP, small["torch_dist"], tmp_path / "out", *words)
    stored = StoredCheckpoint(tmp_path / "out" / "iter_0000003")
    assert {
        "model.module.module.output_layer.weight",
        "optimizer.state.module.output_layer.weight.exp_avg",
    } <= stored.tensors.keys()
    assert "optimizer.param_to_group_meta.module.output_layer.weight.lr" in stored.objects
    assert stored.metadata.planner_data["model.module.module.output_layer.weight"] == (
        "model",
        "module.module.output_layer.weight",
    )
    assert run_json("diff", small["torch_dist"], tmp_path / "out")["same"] is True


def test_param_groups_come_from_a_map_where_one_is_given(
    small: dict[str, Path], tmp_path: Path
) -> None:
    names = small_models.shapes_of(layers=["gated"])
    turned = {
        f"model.module.{name}": int(len(shape) > 1) for name, shape in names.items()
    }  # the other way round
    (tmp_path / "map.json").write_text(json.dumps(turned))
    run(
        TO_FSDP,
        small["torch_dist"],
        tmp_path / "out",
        "--param-to-param-group-map-json",
        tmp_path / "map.json",
    )
    stored = StoredCheckpoint(tmp_path / "out" / "iter_0000003")
    start = "optimizer.param_to_group_meta.module.module.module."
    assert {
        stored.read_object(f"{start}{name}.wd_mult")
        for name, shape in names.items()
        if len(shape) > 1
    } == {0.0}
    assert stored.read_object(f"{start}decoder.final_layernorm.weight.wd_mult") == 1.0
    (tmp_path / "part.json").write_text(json.dumps({"module.module.output_layer.weight": 1}))
    run(
        TO_FSDP,
        small["torch_dist"],
        tmp_path / "part",
        "--param-to-param-group-map-json",
        tmp_path / "part.json",
    )
    stored = StoredCheckpoint(tmp_path / "part" / "iter_0000003")
    found = {
        name: stored.read_object(f"{start}{name}.wd_mult")
        for name in ("output_layer.weight", "embedding.word_embeddings.weight")
    }
    assert found == {"output_layer.weight": 0.0, "embedding.word_embeddings.weight": 1.0}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1]", "should hold an object"),
        ("{", "no JSON"),
        ('{"model.module.output_layer.weight": "a"}', "numbers of groups"),
        ('{"model.module.output_layer.weight": -1}', "numbers of groups"),
        ('{"model.module.output_layer.weight": 9}', "the map says 9"),
        ('{"model.module.other.weight": 0}', "no parameter of this checkpoint"),
        (None, "map.json"),
    ],
)
def test_a_wrong_map_is_refused(
    content: str | None, message: str, small: dict[str, Path], tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "map.json").write_text(content)
    words = [
        TO_FSDP,
        small["torch_dist"],
        tmp_path / "out",
        "--param-to-param-group-map-json",
        tmp_path / "map.json",
    ]
    assert message in run_json(*words, code=1)["error"]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("module_name", ["transformer_layer", "mtp_model_layer"])
def test_layers_that_predict_further_tokens_are_called_as_loaders_want(
    module_name: str, tmp_path: Path
) -> None:
    """From files of every release."""
    state = small_models.state_of(
        small_models.shapes_of(["gated"], predicting=True), num_layers=1, mtp_num_layers=1
    )
    path = small_models.write(state, tmp_path / "in")
    if module_name != "transformer_layer":
        run(
            "modify-state-dict",
            path,
            tmp_path / "renamed",
            "--op",
            rf"rename (?<=\.)transformer_layer {module_name}",
        )
        path = tmp_path / "renamed"
    run(TO_FSDP, path, tmp_path / "out")
    assert (
        "model.module.mtp.layers.0.transformer_layer.mlp.linear_fc2.weight"
        in StoredCheckpoint(tmp_path / "out" / "iter_0000003").tensors
    )
    run(TO_FSDP, path, tmp_path / "as modules", "--no-rename-mtp-keys")
    assert (
        "model.module.mtp.layers.0.mtp_model_layer.mlp.linear_fc2.weight"
        in StoredCheckpoint(tmp_path / "as modules" / "iter_0000003").tensors
    )
    for name in ("out", "as modules"):
        assert run_json("diff", tmp_path / "in", tmp_path / name)["same"] is True


def test_unknown_keys_are_refused_or_carried_over_by_name(tmp_path: Path) -> None:
    state = small_models.state_of(small_models.shapes_of(["gated"]), num_layers=1)
    state.weights["vision.patch.weight"] = in_memory(torch.arange(6.0).reshape(2, 3))
    state.compute_dtype["vision.patch.weight"] = torch.bfloat16
    path = small_models.write(state, tmp_path / "in")
    error = run_json(TO_FSDP, path, tmp_path / "out", code=1)["error"]
    assert "vision.patch.weight" in error and "--allow-unknown-keys" in error
    notes = run_json(TO_FSDP, path, tmp_path / "out", "--allow-unknown-keys")["notes"]
    assert notes == ["vision.patch.weight: no rule knows it; carried over as it is"]
    assert run_json("print-tensor", tmp_path / "out", "model.module.vision.patch.weight")[
        "value"
    ] == [[0, 1, 2], [3, 4, 5]]
    notes = run_json(TO_TORCH_DIST, tmp_path / "out", tmp_path / "back", "--allow-unknown-keys")[
        "notes"
    ]
    assert len(notes) == 1
    assert run_json("diff", path, tmp_path / "back", "--allow-unknown-keys")["same"] is True


# ---- editing
# -----------------------------------------------------------------------------------------------------------


def edited(plain: Callable[..., Path], out: Path, *operations: str) -> dict[str, Any]:
    path = plain("in", a=torch.ones(2), ab=torch.zeros(3), b=[1])
    words = [word for operation in operations for word in ("--op", operation)]
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
    words = [word for operation in operations for word in ("--op", operation)]
    path = plain("in", a=torch.ones(2), ab=torch.zeros(3), b=[1])
    assert message in run_json("modify-state-dict", path, tmp_path / "out", *words, code=1)["error"]
    assert not (tmp_path / "out").exists()


def test_a_changed_checkpoint_keeps_all_the_rest(tmp_path: Path) -> None:
    for sample in (samples.torch_dist(samples.DENSE), samples.FSDP_DTENSOR):
        out = tmp_path / sample.parent.name
        run("modify-state-dict", sample, out, "--op", "remove ^rng_state")
        result = run_json("compare-two-checkpoint", sample, out, code=1)
        assert (
            all(key.startswith("rng_state") for key in result["only_first"])
            and result["only_first"]
        )
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


# ---- real processes
# ----------------------------------------------------------------------------------------------------

NO_MEGATRON_CORE = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name == "megatron.core" or name.startswith("megatron.core."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Block())
"""


def start(*words: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "PYTHONPATH")
    }
    return subprocess.run(
        [*map(str, words)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**inherited, "OMP_NUM_THREADS": "1", **environment},
    )


def test_it_runs_anywhere_without_megatron_core_and_without_arguments_of_its_place(
    tmp_path: Path,
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(NO_MEGATRON_CORE)
    sample = samples.torch_dist(samples.EXPERTS)
    result = start(
        sys.executable,
        SCRIPT,
        TO_FSDP,
        sample,
        tmp_path / "out",
        "--json",
        PYTHONPATH=str(tmp_path / "site"),
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["parameters"] == 29
    assert run_json("diff", sample, tmp_path / "out")["same"] is True
    args = torch.load(_args_payload(tmp_path / "out" / "iter_0000003"), weights_only=False)
    assert args.attention_backend.name  # Megatron-Core's own enum again


def _args_payload(path: Path) -> Any:
    info = StoredCheckpoint(path)._storage["args", ()]
    with open(path / info.relative_path, "rb") as file:
        file.seek(info.offset)
        return io.BytesIO(file.read(info.length))


def test_ranks_of_torchrun_share_the_work_and_say_it_once(tmp_path: Path) -> None:
    sample = samples.torch_dist(samples.DENSE)
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        2,
    ]
    result = start(*torchrun, SCRIPT, TO_FSDP, sample, tmp_path / "out", "--json")
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == 1 and json.loads(result.stdout)["parameters"] == 21
    assert run_json("diff", sample, tmp_path / "out")["same"] is True
