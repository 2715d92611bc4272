# SPDX-License-Identifier: Apache-2.0
"""Directories of Hugging Face models: reading, writing, templates, and damage."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.checkpoint.core.key_rules import WORD_EMBEDDINGS, expected_shape
from megatron.checkpoint.core.lazy_tensor import LazyTensor, in_memory
from megatron.checkpoint.core.training_state import TrainingState
from megatron.checkpoint.hugging_face.families import FAMILIES
from megatron.checkpoint.hugging_face.model_directory import (
    INDEX,
    SINGLE_FILE,
    is_model_directory,
)
from megatron.checkpoint.hugging_face.model_reader import read
from megatron.checkpoint.hugging_face.model_writer import HuggingFaceTarget
from tests.support.checkpoint import samples
from tests.support.checkpoint.changed_checkpoints import TENSOR, rewritten
from tests.support.checkpoint.command_runs import TO_FSDP, TO_TORCH_DIST, run_json
from tests.support.checkpoint.hugging_face.saved_models import edited_config, saved
from tests.support.checkpoint.hugging_face_models import (
    KINDS,
    VOCABULARY,
    config_of,
    random_state,
    write,
)


@pytest.mark.exhaustive
def test_an_export_names_weights_that_the_optimizer_contradicts(tmp_path: Path) -> None:
    sample = samples.torch_dist(samples.DENSE)
    there, back = tmp_path / "there", tmp_path / "back"
    run_json(TO_FSDP, sample, there)
    run_json(TO_TORCH_DIST, there, back)  # in the layout that has a tensor of each

    def change(content: dict[str, Any]) -> None:
        content["optimizer.state.param.decoder.layers.mlp.linear_fc2.weight"][1] += 1

    path = rewritten(samples.iteration(back), tmp_path / "contradicting", change)
    (note,) = run_json("convert-to-hf", path, tmp_path / "model")["notes"]
    assert note.startswith(
        f"{TENSOR}: its main weight in the optimizer is not its weight in the model"
    )


@pytest.mark.seldom("mixtral")
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_the_whole_tensor(kind: str, tmp_path: Path) -> None:
    state, expected = read(saved(random_state(kind), tmp_path)), random_state(kind)
    assert state.weights.keys() == expected.weights.keys()
    for name, tensor in state.weights.items():
        whole = expected.weights[name].read()
        first, last = whole.shape[0] // 4, whole.shape[0] * 2 // 3
        assert torch.equal(tensor.read(), whole), name
        assert torch.equal(tensor.read_rows(first, last), whole[first:last]), name


def test_what_is_read_is_memory_of_its_own(tmp_path: Path) -> None:
    tensor = read(saved(random_state("llama"), tmp_path)).weights[WORD_EMBEDDINGS]
    tensor.read().zero_()
    assert tensor.read().any()


def test_all_tensors_that_do_not_fit_are_named_at_once(tmp_path: Path) -> None:
    saved(random_state("qwen3_moe"), tmp_path)
    content = load_file(tmp_path / SINGLE_FILE)
    queries, up = "self_attn.q_proj.weight", "model.layers.1.mlp.up_proj.weight"
    content[f"model.layers.7.{queries}"] = content.pop(f"model.layers.0.{queries}")
    content["model.norm.weight"] = torch.ones(33)
    content[up] = content[up].to(torch.int8)
    save_file(content, tmp_path / SINGLE_FILE)
    with pytest.raises(ValueError) as refused:
        read(tmp_path)
    for words in (
        "model.layers.7.self_attn.q_proj.weight: unknown",
        "model.layers.0.self_attn.q_proj.weight: missing",
        "model.norm.weight: (33,), but by config.json (32,)",
        "model.layers.1.mlp.up_proj.weight: torch.int8",
    ):
        assert words in str(refused.value)


def damage_index(directory: Path) -> None:
    content = json.loads((directory / INDEX).read_text())
    content["weight_map"]["model.norm.weight"] = "model-00009-of-00009.safetensors"
    (directory / INDEX).write_text(json.dumps(content))


def lose_tensor(directory: Path) -> None:
    content = json.loads((directory / INDEX).read_text())
    content["weight_map"]["model.strange.weight"] = "model-00001-of-00004.safetensors"
    (directory / INDEX).write_text(json.dumps(content))


def cut_file(directory: Path) -> None:
    path = directory / "model-00001-of-00004.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def remove_tensors(directory: Path) -> None:
    (directory / INDEX).unlink()


DAMAGES = {
    "a file is missing": (damage_index, "model-00009-of-00009.safetensors"),
    "a tensor is not where it should be": (
        lose_tensor,
        "model.strange.weight: not in model-00001-of-00004.safetensors",
    ),
    "a file is cut": (cut_file, "model-00001-of-00004.safetensors cannot be read"),
    "no tensors": (remove_tensors, "neither model.safetensors nor"),
    "family": (lambda directory: edited_config(directory, model_type="mamba"), "mamba"),
    "no JSON": (
        lambda directory: (directory / "config.json").write_text("{"),
        "config.json cannot be read",
    ),
}


@pytest.mark.parametrize(("damage", "words"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_directory_is_named(damage: Any, words: str, tmp_path: Path) -> None:
    assert len(HuggingFaceTarget(random_state("llama"), shard_bytes=20_000).parts) == 4
    saved(random_state("llama"), tmp_path, shard_bytes=20_000)
    damage(tmp_path)
    with pytest.raises(ValueError, match=words):
        read(tmp_path)


def peak_of(action: Any) -> int:
    """By how many bytes this process' memory grew at most."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what there is
    before = memory("VmRSS")
    action()
    return memory("VmHWM") - before


def memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the peak of memory is Linux's to tell"
)
def test_a_conversion_holds_two_tensors_at_a_time(tmp_path: Path) -> None:
    config = config_of(
        "llama", hidden_size=512, intermediate_size=2048, num_hidden_layers=9, vocab_size=4096
    )
    args, _ = FAMILIES["llama"].read_config(config)
    args.padded_vocab_size, args.params_dtype = 4096, torch.float32
    empty = TrainingState({}, args=args)
    for pairing in FAMILIES["llama"].pairings(args):
        shape = expected_shape(pairing.ours, args)
        empty.weights[pairing.ours] = LazyTensor(
            shape, torch.float32, lambda start, stop, row=shape[1:]: torch.zeros(stop - start, *row)
        )
    largest = max(tensor.num_bytes for tensor in empty.weights.values())
    whole = sum(tensor.num_bytes for tensor in empty.weights.values())
    assert whole > 10 * largest
    assert peak_of(lambda: saved(empty, tmp_path / "first")) < 2.5 * largest
    assert peak_of(lambda: saved(read(tmp_path / "first"), tmp_path / "second")) < 2.5 * largest


def test_one_file_has_at_most_so_many_bytes_or_one_tensor(tmp_path: Path) -> None:
    target = HuggingFaceTarget(random_state("llama"), shard_bytes=7_000)
    number = f"{len(target.parts):05d}"
    assert target.parts[-1].name == f"model-{number}-of-{number}.safetensors"
    write(target, tmp_path)
    for part in target.parts:
        content = load_file(tmp_path / part.name)
        assert part.num_bytes == sum(tensor.nbytes for tensor in content.values())
        assert part.num_bytes <= 7_000 or len(content) == 1


def test_weights_are_in_the_dtype_of_the_run_unless_another_is_asked_for(tmp_path: Path) -> None:
    state = random_state("llama")
    state.args.params_dtype = torch.bfloat16  # as where a file has the main weights of such a run
    expected = state.weights["decoder.final_layernorm.weight"].read()
    for name, options in {"run": {}, "asked": {"dtype": torch.float16}}.items():
        dtype = options.get("dtype", torch.bfloat16)
        directory = saved(state, tmp_path / name, **options)
        written = load_file(directory / SINGLE_FILE)["model.norm.weight"]
        assert torch.equal(written, expected.to(dtype))
        config = json.loads((directory / "config.json").read_text())
        assert f"torch.{config['torch_dtype']}" == str(dtype)


def test_weights_that_the_template_keeps_in_another_dtype_have_it(tmp_path: Path) -> None:
    template = saved(random_state("llama"), tmp_path / "template", dtype=torch.bfloat16)
    tensors = load_file(template / SINGLE_FILE)
    norm = "model.norm.weight"
    tensors[norm] = torch.rand(tensors[norm].shape)  # in float32
    save_file(tensors, template / SINGLE_FILE)
    state = read(template)
    written = load_file(saved(state, tmp_path / "new", template=template) / SINGLE_FILE)
    assert torch.equal(written[norm], tensors[norm])
    others = {tensor.dtype for name, tensor in written.items() if name != norm}
    assert others == {torch.bfloat16}
    asked = saved(state, tmp_path / "asked", template=template, dtype=torch.float16)
    assert {each.dtype for each in load_file(asked / SINGLE_FILE).values()} == {torch.float16}
    without_tensors = tmp_path / "config"
    without_tensors.mkdir()
    shutil.copyfile(template / "config.json", without_tensors / "config.json")
    new = saved(state, tmp_path / "newer", template=without_tensors)
    written = load_file(new / SINGLE_FILE)
    assert written[norm].dtype == torch.bfloat16


def test_the_template_gives_tokenizer_and_other_settings_but_not_the_model(tmp_path: Path) -> None:
    template = saved(random_state("llama", vocab_size=37), tmp_path / "template")
    edited_config(
        template,
        bos_token_id=17,
        rope_theta=None,
        rope_parameters={"rope_theta": 10000.0},
        rms_norm_eps=0.5,
    )
    for name in ("tokenizer.json", "generation_config.json", "notes.txt"):
        (template / name).write_text(name)
    saved(random_state("llama", num_hidden_layers=3), tmp_path / "new", template=template)
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert config["bos_token_id"] == 17
    assert (config["num_hidden_layers"], config["rms_norm_eps"]) == (3, 0.01)
    assert config["rope_parameters"] == {"rope_theta": 10000.0}  # means the same, so it stays
    assert config["vocab_size"] == 37
    assert load_file(tmp_path / "new" / SINGLE_FILE)["lm_head.weight"].shape == (37, 32)
    written = {"config.json", SINGLE_FILE, "tokenizer.json", "generation_config.json"}
    assert {path.name for path in (tmp_path / "new").iterdir()} == written
    assert read(tmp_path / "new").args.tokenizer_model == str(tmp_path / "new")


@pytest.mark.parametrize(
    ("arguments", "options", "expected"),
    [
        ({}, {}, VOCABULARY),
        ({"vocab_size": 37}, {}, 37),
        ({"vocab_size": 37, "tokenizer_type": "NullTokenizer"}, {}, 38),
        ({"vocab_size": 37}, {"vocab_size": 33}, 33),
    ],
    ids=["all rows", "that of the run", "and its end of document", "as asked for"],
)
def test_rows_beyond_the_vocabulary_are_cut_off(
    arguments: dict, options: dict, expected: int, tmp_path: Path
) -> None:
    state = random_state("llama")
    del state.args.vocab_size
    vars(state.args).update(arguments)
    directory = saved(state, tmp_path, **options)
    assert load_file(directory / SINGLE_FILE)["lm_head.weight"].shape[0] == expected
    assert json.loads((directory / "config.json").read_text())["vocab_size"] == expected


def without_a_weight(state: TrainingState) -> None:
    del state.weights["decoder.layers.1.mlp.linear_fc1.weight"]
    state.weights["decoder.layers.1.mlp.linear_fc1.bias"] = in_memory(torch.zeros(96))
    state.weights["decoder.final_layernorm.weight"] = in_memory(torch.zeros(31))


WRONG_STATES: dict[str, tuple[Any, dict[str, Any], list[str]]] = {
    "other tensors": (
        without_a_weight,
        {},
        [
            "linear_fc1.weight: missing",
            "linear_fc1.bias: has no place",
            "final_layernorm.weight: (31,), but",
        ],
    ),
    "no arguments": (lambda state: setattr(state, "args", None), {}, ["no arguments"]),
    "no embedding": (lambda state: state.weights.pop(WORD_EMBEDDINGS), {}, [WORD_EMBEDDINGS]),
    "no family": (
        lambda state: setattr(state.args, "squared_relu", True),
        {},
        [f"{each}: " for each in FAMILIES],
    ),
    "a window": (
        lambda state: setattr(state.args, "window_size", (64, 0)),
        {"family": "llama"},
        ["window_size is (64, 0)"],
    ),
    "another family": (
        lambda state: None,
        {"family": "qwen3"},
        ["qwen3", "qk_layernorm is False instead of True"],
    ),
    "an unknown family": (lambda state: None, {"family": "mamba"}, ["mamba", *FAMILIES]),
    "too many tokens": (lambda state: None, {"vocab_size": 50}, ["50 tokens", "40 rows"]),
    "no tokens": (lambda state: None, {"vocab_size": 0}, ["0 tokens", "40 rows"]),
}


@pytest.mark.parametrize(("change", "options", "words"), WRONG_STATES.values(), ids=WRONG_STATES)
def test_what_cannot_be_written_is_refused_at_once(
    change: Any, options: dict, words: list[str]
) -> None:
    state = random_state("llama")
    change(state)
    with pytest.raises(ValueError) as refused:
        HuggingFaceTarget(state, **options)
    assert all(word in str(refused.value) for word in words), refused.value


def test_a_template_of_another_family_is_refused(tmp_path: Path) -> None:
    template = saved(random_state("qwen3"), tmp_path)
    with pytest.raises(ValueError, match=r"template .* is of the family qwen3, but llama"):
        HuggingFaceTarget(random_state("llama"), family="llama", template=template)
    with pytest.raises(ValueError, match="the family qwen3"):
        HuggingFaceTarget(random_state("llama"), template=template)


def test_the_folder_of_a_run_is_not_that_of_a_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"begins_after_iteration": 0, "arguments": {}}')
    assert not is_model_directory(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert is_model_directory(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert is_model_directory(tmp_path)
