# SPDX-License-Identifier: Apache-2.0
"""One family of Hugging Face models: a ``model_type`` as data, which works in both directions."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.checkpoint.core.key_rules import OUTPUT_LAYER, WORD_EMBEDDINGS
from megatron.checkpoint.core.spelling import INNER_LAYER
from megatron.checkpoint.hugging_face.model_arguments import ARGUMENTS, completed
from megatron.checkpoint.hugging_face.setting_rules import Config, SettingRule, in_words, only
from megatron.checkpoint.hugging_face.tensors import VOCABULARY, Pairing, TensorRow

_IGNORED = (
    *("_attn_implementation", "_attn_implementation_autoset", "_name_or_path", "architectures"),
    *("auto_map", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id"),
    *("finetuning_task", "id2label", "keys_to_ignore_at_inference", "label2id", "model_type"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "output_scores"),
    *("pad_token_id", "pretraining_tp", "problem_type", "return_dict", "return_dict_in_generate"),
    *("router_aux_loss_coef", "sep_token_id", "task_specific_params", "tokenizer_class"),
    *("torch_dtype", "transformers_version", "unk_token_id", "use_cache", "use_return_dict"),
)
"""Settings that change nothing a model computes from given tokens."""

_COMMON = (
    only("is_encoder_decoder", False, write=False),
    only("is_decoder", False, True, write=False),
    only("add_cross_attention", False, write=False),
    only("tie_encoder_decoder", False, write=False),
    only(
        "quantization_config",
        None,
        because="save the model without quantization first",
        write=False,
    ),
)
"""Rules of all families."""

_PREDICTING_LAYER = (
    TensorRow("enorm.weight", "enorm.weight"),
    TensorRow("hnorm.weight", "hnorm.weight"),
    TensorRow("eh_proj.weight", "eh_proj.weight"),
    TensorRow("final_layernorm.weight", "shared_head.norm.weight"),
)
"""Rows of a layer that predicts further tokens, beside those of the layer inside it."""

_EMBEDDING_COPY, _OUTPUT_COPY = "embed_tokens.weight", "shared_head.head.weight"


@dataclass(frozen=True)
class Family:
    """One ``model_type``.

    Attributes:
        architecture: transformers' class of the language model.
        outside: rows outside layers.
        layer: rows of a layer.
        rules: settings.
        arguments: Megatron-LM's arguments that every model of the family has.
        training: arguments that a model of the family trains with, if the config does not say
            it. They are no part of the model.
        base: beginning of all names but the output layer's. A file of the model without its head
            leaves it out.
        layers: beginning of the names in a layer, before its number.
        predicts: layers that predict further tokens may follow the others.
        passed_over: endings of tensors that old files have and nothing needs.
        ignored: settings without meaning here, beside those of all families.
    """

    architecture: str
    outside: tuple[TensorRow, ...]
    layer: tuple[TensorRow, ...]
    rules: tuple[SettingRule, ...]
    arguments: dict[str, Any]
    training: dict[str, Any]
    base: str = "model."
    layers: str = "model.layers."
    predicts: bool = False
    passed_over: tuple[str, ...] = (".rotary_emb.inv_freq",)
    ignored: tuple[str, ...] = ()

    def pairings(self, args: argparse.Namespace) -> Iterator[Pairing]:
        """Yield all tensors of the model of ``args``."""
        for row in self.outside:
            if row.where(args, 0):
                yield Pairing(row.ours, tuple(row.theirs.split()), row.rearrangement)
        for number in range(args.num_layers):
            ours, theirs = f"decoder.layers.{number}.", f"{self.layers}{number}."
            yield from _in_layer(self.layer, args, number, ours, theirs)
        last = args.num_layers - 1  # predicting layers are made like it
        head = OUTPUT_LAYER if args.untie_embeddings_and_output_weights else WORD_EMBEDDINGS
        for number in range(args.mtp_num_layers or 0):
            # In a model of 61 layers, our mtp.layers.0 is their model.layers.61.
            ours, theirs = f"mtp.layers.{number}.", f"{self.layers}{args.num_layers + number}."
            yield from _in_layer(_PREDICTING_LAYER, args, last, ours, theirs)
            yield from _in_layer(self.layer, args, last, ours + INNER_LAYER, theirs)
            yield Pairing(WORD_EMBEDDINGS, (theirs + _EMBEDDING_COPY,), VOCABULARY, is_copy=True)
            yield Pairing(head, (theirs + _OUTPUT_COPY,), VOCABULARY, is_copy=True)

    def read_config(self, config: Config) -> tuple[argparse.Namespace, list[str]]:
        """Return the arguments that correspond to a config, and its problems.

        A setting that no rule reads has to be one of those without meaning.
        """
        values: dict[str, Any] = {argument.name: argument.default for argument in ARGUMENTS}
        values |= self.arguments | self.training
        problems: list[str] = []
        known = {*_IGNORED, *self.ignored}
        for rule in (*self.rules, *_COMMON):
            values |= rule.read(config, problems)
            known.update(rule.keys)
        for key in sorted(config.keys() - known):
            if config[key] is not None:
                problems.append(
                    f"{key} {in_words(config[key])}: unknown, and may change what the model"
                    " computes"
                )
        return argparse.Namespace(**values), problems

    def write_config(self, args: argparse.Namespace) -> tuple[Config, list[str]]:
        """Return the config of the model of ``args``, and why the family has no such model.

        An argument that no rule writes has to have its default, or the model would compute
        something else.
        """
        args = completed(args)
        problems = [
            f"{name} is {getattr(args, name, None)} instead of {value}"
            for name, value in self.arguments.items()
            if getattr(args, name, None) != value
        ]
        covered = {*self.arguments, "padded_vocab_size"}
        for rule in self.rules:
            covered.update(rule.names)
        if getattr(args, "spec", None):
            problems.append(f"spec is {args.spec}: layers of a program's own")
        for argument in ARGUMENTS:
            if argument.name in covered or not argument.in_outputs or not argument.counts(args):
                continue
            value = getattr(args, argument.name)
            if value != argument.default:
                problems.append(f"{argument.name} is {value} instead of {argument.default}")
        if problems:
            return {}, problems
        config: Config = {}
        for rule in self.rules:
            config |= rule.write(args, problems)
        return config, problems

    @property
    def keys(self) -> set[str]:
        """Keys of the config that its rules write, or that follow from those."""
        keys: set[str] = set()
        return keys.union(*(rule.keys for rule in self.rules))


def _in_layer(
    rows: tuple[TensorRow, ...], args: argparse.Namespace, number: int, ours: str, theirs: str
) -> Iterator[Pairing]:
    """Yield the tensors of one layer.

    Args:
        rows: of the layer.
        args: of the model.
        number: of the layer.
        ours: beginning of our names.
        theirs: beginning of their names.
    """
    for row in rows:
        if not row.where(args, number):
            continue
        for expert in range(args.num_experts) if "{expert}" in row.ours else [0]:
            names = tuple(theirs + name.format(expert=expert) for name in row.theirs.split())
            yield Pairing(ours + row.ours.format(expert=expert), names, row.rearrangement)
