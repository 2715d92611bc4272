# SPDX-License-Identifier: Apache-2.0
"""Writer of Hugging Face models: a training state to a model directory, without transformers."""

from __future__ import annotations

import shutil
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.core.key_rules import WORD_EMBEDDINGS, expected_shape, is_buffer
from megatron.checkpoint.core.lazy_tensor import Tensors
from megatron.checkpoint.core.listing import refuse
from megatron.checkpoint.core.parts import Part, Progress
from megatron.checkpoint.core.training_state import TrainingState
from megatron.checkpoint.hugging_face.families import FAMILIES, family_named
from megatron.checkpoint.hugging_face.family import FUSED_HEADS, TRANSPOSED, Family
from megatron.checkpoint.hugging_face.model_arguments import completed
from megatron.checkpoint.hugging_face.model_directory import (
    CODES,
    CONFIG,
    INDEX,
    SCALE,
    SINGLE_FILE,
    is_kept,
    quantized,
    read_json,
    read_tensors,
    write_json,
    write_shard,
)
from megatron.checkpoint.hugging_face.model_reader import refuse_settings
from megatron.checkpoint.hugging_face.setting_rules import Config
from megatron.checkpoint.store import durable

TOKENIZER_FILES = (
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
)
"""Files that are copied from a template."""

_FP8: Config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
_FP8["weight_block_size"] = [128, 128]
"""The ``quantization_config`` of DeepSeek-V3."""


class HuggingFaceTarget:
    """A model directory to be written in parts, each a safetensors file.

    Args:
        state: what to write: ``weights`` and ``buffers`` of a model, and ``args``, which describe
            it.
        family: ``model_type``; default: the template's, else the one that fits the arguments.
        dtype: dtype of weights; default: that in which the run computes, ``args.params_dtype``, but
            for weights that the template keeps in another dtype than its own. Buffers keep theirs.
        template: a directory whose config.json completes the new one, and whose tokenizer is
            copied. It has to be of the same family. Settings of the model are those of the
            arguments. It may be without tensors.
        shard_bytes: a file has one tensor, or at most so many bytes.
        vocab_size: rows of the embedding that are tokens; others are cut off. Default: the
            template's, else ``args.vocab_size``, else all rows.
        fp8: write the weights of linear layers in FP8, with a scale for each block: of 128 x 128
            elements, and of all linear layers, unless the template's ``quantization_config``
            has other settings.

    Attributes:
        parts: the safetensors files.

    Raises:
        ValueError: if no family, or more than one, has such models; if tensors are missing, unknown
            or of another shape; for a template of another family.
    """

    def __init__(
        self,
        state: TrainingState,
        family: str | None = None,
        dtype: torch.dtype | None = None,
        template: Path | None = None,
        shard_bytes: int = 4 << 30,
        vocab_size: int | None = None,
        fp8: bool = False,
    ) -> None:
        if state.args is None:
            raise ValueError(
                "the checkpoint has no arguments, so the model of its weights is not known"
            )
        self.template = template
        base = _template_config(template)
        if family and base and family != base["model_type"]:
            raise ValueError(
                f"the template {template} is of the family {base['model_type']}, but {family} is"
                " asked for"
            )
        args = _arguments_to_write(state.args, state.weights, base, vocab_size)
        self.family_name, config = _config_to_write(family or base.get("model_type"), args)
        self.family = FAMILIES[self.family_name]
        kept = {}
        if dtype is None:
            kept = _dtypes_kept_by(template, base)
            dtype = getattr(args, "params_dtype", None)
        embedding = state.weights[WORD_EMBEDDINGS]
        self.config = self._whole_config(base, config, dtype or embedding.dtype)
        if fp8:
            self.config["quantization_config"] = _FP8 | (base.get("quantization_config") or {})
        tensors = _their_tensors(
            self.family,
            args,
            state,
            dtype=dtype,
            kept=kept,
            quantization=self.config.get("quantization_config"),
        )
        self.parts = []
        for name, shard in _shards(tensors, shard_bytes).items():
            self.parts.append(_part(name, shard, state.notes))

    def finish(self, staging: Path, results: Mapping[str, Any]) -> None:
        """Write config.json, the index and the tokenizer.

        Args:
            staging: the directory.
            results: the results of the parts, by name.
        """
        if len(self.parts) > 1:
            file_of: dict[str, str] = {}
            for part in self.parts:
                file_of |= dict.fromkeys(results[part.name]["tensors"], part.name)
            num_bytes = sum(part.num_bytes for part in self.parts)
            index = {
                "metadata": {"total_size": num_bytes},
                "weight_map": dict(sorted(file_of.items())),
            }
            write_json(staging / INDEX, index)
        write_json(staging / CONFIG, self.config)
        if self.template is None:
            return
        for name in TOKENIZER_FILES:
            if (self.template / name).is_file():
                shutil.copyfile(self.template / name, staging / name)
                durable.sync_file(staging / name)

    def _whole_config(
        self,
        base: Config,
        config: Config,
        dtype: torch.dtype,
    ) -> Config:
        """Return the family's settings, completed by those of the template.

        A setting of the template stays if the family has no rule for it or if it means the same.
        """
        # Without a template these are null, or transformers would take those of some vocabulary.
        base = base or {"bos_token_id": None, "eos_token_id": None}
        replaced = {*self.family.keys, "dtype", "transformers_version", "quantization_config"}
        whole = {}
        for key, value in base.items():
            if key not in replaced:
                whole[key] = value
        for rule in self.family.rules:
            meaning = rule.read(config, [])
            in_base = not base.keys().isdisjoint(rule.keys)
            source = config
            if meaning and in_base and rule.read(base, []) == meaning:
                source = base
            for key in rule.keys:
                if key in source:
                    whole[key] = source[key]
        fixed = {"architectures": [self.family.architecture], "model_type": self.family_name}
        return whole | fixed | {"torch_dtype": str(dtype).removeprefix("torch.")}


# ---- config


def _template_config(template: Path | None) -> Config:
    """Return the settings of the template, none without one."""
    if template is None:
        return {}
    path = template / CONFIG
    config = read_json(path)
    family = family_named(config.get("model_type"), f"the template {path} has the model_type")
    _, problems = family.read_config(config)
    refuse_settings(path, problems)
    return config


def _arguments_to_write(
    args: Namespace,
    weights: Tensors,
    base: Config,
    vocab_size: int | None,
) -> Namespace:
    """Return the arguments with the sizes of the vocabulary before and after the conversion."""
    args = completed(args)
    if WORD_EMBEDDINGS not in weights:
        raise ValueError(
            f"the checkpoint has no {WORD_EMBEDDINGS}: it is not that of a whole language model"
        )
    args.padded_vocab_size = weights[WORD_EMBEDDINGS].shape[0]
    of_tokenizer = _vocabulary_of_tokenizer(args)
    sizes = (vocab_size, base.get("vocab_size"), of_tokenizer, args.padded_vocab_size)
    asked = next(size for size in sizes if size is not None)
    if not 0 < asked <= args.padded_vocab_size:
        raise ValueError(
            f"a vocabulary of {asked} tokens is asked for, but the embedding has"
            f" {args.padded_vocab_size} rows"
        )
    args.vocab_size = asked
    return args


def _vocabulary_of_tokenizer(args: Namespace) -> int | None:
    """Return the number of tokens of the run's tokenizer; None if the arguments lack it."""
    kind = getattr(args, "tokenizer_type", None)
    size: int | None = getattr(args, "vocab_size", None)
    if kind == "ByteTokenizer":
        return 257  # 256 bytes and the end of a document
    if kind == "NullTokenizer" and size is not None:
        return int(size) + 1  # the end of a document comes after the ids that were asked for
    return size


def _config_to_write(name: str | None, args: Namespace) -> tuple[str, Config]:
    """Return the family of the model of ``args``, and its settings."""
    if name is not None:
        family = family_named(name, "a model was asked for of the family")
        config, problems = family.write_config(args)
        refuse(f"the family {name} has no models as that of the checkpoint", problems)
        return name, config
    fitting = []
    reasons = []
    for kind, family in FAMILIES.items():
        config, problems = family.write_config(args)
        if problems:
            reasons.append(f"{kind}: {'; '.join(problems)}")
        else:
            fitting.append((kind, config))
    if not fitting:
        refuse("the model of the checkpoint is of no family that is known here", reasons)
    if len(fitting) > 1:
        names = ", ".join(kind for kind, _ in fitting)
        raise ValueError(
            f"the model of the checkpoint could be of the families {names}: name one of them"
        )
    return fitting[0]


# ---- tensors


def _dtypes_kept_by(template: Path | None, base: Config) -> dict[str, torch.dtype]:
    """Return the dtypes of the tensors that a template keeps in another one than its own.

    Example: since transformers 5.24 the routers of DeepSeek-V3 are float32 in models of bfloat16.
    """
    if template is None:
        return {}
    own = base.get("dtype") or base.get("torch_dtype")
    try:
        tensors = read_tensors(template)
    except ValueError:  # config and tokenizer are enough for a template
        return {}
    kept = {}
    for name, tensor in tensors.items():
        if own and tensor.dtype != CODES and str(tensor.dtype) != f"torch.{own}":
            kept[name] = tensor.dtype
    return kept


def _their_tensors(
    family: Family,
    args: Namespace,
    state: TrainingState,
    dtype: torch.dtype | None,
    kept: Mapping[str, torch.dtype],
    quantization: Config | None,
) -> Tensors:
    """Return the tensors of the new model by name; ``kept`` are weights of another dtype.

    Raises:
        ValueError: with all tensors of the state that are missing, of another shape, or not in the
            family's models; with ``quantization``, for matrices not of torch's linear layers.
    """
    ours = state.weights | state.buffers
    pairings = list(family.pairings(args))
    names = dict.fromkeys(pairing.ours for pairing in pairings)  # copies share one of ours
    problems = [f"{name}: has no place in the model" for name in ours if name not in names]
    for name in names:
        shape = expected_shape(name, args)
        if name not in ours:
            problems.append(f"{name}: missing")
        elif ours[name].shape != shape:
            problems.append(f"{name}: {ours[name].shape}, but by its arguments {shape}")
    refuse("the checkpoint has other tensors than its arguments imply", problems)
    found = {}
    for pairing in pairings:
        parts = pairing.rearrangement.split(ours[pairing.ours], args)
        is_matrix = ".linear_" in pairing.ours and len(ours[pairing.ours].shape) == 2
        if quantization and is_matrix and pairing.rearrangement in (TRANSPOSED, FUSED_HEADS):
            raise ValueError(f"FP8 is for linear layers, which {family.architecture} has not")
        for name, tensor in zip(pairing.theirs, parts):
            if quantization and is_matrix and not is_kept(name, quantization):
                block = quantization["weight_block_size"]
                found[name], found[name + SCALE] = quantized(tensor, block)
                continue
            wanted = kept.get(name, dtype)
            if wanted is not None and not is_buffer(pairing.ours):
                tensor = tensor.to(wanted)
            found[name] = tensor
    return found


def _shards(tensors: Tensors, limit: int) -> dict[str, Tensors]:
    """Distribute tensors over files: name of file -> its tensors."""
    shards: list[Tensors] = []
    size = 0
    for name, tensor in tensors.items():
        if not shards or size + tensor.num_bytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.num_bytes
    if len(shards) == 1:
        return {SINGLE_FILE: shards[0]}
    files = {}
    for number, shard in enumerate(shards, 1):
        files[f"model-{number:05d}-of-{len(shards):05d}.safetensors"] = shard
    return files


def _part(
    file: str,
    tensors: Tensors,
    notes: list[str],
) -> Part:
    """Return the part that writes one file. Reading tensors may append to ``notes``."""
    # Wide values come first, so that all of them are aligned.
    names = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    ordered = {name: tensors[name] for name in names}

    def write(staging: Path, progress: Progress) -> dict[str, Any]:
        known = len(notes)
        digest = write_shard(staging / file, ordered, progress)
        return {
            "tensors": list(ordered),
            "file": (file, digest),
            "notes": notes[known:],
        }

    num_bytes = sum(tensor.num_bytes for tensor in tensors.values())
    return Part(file, num_bytes, write)
