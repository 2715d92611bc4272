# SPDX-License-Identifier: Apache-2.0
"""Reader of Hugging Face models: a model directory to a training state, without transformers."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import cast

import torch

from megatron.checkpoint.core.key_rules import WORD_EMBEDDINGS, expected_shape, is_buffer
from megatron.checkpoint.core.lazy_tensor import LazyTensor, Shape, Tensors
from megatron.checkpoint.core.listing import refuse
from megatron.checkpoint.core.training_state import TrainingState
from megatron.checkpoint.hugging_face.families import family_named
from megatron.checkpoint.hugging_face.family import Family, Pairing
from megatron.checkpoint.hugging_face.model_directory import (
    CONFIG,
    dequantized,
    read_json,
    read_tensors,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Dtypes that weights may have."""


def read(directory: Path, *, vocabulary_multiple: int | None = None) -> TrainingState:
    """Read the weights and the arguments of a model. Tensors are read later, when they are needed.

    Weights in FP8 with a scale for each block are read as fp32.

    Args:
        directory: directory with config.json and one safetensors file, or several and an index.
        vocabulary_multiple: number to a multiple of which the vocabulary is padded with zeros, as
            tensor parallelism needs it: ``make_vocab_size_divisible_by`` times its size. Default:
            no padding.

    Returns:
        A state of ``weights``, ``buffers``, ``args`` and ``notes``. ``args`` has Megatron-LM's
        arguments of the model.

    Raises:
        ValueError: with all settings of config.json that Megatron-Core cannot follow; or with all
            tensors that are missing, unknown or of the wrong shape or dtype; for a family or a file
            that cannot be read.
    """
    config = read_json(directory / CONFIG)
    family = family_named(config.get("model_type"), f"{directory / CONFIG} has the model_type")
    args, problems = family.read_config(config)
    refuse_settings(directory / CONFIG, problems)
    stored = read_tensors(directory)
    if config.get("quantization_config"):
        stored = dequantized(stored, config["quantization_config"], directory)
    stored = _with_single_experts(_with_base(stored, family.base), family)
    args.mtp_num_layers = _num_predicting_layers(family, args.num_layers, stored)
    args.padded_vocab_size = _padded_size(args.vocab_size, vocabulary_multiple)
    pairings = []
    for pairing in family.pairings(args):
        if not pairing.is_copy:
            pairings.append(pairing)
    problems = _wrong_tensors(args, pairings, stored)
    notes, unknown = _other_tensors(family, args, stored)
    refuse(f"{directory} has other tensors than its config.json implies", [*problems, *unknown])
    announced = config.get("num_nextn_predict_layers") or 0
    found = args.mtp_num_layers or 0
    if family.predicts and announced != found:
        notes.append(
            f"config.json has {announced} layers that predict further tokens, the files have"
            f" {found}"
        )
    state = TrainingState(weights={}, args=args, notes=notes)
    for pairing in pairings:
        tensor = pairing.rearrangement.merge([stored[name] for name in pairing.theirs], args)
        if is_buffer(pairing.ours):
            state.buffers[pairing.ours] = tensor.to(torch.float32)
        else:
            state.weights[pairing.ours] = tensor
    dtype = state.weights[WORD_EMBEDDINGS].dtype
    args.params_dtype = dtype
    args.bf16 = dtype == torch.bfloat16
    args.fp16 = dtype == torch.float16
    _set_tokenizer(args, directory)
    return state


def refuse_settings(config: Path, problems: Sequence[str]) -> None:
    """Raise one ValueError with the problems of a config.json, if there are any."""
    refuse(f"{config} has settings that Megatron-Core's models do not have", problems)


def _with_base(stored: Tensors, base: str) -> Tensors:
    """Return names as in the whole language model, also if it was saved without its head."""
    if any(name.startswith(base) for name in stored):
        return stored
    found = {}
    for name, tensor in stored.items():
        if not name.startswith("lm_head."):
            name = base + name
        found[name] = tensor
    return found


def _with_single_experts(stored: Tensors, family: Family) -> Tensors:
    """Return tensors of single experts, also where a file has those of all experts as one.

    So transformers saves its own modules with ``save_original_format=False``:
    ``mlp.experts.gate_up_proj`` of the shape (experts, rows of gate and up, columns), and
    ``mlp.experts.down_proj``. The router is ``mlp.gate`` there in every family.
    """
    found = {}
    inside = r"mlp\.(?:experts\.(?:gate_up|down)_proj|gate\.weight)"
    pattern = re.compile(rf"({re.escape(family.layers)}\d+\.)({inside})")
    for name, tensor in stored.items():
        match = pattern.fullmatch(name)
        if match is None:
            found[name] = tensor
        else:
            found |= _renamed(match[1], match[2], tensor, family)
    return found


def _renamed(
    layer: str,
    inside: str,
    tensor: LazyTensor,
    family: Family,
) -> Tensors:
    """Return the tensor ``inside`` a layer of transformers' modules under the names of a family."""
    num_parts = {"mlp.experts.gate_up_proj": 2, "mlp.experts.down_proj": 1}.get(inside, 0)
    found = {}
    for row in family.layer:
        theirs = row.theirs.split()
        is_of_experts = "{expert}" in row.theirs and len(theirs) == num_parts
        if num_parts == 0 and row.ours == "mlp.router.weight":
            found[layer + row.theirs] = tensor
        elif is_of_experts and len(tensor.shape) == 3:
            for expert in range(tensor.num_rows):
                stacked = tensor.rows(expert, expert + 1)
                of_expert = stacked.map(tensor.shape[1:], lambda rows: rows[0])
                size = of_expert.num_rows // num_parts
                for part, name in enumerate(theirs):
                    rows = of_expert.rows(part * size, (part + 1) * size)
                    found[layer + name.format(expert=expert)] = rows
    return found or {layer + inside: tensor}


def _num_predicting_layers(
    family: Family,
    num_layers: int,
    stored: Iterable[str],
) -> int | None:
    """Count the layers beyond those of the config, which predict further tokens.

    The config cannot be asked: transformers leaves these layers out when it saves a model.
    """
    if not family.predicts:
        return None
    number = 0
    while any(name.startswith(f"{family.layers}{num_layers + number}.") for name in stored):
        number += 1
    return number or None


def _padded_size(size: int, multiple: int | None) -> int:
    """Round ``size`` up to a multiple: 100 tokens in multiples of 64 are 128 rows."""
    if multiple is None:
        return size
    if multiple < 1:
        raise ValueError(f"vocabulary_multiple must be at least 1, got {multiple}")
    return -(-size // multiple) * multiple


def _wrong_tensors(
    args: Namespace,
    pairings: Iterable[Pairing],
    stored: Tensors,
) -> list[str]:
    """Report tensors of the model that are missing or have another shape or dtype."""
    problems = []
    for pairing in pairings:
        # The key rules have every size of every tensor of a family.
        shape_of_ours = cast(Shape, expected_shape(pairing.ours, args))
        shapes = pairing.rearrangement.shapes(shape_of_ours, args)
        for name, shape in zip(pairing.theirs, shapes):
            if name not in stored:
                problems.append(f"{name}: missing")
            elif stored[name].shape != shape:
                problems.append(f"{name}: {stored[name].shape}, but by config.json {shape}")
            elif stored[name].dtype not in DTYPES.values():
                problems.append(
                    f"{name}: {stored[name].dtype}, expected one of {', '.join(DTYPES)}"
                )
    return problems


def _other_tensors(
    family: Family,
    args: Namespace,
    stored: Iterable[str],
) -> tuple[list[str], list[str]]:
    """Return notes about copies, which are not read, and problems with unknown tensors."""
    copies = set()
    expected: set[str] = set()
    if not args.untie_embeddings_and_output_weights:
        copies.add("lm_head.weight")
    for pairing in family.pairings(args):
        if pairing.is_copy:
            copies.update(pairing.theirs)
        else:
            expected.update(pairing.theirs)
    notes = []
    problems = []
    for name in stored:
        if name in expected or name.endswith(family.passed_over):
            continue
        if name in copies:
            notes.append(f"{name} is a copy of the embedding or the output layer: passed over")
        else:
            problems.append(f"{name}: unknown")
    return notes, problems


def _set_tokenizer(args: Namespace, directory: Path) -> None:
    files = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    args.tokenizer_type = None
    args.tokenizer_model = None
    if any((directory / name).is_file() for name in files):
        args.tokenizer_type = "HuggingFaceTokenizer"
        args.tokenizer_model = str(directory)
