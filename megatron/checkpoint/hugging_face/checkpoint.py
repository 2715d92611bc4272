# SPDX-License-Identifier: Apache-2.0
"""Directories of Hugging Face models, read and written tensor by tensor: config.json and safetensors files.

What the families are is in :mod:`megatron.checkpoint.hugging_face.families`. transformers itself is
not needed.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.core.key_rules import WORD_EMBEDDINGS, is_buffer
from megatron.checkpoint.core.lazy_tensor import LazyTensor
from megatron.checkpoint.core.parameter_shapes import Sizes, expected_shape
from megatron.checkpoint.core.parts import Part
from megatron.checkpoint.core.training_state import TrainingState
from megatron.checkpoint.hugging_face.families import FAMILIES, Config, Family, Pairing
from megatron.checkpoint.hugging_face.model_arguments import completed, model_flags
from megatron.checkpoint.hugging_face.safetensors_shard import stored_tensors, write_shard

__all__ = ["HuggingFaceTarget", "model_flags", "read"]

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
TOKENIZER_FILES = [
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
]
"""What is taken over from a template."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


# ---- reading
# -----------------------------------------------------------------------------------------------------------


def read(directory: Path, *, vocabulary_multiple: int | None = None) -> TrainingState:
    """The weights and the arguments of a model; tensors are read when they are needed.

    Args:
        directory: with config.json and one safetensors file, or several and an index.
        vocabulary_multiple: pad the vocabulary with zeros to a multiple of this, as tensor
            parallelism wants it: ``make_vocab_size_divisible_by`` times its size. Default: as it
                is.

    Returns:
        A state of ``weights``, ``buffers``, ``args`` and ``notes``. ``args`` has Megatron-LM's
        arguments of the model.

    Raises:
        ValueError: with all settings of config.json that Megatron-Core cannot follow; or with all
            tensors that are missing, unknown or of the wrong shape or dtype; for a family or a file
            that cannot be read.
    """
    config = _read_json(directory / CONFIG)
    family = _family_named(config.get("model_type"), f"{directory / CONFIG} has the model_type")
    args, problems = family.read_config(config)
    _raise("has settings that Megatron-Core's models do not have", directory / CONFIG, problems)
    stored = _with_base(_all_tensors(directory), family.base)
    args.mtp_num_layers = _num_predicting_layers(family, args, stored)
    announced = config.get("num_nextn_predict_layers") or 0
    _set_vocabulary(args, vocabulary_multiple)
    pairings = [pairing for pairing in family.pairings(args) if not pairing.is_copy]
    notes, problems = _compare(family, args, pairings, stored)
    _raise("holds other tensors than its config.json says", directory, problems)
    if family.predicts and announced != (args.mtp_num_layers or 0):
        found = args.mtp_num_layers or 0
        notes.append(
            f"config.json speaks of {announced} layers that predict further tokens, there are"
            f" {found}"
        )
    state = TrainingState(weights={}, args=args, notes=notes)
    for pairing in pairings:
        tensor = pairing.rearrangement.merge([stored[name] for name in pairing.theirs], args)
        if is_buffer(pairing.ours):
            state.buffers[pairing.ours] = tensor.to(torch.float32)
        else:
            state.weights[pairing.ours] = tensor
    _set_dtype(args, state.weights[WORD_EMBEDDINGS].dtype)
    _set_tokenizer(args, directory)
    return state


def _read_json(path: Path) -> Config:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} should hold one JSON object")
    return content


def _family_named(name: Any, where: str) -> Family:
    if name not in FAMILIES:
        raise ValueError(
            f"{where} {name}, of which there is no counterpart here: known are"
            f" {', '.join(FAMILIES)}"
        )
    return FAMILIES[name]


def _raise(what: str, where: Path | str, problems: list[str]) -> None:
    if problems:
        raise ValueError(f"{where} {what}:\n  " + "\n  ".join(problems))


def _all_tensors(directory: Path) -> dict[str, LazyTensor]:
    """Name -> tensor in all files of the model.

    Raises:
        ValueError: where files are missing, or do not hold what the index says.
    """
    if not (directory / INDEX).is_file():
        if not (directory / SINGLE_FILE).is_file():
            raise ValueError(
                f"{directory} has neither {SINGLE_FILE} nor {INDEX}: save the model with"
                " safetensors"
            )
        return stored_tensors(directory / SINGLE_FILE)
    places = _read_json(directory / INDEX).get("weight_map")
    if not isinstance(places, dict):
        raise ValueError(f"{directory / INDEX} has no weight_map")
    absent = sorted({file for file in places.values() if not (directory / file).is_file()})
    _raise("names files that are not there", directory / INDEX, absent)
    files = {file: stored_tensors(directory / file) for file in sorted(set(places.values()))}
    lost = [f"{name}: not in {file}" for name, file in places.items() if name not in files[file]]
    _raise("says what its files do not hold", directory / INDEX, lost)
    return {name: files[file][name] for name, file in places.items()}


def _with_base(stored: dict[str, LazyTensor], base: str) -> dict[str, LazyTensor]:
    """Names as in the whole language model, also where it was saved without its head."""
    if any(name.startswith(base) for name in stored):
        return stored
    return {
        name if name.startswith("lm_head.") else base + name: tensor
        for name, tensor in stored.items()
    }


def _num_predicting_layers(
    family: Family, args: argparse.Namespace, stored: Iterable[str]
) -> int | None:
    """How many layers there are beyond those of the config: transformers leaves them out when it saves a model."""
    if not family.predicts:
        return None
    number = 0
    while any(name.startswith(f"{family.layers}{args.num_layers + number}.") for name in stored):
        number += 1
    return number or None


def _set_vocabulary(args: argparse.Namespace, multiple: int | None) -> None:
    if multiple is not None and multiple < 1:
        raise ValueError(f"vocabulary_multiple must be at least 1, got {multiple}")
    args.padded_vocab_size = -(-args.vocab_size // (multiple or 1)) * (multiple or 1)


def _compare(
    family: Family, args: argparse.Namespace, pairings: list[Pairing], stored: dict[str, LazyTensor]
) -> tuple[list[str], list[str]]:
    """What is passed over, and what is wrong, in words."""
    problems, asked = [], set()
    for pairing in pairings:
        for name, shape in zip(pairing.theirs, _their_shapes(pairing, args)):
            asked.add(name)
            if name not in stored:
                problems.append(f"{name}: missing")
            elif stored[name].shape != shape:
                problems.append(f"{name}: {stored[name].shape}, but by config.json {shape}")
            elif stored[name].dtype not in DTYPES.values():
                problems.append(
                    f"{name}: {stored[name].dtype}, which is none of {', '.join(DTYPES)}"
                )
    copies = {
        name for pairing in family.pairings(args) if pairing.is_copy for name in pairing.theirs
    }
    if not args.untie_embeddings_and_output_weights:
        copies.add("lm_head.weight")
    others = [
        name for name in stored if name not in asked and not name.endswith(family.passed_over)
    ]
    problems += [f"{name}: unknown" for name in others if name not in copies]
    notes = [
        f"{name} is a copy of the embedding or the output layer: passed over"
        for name in others
        if name in copies
    ]
    return notes, problems


def _their_shapes(pairing: Pairing, args: argparse.Namespace) -> list[tuple[int, ...]]:
    return pairing.rearrangement.shapes(expected_shape(pairing.ours, Sizes(args)), args)


def _set_dtype(args: argparse.Namespace, dtype: torch.dtype) -> None:
    args.params_dtype = dtype
    args.bf16, args.fp16 = dtype == torch.bfloat16, dtype == torch.float16


def _set_tokenizer(args: argparse.Namespace, directory: Path) -> None:
    has_one = any(
        (directory / name).is_file()
        for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    )
    args.tokenizer_type = "HuggingFaceTokenizer" if has_one else None
    args.tokenizer_model = str(directory) if has_one else None


# ---- writing
# -----------------------------------------------------------------------------------------------------------


class HuggingFaceTarget:
    """A model directory to be written in parts, one a safetensors file.

    Args:
        state: what to write: ``weights`` and ``buffers`` of a model, and ``args``, which say which.
        family: ``model_type``; default: the template's, else the one that fits the arguments.
        dtype: of weights; default that in which the run computes, ``args.params_dtype``. Buffers
            stay as they are.
        template: a directory whose config.json completes the new one, and whose tokenizer is taken
            over. It has to be of the same family. Settings of the model are those of the arguments.
        shard_bytes: a file has one tensor, or at most so many bytes.
        vocab_size: rows of the embedding that are tokens; others are cut off. Default: the
            template's, else ``args.vocab_size``, else all rows.

    Attributes:
        parts: the safetensors files.

    Raises:
        ValueError: where no family, or more than one, has such models; where tensors are missing,
            unknown or misshaped; for a template of another family.
    """

    def __init__(
        self,
        state: TrainingState,
        family: str | None = None,
        dtype: torch.dtype | None = None,
        template: Path | None = None,
        shard_bytes: int = 4 << 30,
        vocab_size: int | None = None,
    ) -> None:
        if state.args is None:
            raise ValueError(
                "the checkpoint has no arguments, so it does not say what model its weights are of"
            )
        self.template = template
        base = _template_config(template)
        if family and base and family != base["model_type"]:
            raise ValueError(
                f"the template {template} is of the family {base['model_type']}, but {family} is"
                " asked for"
            )
        family = family or base.get("model_type")
        args = _arguments_to_write(state, base, vocab_size)
        self.family_name, config = _config_to_write(family, args)
        self.family = FAMILIES[self.family_name]
        dtype = dtype or getattr(args, "params_dtype", None)
        tensors = _their_tensors(self.family, args, state, dtype)
        self.config = self._whole_config(base, config, dtype or tensors[min(tensors)].dtype)
        self.parts = [
            _part(name, shard, state.notes) for name, shard in _shards(tensors, shard_bytes).items()
        ]

    def finish(self, staging: Path, results: Mapping[str, Any]) -> None:
        """Write what stands beside the tensors.

        Args:
            staging: the directory that the parts were written into.
            results: name of each part -> what writing it returned.
        """
        if len(self.parts) > 1:
            places = {
                name: part.name for part in self.parts for name in results[part.name]["tensors"]
            }
            size = {"total_size": sum(part.num_bytes for part in self.parts)}
            _write_json(
                staging / INDEX, {"metadata": size, "weight_map": dict(sorted(places.items()))}
            )
        _write_json(staging / CONFIG, self.config)
        for name in TOKENIZER_FILES if self.template is not None else ():
            if (self.template / name).is_file():
                shutil.copyfile(self.template / name, staging / name)

    def _whole_config(self, base: Config, config: Config, dtype: torch.dtype) -> Config:
        """The family's settings, and those of the template that mean the same or that the family does not speak of."""
        base = base or {
            "bos_token_id": None,
            "eos_token_id": None,
        }  # the default would be those of some vocabulary
        replaced = {*self.family.keys, "dtype", "transformers_version"}
        whole = {key: value for key, value in base.items() if key not in replaced}
        for rule in self.family.rules:
            meaning = rule.read(config, [])
            says_the_same = (
                meaning and not base.keys().isdisjoint(rule.keys) and rule.read(base, []) == meaning
            )
            source = base if says_the_same else config
            whole |= {key: source[key] for key in rule.keys if key in source}
        fixed = {"architectures": [self.family.architecture], "model_type": self.family_name}
        return whole | fixed | {"torch_dtype": str(dtype).removeprefix("torch.")}


def _template_config(template: Path | None) -> Config:
    if template is None:
        return {}
    config = _read_json(template / CONFIG)
    family = _family_named(
        config.get("model_type"), f"the template {template / CONFIG} has the model_type"
    )
    _raise(
        "has settings that Megatron-Core's models do not have",
        template / CONFIG,
        family.read_config(config)[1],
    )
    return config


def _arguments_to_write(
    state: TrainingState, base: Config, vocab_size: int | None
) -> argparse.Namespace:
    """The arguments with the sizes of the vocabulary as they are and shall be."""
    args = completed(state.args)
    if WORD_EMBEDDINGS not in state.weights:
        raise ValueError(
            f"the checkpoint has no {WORD_EMBEDDINGS}: it is not that of a whole language model"
        )
    args.padded_vocab_size = state.weights[WORD_EMBEDDINGS].shape[0]
    sizes = (
        vocab_size,
        base.get("vocab_size"),
        _vocabulary_of_tokenizer(args),
        args.padded_vocab_size,
    )
    asked = next(size for size in sizes if size is not None)
    if not 0 < asked <= args.padded_vocab_size:
        raise ValueError(
            f"a vocabulary of {asked} tokens is asked for, but the embedding has"
            f" {args.padded_vocab_size} rows"
        )
    args.vocab_size = asked
    return args


def _vocabulary_of_tokenizer(args: argparse.Namespace) -> int | None:
    """How many tokens the run has told apart, as far as its arguments say so."""
    size, tokenizer = getattr(args, "vocab_size", None), getattr(args, "tokenizer_type", None)
    if tokenizer == "ByteTokenizer":
        return 257  # and an end of document
    return (
        size + 1 if tokenizer == "NullTokenizer" and size is not None else size
    )  # which has that beyond what is asked for


def _config_to_write(name: str | None, args: argparse.Namespace) -> tuple[str, Config]:
    """The family of the model of ``args``, and its settings."""
    if name is not None:
        config, problems = _family_named(name, "a model was asked for of the family").write_config(
            args
        )
        _raise("has no models as that of the checkpoint", f"the family {name}", problems)
        return name, config
    tried = {each: family.write_config(args) for each, family in FAMILIES.items()}
    fitting = [each for each, (_, problems) in tried.items() if not problems]
    if len(fitting) == 1:
        return fitting[0], tried[fitting[0]][0]
    if fitting:
        raise ValueError(
            f"the model of the checkpoint could be of the families {', '.join(fitting)}: name one"
            " of them"
        )
    reasons = [f"{each}: {'; '.join(problems)}" for each, (_, problems) in tried.items()]
    raise ValueError(
        "the model of the checkpoint is of no family that is known here:\n  " + "\n  ".join(reasons)
    )


def _their_tensors(
    family: Family, args: argparse.Namespace, state: TrainingState, dtype: torch.dtype | None
) -> dict[str, LazyTensor]:
    """Name -> tensor of the model that is to be written.

    Raises:
        ValueError: with all tensors of the state that are missing, misshaped, or have no place in
            the family's models.
    """
    ours = state.weights | state.buffers
    pairings = list(family.pairings(args))
    places = dict.fromkeys(pairing.ours for pairing in pairings)
    problems = [f"{name}: has no place in the model" for name in ours if name not in places]
    for name in places:
        shape = expected_shape(name, Sizes(args))
        if name not in ours:
            problems.append(f"{name}: missing")
        elif ours[name].shape != shape:
            problems.append(f"{name}: {ours[name].shape}, but by its arguments {shape}")
    _raise("has other tensors than its arguments say", "the checkpoint", problems)
    found: dict[str, LazyTensor] = {}
    for pairing in pairings:
        tensor = ours[pairing.ours]
        if dtype is not None and not is_buffer(pairing.ours):
            tensor = tensor.to(dtype)
        found |= zip(pairing.theirs, pairing.rearrangement.split(tensor, args))
    return found


def _shards(tensors: dict[str, LazyTensor], limit: int) -> dict[str, dict[str, LazyTensor]]:
    """Name of file -> its tensors."""
    shards: list[dict[str, LazyTensor]] = []
    size = 0
    for name, tensor in tensors.items():
        if not shards or size + tensor.num_bytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.num_bytes
    if len(shards) == 1:
        return {SINGLE_FILE: shards[0]}
    return {
        f"model-{number:05d}-of-{len(shards):05d}.safetensors": shard
        for number, shard in enumerate(shards, 1)
    }


def _part(file: str, tensors: dict[str, LazyTensor], notes: list[str]) -> Part:
    # Wide values first, so that all of them are aligned.
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))

    def write(staging: Path, progress: Callable[[int], None]) -> dict[str, Any]:
        known = len(notes)  # reading appends to them
        write_shard(staging / file, ordered, progress)
        return {"tensors": list(ordered), "notes": notes[known:]}

    return Part(file, sum(tensor.num_bytes for tensor in tensors.values()), write)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
