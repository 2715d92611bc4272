# SPDX-License-Identifier: Apache-2.0
"""What conversions once got wrong without a word: rare runs, files that differ a little, commands that are misused."""

import argparse
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from megatron.checkpoint.commands import conversion
from megatron.checkpoint.commands.command_line import main
from megatron.checkpoint.commands.comparison import compare_states
from megatron.checkpoint.commands.formats import open_checkpoint
from megatron.checkpoint.commands.verification import find_problems
from megatron.checkpoint.core import dcp_target, directory, param_groups, safe_pickle
from megatron.checkpoint.core.dcp_target import DcpTarget, ObjectEntry, whole
from megatron.checkpoint.core.directory import OutputDirectory, new_checkpoint
from megatron.checkpoint.core.lazy_tensor import LazyTensor, in_memory
from megatron.checkpoint.core.stored_checkpoint import StoredCheckpoint
from megatron.checkpoint.core.training_state import TrainingState
from megatron.checkpoint.fsdp_dtensor.spelling_choice import choose_spelling
from megatron.checkpoint.torch_dist import checkpoint as torch_dist
from tests.checkpoint import samples, small_models
from tests.checkpoint.small_models import shapes_of, state_of

TO_FSDP, TO_TORCH_DIST = "convert-torch-dist-to-fsdp-dtensor", "convert-fsdp-dtensor-to-torch-dist"
TENSOR = "decoder.layers.1.mlp.linear_fc2.weight"


def run(*words: Any, code: int = 0) -> dict[str, Any]:
    """What a command says, or its error."""
    result = CliRunner().invoke(main, [*map(str, words), "--json"])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def rewritten(iteration: Path, target: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """A copy of a checkpoint with other entries; all of them are in memory."""
    stored = StoredCheckpoint(iteration)
    content: dict[str, Any] = {key: stored.lazy(key).read() for key in stored.tensors}
    content |= {key: stored.read_object(key) for key in stored.objects}
    change(content)
    paths = stored.metadata.planner_data
    beside = [iteration / name for name in (torch_dist.COMMON_FILE, torch_dist.MARKER)]
    files = {path.name: path.read_bytes() for path in beside if path.is_file()}
    return write_entries(
        content,
        new_checkpoint(target, 3),
        paths={key: path for key, path in paths.items() if key in content} if paths else None,
        extra_files={name: lambda data=data: data for name, data in files.items()},
    )


def write_entries(content: dict[str, Any], output: OutputDirectory, **options: Any) -> Path:
    entries = [
        whole(key, in_memory(value)) if isinstance(value, torch.Tensor) else ObjectEntry(key, value)
        for key, value in content.items()
    ]
    conversion.convert(DcpTarget(entries, **options), output, "test", show_progress=False)
    return output.final


def change_common(iteration: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = iteration / torch_dist.COMMON_FILE
    common = safe_pickle.load_torch(path.read_bytes())
    change(common)
    path.write_bytes(safe_pickle.save_torch(common))


def contradicting(path: Path) -> Path:
    """A file whose main weight of one parameter is not its weight in the model."""

    def change(content: dict[str, Any]) -> None:
        content["optimizer.state.param.decoder.layers.mlp.linear_fc2.weight"][1] += 1

    return rewritten(
        small_models.write(state_of(shapes_of()), path / "right"), path / "contradicting", change
    )


def with_another_momentum(state: TrainingState) -> TrainingState:
    """The state of SGD."""
    state.moments = {
        name: {"momentum_buffer": slots["exp_avg"]} for name, slots in state.moments.items()
    }
    return state


# ---- param groups
# ------------------------------------------------------------------------------------------------------

USUAL = {
    **small_models.GROUP,
    "is_decoupled_lr": False,
    "default_config": True,
    "max_lr": 1e-3,
    "min_lr": 1e-5,
}
OWN_RATE = {**USUAL, "default_config": False, "max_lr": 7e-3, "min_lr": 1e-4}


def test_embedding_and_output_layer_have_the_rates_that_a_run_has_decoupled(tmp_path: Path) -> None:
    path = small_models.write(state_of(shapes_of()), tmp_path / "in")
    kinds = ((USUAL, 1.0), (OWN_RATE, 1.0), (USUAL, 0.0))
    groups = [{**fields, "wd_mult": multiplier, "step": 3.0} for fields, multiplier in kinds]
    change_common(path, lambda common: common["optimizer"]["optimizer"].update(param_groups=groups))
    run(TO_FSDP, path, tmp_path / "out")
    rates = {
        name: group.fields["max_lr"]
        for group in small_models.read(tmp_path / "out").groups
        for name in group.names
    }
    own = [name for name, rate in rates.items() if rate == OWN_RATE["max_lr"]]
    assert sorted(own) == ["embedding.word_embeddings.weight", "output_layer.weight"]
    assert set(rates) == set(shapes_of())


def test_a_parameter_that_fits_two_different_groups_is_an_error() -> None:
    groups = [{**USUAL, "wd_mult": 1.0, "lr_mult": multiplier} for multiplier in (1.0, 0.1)]
    with pytest.raises(ValueError, match=r"linear_fc2.weight: groups 0, 1 fit, and they differ"):
        param_groups.assign({TENSOR: (8, 12)}, groups, argparse.Namespace())
    first, second = param_groups.assign(
        {TENSOR: (8, 12)}, groups, argparse.Namespace(), {TENSOR: 1}
    )
    assert (first.names, second.names) == ([], [TENSOR])


@pytest.mark.parametrize("decays", [True, False], ids=["with the flag", "without"])
@pytest.mark.parametrize("end", ["weight", "bias"])
@pytest.mark.parametrize("norm", ["q_layernorm", "k_layernorm"])
def test_norms_of_query_and_key_decay_if_the_run_says_so(norm: str, end: str, decays: bool) -> None:
    name = f"decoder.layers.0.self_attention.{norm}.{end}"
    groups = [{**USUAL, "wd_mult": multiplier} for multiplier in (1.0, 0.0)]
    result = param_groups.assign(
        {name: (4,)}, groups, argparse.Namespace(apply_wd_to_qk_layernorm=decays)
    )
    assert [group.fields["wd_mult"] for group in result if group.names] == [1.0 if decays else 0.0]


# ---- frozen layers, steps, widths
# --------------------------------------------------------------------------------------


def test_frozen_layers_get_zeros_beside_layers_that_learn(tmp_path: Path) -> None:
    state = state_of(shapes_of())
    frozen = [name for name in state.weights if name.startswith("decoder.layers.0.")]
    for group in state.groups:
        group.names = [name for name in group.names if name not in frozen]
    for name in frozen:
        del state.moments[name]
    small_models.write(state, tmp_path / "in", "fsdp_dtensor")
    notes = run(TO_TORCH_DIST, tmp_path / "in", tmp_path / "out")["notes"]
    assert [note for note in notes if "zeros are written" in note] == notes and len(notes) == len(
        frozen
    )
    back = small_models.read(tmp_path / "out")
    assert not any(tensor.read().any() for name in frozen for tensor in back.moments[name].values())
    for name, slots in state.moments.items():
        assert (
            samples.differing(
                back.moments[name], {slot: tensor.read() for slot, tensor in slots.items()}
            )
            == []
        )
    assert run("verify", tmp_path / "out")["sound"]


@pytest.mark.parametrize("kind", ["gated", "experts"])
def test_parameters_of_several_steps_get_the_last_one_and_notes(kind: str, tmp_path: Path) -> None:
    state = state_of(shapes_of([kind, kind]))
    behind = [name for name in state.weights if name.startswith("decoder.layers.1.")]
    state.steps = dict.fromkeys(behind, 1.0)
    if kind == "experts":  # those of a whole group too, which is an optimizer of its own
        behind += (others := [name for name in state.weights if ".layers.0.mlp.experts." in name])
        state.steps |= dict.fromkeys(others, 1.0)
    small_models.write(state, tmp_path / "in", "fsdp_dtensor")
    notes = run(TO_TORCH_DIST, tmp_path / "in", tmp_path / "out")["notes"]
    assert sorted(notes) == sorted(
        f"{name}: its moments have seen 1 steps; torch_dist has 3 for all" for name in behind
    )
    opened = open_checkpoint(tmp_path / "out")
    optimizer = torch_dist.read_common(opened.stored)["optimizer"]
    optimizers = [optimizer] if "optimizer" in optimizer else list(optimizer.values())
    assert len(optimizers) == (2 if kind == "experts" else 1)
    assert {
        group["step"] for each in optimizers for group in each["optimizer"]["param_groups"]
    } == {3.0}


def test_layers_of_other_widths_are_not_stacked(tmp_path: Path) -> None:
    shapes = shapes_of()
    shapes["decoder.layers.1.mlp.linear_fc1.weight"], shapes[TENSOR] = (12, 8), (8, 6)
    state = state_of(shapes)
    small_models.write(state, tmp_path / "in", "fsdp_dtensor")
    run(TO_TORCH_DIST, tmp_path / "in", tmp_path / "out")
    opened = open_checkpoint(tmp_path / "out")
    assert (
        opened.stored.shape(TENSOR) == (8, 6)
        and "decoder.layers.mlp.linear_fc2.weight" not in opened.stored.tensors
    )
    assert (
        samples.differing(
            opened.state().weights, {name: tensor.read() for name, tensor in state.weights.items()}
        )
        == []
    )


# ---- where an output may be, and what goes on
# --------------------------------------------------------------------------


@pytest.mark.parametrize("command", [TO_FSDP, "modify-state-dict"])
def test_an_existing_run_keeps_its_tracker(command: str, tmp_path: Path) -> None:
    path = small_models.write(state_of(shapes_of()), tmp_path / "in")
    (tmp_path / "run" / "iter_0000005").mkdir(parents=True)
    tracker = tmp_path / "run" / directory.TRACKER
    tracker.write_text("5")
    operations = ["--op", "remove rng_state"] if command == "modify-state-dict" else []
    error = run(command, path, tmp_path / "run" / "iter_0000003", *operations, code=1)["error"]
    assert f"{tracker} exists" in error
    assert tracker.read_text() == "5" and not (tmp_path / "run" / "iter_0000003").exists()


@pytest.mark.parametrize(
    "inside", [".", "out", "out/iter_0000003"], ids=["itself", "inside", "an iteration inside"]
)
def test_an_output_inside_of_the_input_is_refused(inside: str, tmp_path: Path) -> None:
    path = small_models.write(state_of(shapes_of()), tmp_path / "in")
    before = sorted(path.rglob("*"))
    error = run(TO_FSDP, path, path / inside, code=1)["error"]
    assert ("exists" if inside == "." else "is inside of the checkpoint that is converted") in error
    assert sorted(path.rglob("*")) == before


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A Hugging Face model."""
    run("convert-to-hf", samples.torch_dist(samples.DENSE), tmp_path / "model")
    return tmp_path / "model"


def test_a_conversion_of_changed_files_begins_anew(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dcp_target, "PART_BYTES", 1 << 14)
    note, done = conversion._note, []

    def interrupt(path: Path, result: Any) -> None:
        note(path, result)
        done.append(path)
        if len(done) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(conversion, "_note", interrupt)
    assert (
        CliRunner()
        .invoke(main, ["convert-from-hf", str(model), str(tmp_path / "out"), "--quiet"])
        .exit_code
        == 1
    )
    assert len(done) == 3 and all(path.exists() for path in done)
    monkeypatch.setattr(conversion, "_note", note)
    tensors = {name: tensor + 1 for name, tensor in load_file(model / "model.safetensors").items()}
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    run("convert-from-hf", model, tmp_path / "out")
    assert run("diff", model, tmp_path / "out")["same"]


def test_a_conversion_in_parts_of_another_size_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def target(part_bytes: int, is_interrupted: bool) -> DcpTarget:
        monkeypatch.setattr(dcp_target, "PART_BYTES", part_bytes)

        def read(number: int) -> torch.Tensor:
            if is_interrupted and number == 5:
                raise KeyboardInterrupt
            return torch.full((32,), float(number))

        return DcpTarget(
            whole(
                f"t{n}",
                LazyTensor((32,), torch.float32, lambda start, stop, n=n: read(n)[start:stop]),
            )
            for n in range(8)
        )

    with pytest.raises(KeyboardInterrupt):
        conversion.convert(
            target(256, True), OutputDirectory(tmp_path / "out"), "a", show_progress=False
        )
    conversion.convert(
        target(384, False), OutputDirectory(tmp_path / "out"), "a", show_progress=False
    )
    stored = StoredCheckpoint(tmp_path / "out")
    assert [stored.lazy(f"t{n}").read().tolist() for n in range(8)] == [
        [float(n)] * 32 for n in range(8)
    ]
    assert len(list((tmp_path / "out").glob("*.distcp"))) == 3


# ---- what is carried over, and what is said
# ----------------------------------------------------------------------------


def test_common_state_that_has_no_place_is_named(tmp_path: Path) -> None:
    path = small_models.write(state_of(shapes_of()), tmp_path / "in")
    change_common(path, lambda common: common.update(state_of_my_data={"position": 5}))
    notes = run(TO_FSDP, path, tmp_path / "out")["notes"]
    assert notes == ["state_of_my_data: this format has no place for it; left out"]


@pytest.mark.parametrize(
    ("expert_ranks", "expected"),
    [
        (1, {"rng_state/shard_0.0_1.1": 2}),
        (2, {"rng_state/shard_0.0.0_1.1.2": 1, "rng_state/shard_0.0.1_1.1.2": 1}),
    ],
    ids=["one entry", "one of each with expert parallelism"],
)
def test_random_states_of_data_ranks_are_where_a_load_looks(
    expert_ranks: int, expected: dict[str, int], tmp_path: Path
) -> None:
    state = state_of(shapes_of(), expert_model_parallel_size=expert_ranks)
    second = {**small_models.GENERATORS, "torch_rng_state": torch.zeros(16, dtype=torch.uint8)}
    state.random_states = {(0, 0): [small_models.GENERATORS, second]}
    small_models.write(state, tmp_path / "in", "fsdp_dtensor")
    run(TO_TORCH_DIST, tmp_path / "in", tmp_path / "out")
    stored = open_checkpoint(tmp_path / "out").stored
    assert {
        key: len(stored.read_object(key)[0])
        for key in stored.objects
        if key.startswith("rng_state")
    } == expected


def test_a_release_stays_a_release(tmp_path: Path) -> None:
    state = state_of(shapes_of(), with_optimizer=False)
    state.iteration = 0
    release = new_checkpoint(tmp_path / "in", directory.RELEASE)
    conversion.convert(
        torch_dist.target(state, choose_spelling(state)), release, "test", show_progress=False
    )
    run(TO_FSDP, tmp_path / "in", tmp_path / "there")
    run(TO_TORCH_DIST, tmp_path / "there", tmp_path / "back")
    for name in ("there", "back"):
        assert {path.name for path in (tmp_path / name).iterdir()} == {"release", directory.TRACKER}
        assert directory.read_tracker(tmp_path / name) == directory.RELEASE


def test_an_export_names_weights_that_the_optimizer_contradicts(tmp_path: Path) -> None:
    sample = samples.torch_dist(samples.DENSE)
    there, back = tmp_path / "there", tmp_path / "back"
    run(TO_FSDP, sample, there)
    run(TO_TORCH_DIST, there, back)  # in the layout that has a tensor of each

    def change(content: dict[str, Any]) -> None:
        content["optimizer.state.param.decoder.layers.mlp.linear_fc2.weight"][1] += 1

    path = rewritten(samples.iteration(back), tmp_path / "contradicting", change)
    (note,) = run("convert-to-hf", path, tmp_path / "model")["notes"]
    assert note.startswith(
        f"{TENSOR}: its main weight in the optimizer is not its weight in the model"
    )


def test_a_file_without_arguments_is_taken_for_fp32_and_that_is_said(tmp_path: Path) -> None:
    path = small_models.write(state_of(shapes_of()), tmp_path / "in", "fsdp_dtensor")
    bare = rewritten(path, tmp_path / "bare", lambda content: content.pop("args"))
    (note,) = run(TO_TORCH_DIST, bare, tmp_path / "out")["notes"]
    assert (
        note == "args: not in the file, so what the model computes in is not known; fp32 is taken"
    )
    assert open_checkpoint(tmp_path / "out").stored.dtype("output_layer.weight") == torch.float32


@pytest.mark.parametrize(
    ("flag", "inner"),
    [("--rename-mtp-keys", "transformer_layer"), ("--no-rename-mtp-keys", "mtp_model_layer")],
    ids=["up to 0.16", "later"],
)
def test_the_layer_inside_of_a_predicting_layer_is_called_as_the_release_wants_it(
    flag: str, inner: str, tmp_path: Path
) -> None:
    state = state_of(shapes_of(predicting=True))
    small_models.write(state, tmp_path / "in", "fsdp_dtensor")
    run(TO_TORCH_DIST, tmp_path / "in", tmp_path / "out", flag)
    opened = open_checkpoint(tmp_path / "out")
    layers = {
        key.split(".")[3]
        for key in opened.stored.tensors
        if ".linear_" in key and key.startswith("mtp.")
    }
    assert layers == {inner}
    assert set(opened.state().weights) == set(state.weights)


# ---- what is refused
# ---------------------------------------------------------------------------------------------------


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
    error = run(TO_FSDP, path, tmp_path / "out", option, prefix, code=1)["error"]
    assert f"the prefix {prefix!r} is none that a loader asks for" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "module",
    ["self_attention.linear_qkv", "mlp.linear_fc2", "mlp.linear_fc1,embedding.word_embeddings"],
)
def test_modules_that_are_not_gated_are_not_halved(module: str, tmp_path: Path) -> None:
    path = small_models.write(state_of(shapes_of()), tmp_path / "in")
    error = run(TO_FSDP, path, tmp_path / "out", "--swiglu-modules", module, code=1)["error"]
    assert f"{module.rpartition(',')[2]}.weight: it is not the first layer of a gated MLP" in error
    assert ".linear_fc1.weight:" not in error


# ---- comparing, editing, reading
# ---------------------------------------------------------------------------------------


def test_a_difference_in_the_state_of_another_optimizer_is_seen() -> None:
    first, second = (with_another_momentum(state_of(shapes_of())) for _ in range(2))
    assert not compare_states(first, second, weights_only=False).differs
    second.moments[TENSOR] = {
        "momentum_buffer": in_memory(second.moments[TENSOR]["momentum_buffer"].read() + 1)
    }
    found = compare_states(first, second, weights_only=False)
    assert [each.name for each in found.values] == [f"{TENSOR} (momentum_buffer)"]


def test_a_file_that_contradicts_itself_says_what_its_right_conversion_says(tmp_path: Path) -> None:
    path = contradicting(tmp_path)
    run(TO_FSDP, path, tmp_path / "there")
    found = run("diff", path, tmp_path / "there")
    assert found["same"] and found["equal"] > 0


@pytest.mark.parametrize(
    "value",
    [io.BytesIO(b"abc"), numpy.array([1.0, float("nan")])],
    ids=["bytes of a file", "an array with NaN"],
)
def test_an_object_is_the_same_as_itself(value: Any, tmp_path: Path) -> None:
    path = write_entries(
        {"tensor": torch.ones(2), "object": [value]}, OutputDirectory(tmp_path / "plain")
    )
    other = (
        io.BytesIO(b"abd") if isinstance(value, io.BytesIO) else numpy.array([2.0, float("nan")])
    )
    changed = write_entries(
        {"tensor": torch.ones(2), "object": [other]}, OutputDirectory(tmp_path / "changed")
    )
    assert run("compare-two-checkpoint", path, path)["equal"] == 2
    assert len(run("compare-two-checkpoint", path, changed, code=1)["objects"]) == 1


def test_an_edited_file_of_an_old_release_can_still_be_read(tmp_path: Path) -> None:
    sample = samples.torch_dist("v015_dense_tp2_dp2_model_space")
    before = open_checkpoint(sample)
    pieces = before.stored.metadata.mcore_data
    key = "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight"
    assert pieces[key]
    run("modify-state-dict", sample, tmp_path / "renamed", "--op", f"rename ^{key}$ other")
    renamed = open_checkpoint(tmp_path / "renamed").stored.metadata.mcore_data
    assert renamed == {"other" if each == key else each: cut for each, cut in pieces.items()}
    run("modify-state-dict", sample, tmp_path / "out", "--op", "remove _extra_state")
    first, second = before.state(), open_checkpoint(tmp_path / "out").state()
    assert second.moments and not compare_states(first, second, weights_only=False).differs


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_tensors_of_eight_bits_are_read(dtype: torch.dtype, tmp_path: Path) -> None:
    value = torch.arange(12.0).reshape(4, 3).to(dtype)
    path = write_entries({"key": value}, OutputDirectory(tmp_path / "plain"))
    lazy = StoredCheckpoint(path).lazy("key")
    assert lazy.dtype == dtype and torch.equal(lazy.read().float(), value.float())
    assert torch.equal(lazy.read_rows(1, 3).float(), value[1:3].float())
    assert run("print-tensor", path, "key")["max"] == value.float().max()
    assert run("verify", path)["sound"]


# ---- verifying
# ---------------------------------------------------------------------------------------------------------


def with_an_object_of_no_meaning(path: Path) -> Path:
    written = small_models.write(state_of(shapes_of()), path / "first")
    more = {"rerun_state_machine_state/shard_0.0_1.1": [{}]}
    return rewritten(written, path / "second", lambda content: content.update(more))


SOUND = {
    "with an object that is left out": with_an_object_of_no_meaning,
    "of gated MLPs with quick_geglu": lambda path: small_models.write(
        state_of(shapes_of(), swiglu=False, quick_geglu=True), path
    ),
    "with the momentum of SGD": lambda path: small_models.write(
        with_another_momentum(state_of(shapes_of())), path
    ),
    "with the momentum of SGD, as fsdp_dtensor": lambda path: small_models.write(
        with_another_momentum(state_of(shapes_of())), path, "fsdp_dtensor"
    ),
}


@pytest.mark.parametrize("name", SOUND)
def test_a_good_file_is_sound(name: str, tmp_path: Path) -> None:
    opened = open_checkpoint(SOUND[name](tmp_path))
    notes: list[str] = []
    assert find_problems(opened, lambda count: None, notes) == []
    left_out = [
        "rerun_state_machine_state/shard_0.0_1.1: not a part of training that is known here;"
        " left out"
    ]
    assert notes == (left_out if "left out" in name else [])
    assert run("verify", opened.directory)["notes"] == notes


def test_a_file_that_contradicts_itself_is_not_sound(tmp_path: Path) -> None:
    opened = open_checkpoint(contradicting(tmp_path))
    notes: list[str] = []
    (problem,) = find_problems(opened, lambda count: None, notes)
    assert (
        problem.startswith(f"{TENSOR}: its main weight in the optimizer is not its weight")
        and notes == []
    )
    assert not run("verify", opened.directory, code=1)["sound"]
