# SPDX-License-Identifier: Apache-2.0
"""A program for Megatron-LM's loop in Megatron-Core's wheels, which have the loop alone.

It is started like `pretrain_gpt.py` of a checkout, with the same flags; --hybrid-layer-pattern
(0.19) brings a HybridModel. Data are random tokens, which every rank makes
by itself.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)
from megatron.training import argument_utils, arguments, get_args, pretrain
from torch import Tensor
from torch.utils.data import Dataset

from megatron.mcore_adapter.releases.process_groups import batch_on_this_rank


class RandomTokens(Dataset):
    """Samples that follow from their index."""

    def __init__(self, num_samples: int, length: int, vocab_size: int):
        self._num_samples, self._length, self._vocab_size = num_samples, length, vocab_size

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(self._vocab_size, (self._length + 1,), generator=generator)
        square = torch.ones(1, self._length, self._length, dtype=torch.bool)
        return {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "loss_mask": torch.ones(self._length),
            "position_ids": torch.arange(self._length),
            "attention_mask": square.triu(diagonal=1),
        }


def build_datasets(
    num_samples: Sequence[int], vp_stage: int | None = None
) -> list[RandomTokens | None]:
    args = get_args()
    return [
        RandomTokens(each, args.seq_length, args.vocab_size) if each else None
        for each in num_samples
    ]


build_datasets.is_distributed = True  # every rank calls it


def build_model(
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> GPTModel:
    """Build the model for loops before 0.19, which have no builder of their own."""
    args = get_args()
    home = argument_utils if hasattr(argument_utils, MODEL_CONFIG) else arguments
    config = getattr(home, MODEL_CONFIG)(args)
    return GPTModel(
        config,
        get_gpt_decoder_block_spec(
            config,
            use_transformer_engine=args.transformer_impl == "transformer_engine",
            normalization=args.normalization,
            vp_stage=vp_stage,
        ),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def hybrid_stack(num_experts: int | None, normalization: str) -> ModuleSpec:
    """Return the layers of a HybridModel but for Mamba's, by local classes."""
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer

    dense, sparse = (
        get_gpt_layer_local_spec(each, normalization=normalization).submodules
        for each in (None, num_experts)
    )
    nothing = TransformerLayerSubmodules()
    no_attention = {name: getattr(nothing, name) for name in ATTENTION}
    no_mlp = {name: getattr(nothing, name) for name in MLP}
    return ModuleSpec(
        HybridStack,
        submodules=HybridStackSubmodules(
            attention_layer=ModuleSpec(TransformerLayer, submodules=replace(dense, **no_mlp)),
            mlp_layer=ModuleSpec(MLPLayer, submodules=replace(dense, **no_attention)),
            moe_layer=ModuleSpec(TransformerLayer, submodules=replace(sparse, **no_attention)),
        ),
    )


ATTENTION = ("input_layernorm", "self_attention", "self_attn_bda")
MLP = ("pre_mlp_layernorm", "mlp", "mlp_bda")
MODEL_CONFIG = "core_transformer_config_from_args"


def forward_step(
    data: Iterator[dict[str, Tensor]], model: GPTModel
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]]:
    batch = batch_on_this_rank(next(data))

    def loss(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        total = torch.sum(losses.float() * batch["loss_mask"])
        tokens = batch["loss_mask"].sum().to(torch.int)
        return total, tokens, {"lm loss": torch.stack([total.detach().clone(), tokens.float()])}

    words = (batch[name] for name in ("tokens", "position_ids", "attention_mask"))
    return model(*words, labels=batch["labels"]), loss


def main() -> None:
    settings: dict[str, Any] = {}
    if hasattr(argument_utils, "pretrain_cfg_container_from_args"):
        args = arguments.parse_and_validate_args()
        of_model = getattr(argument_utils, "gpt_config_from_args", lambda args: None)(args)
        if args.hybrid_layer_pattern is not None:
            of_model = argument_utils.hybrid_config_from_args(args)
            of_model.hybrid_stack_spec = hybrid_stack(args.num_experts, args.normalization)
        settings["cfg_container"] = argument_utils.pretrain_cfg_container_from_args(args, of_model)
    pretrain(
        train_valid_test_dataset_provider=build_datasets,
        model_provider=build_model,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=forward_step,
        **settings,
    )


if __name__ == "__main__":
    main()
