# SPDX-License-Identifier: Apache-2.0
"""Runs of transformers' Trainer on tiny models, in a rank of the pool or in the test process."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

VOCABULARY, LENGTH, SAMPLES = 41, 12, 32


@contextmanager
def fresh_accelerate() -> Iterator[None]:
    """Forget accelerate's shared state, inside and after: each job of a rank is a program."""
    from accelerate.state import AcceleratorState, GradientState

    def reset() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

    reset()
    try:
        yield
    finally:
        reset()


def build_llama(
    tied: bool = False, dtype: torch.dtype = torch.float32, end: int | None = 2
) -> nn.Module:
    """Build two layers with grouped queries and random weights, the same at every call.

    Sizes are odd where the architecture allows it. `end` is the token that ends sequences.
    """
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=12,
        intermediate_size=21,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=end,
    )
    torch.manual_seed(7)
    return transformers.LlamaForCausalLM(config).to(dtype)


def build_lora() -> nn.Module:
    """Build LoRA adapters, which are not zero, on a frozen model."""
    import peft

    settings = peft.LoraConfig(r=3, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(build_llama(), settings)
    torch.manual_seed(8)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


def build_t5() -> nn.Module:
    """Build an encoder and a decoder of one layer each."""
    import transformers

    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=12,
        d_kv=6,
        d_ff=20,
        num_layers=1,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=2,
    )
    torch.manual_seed(7)
    model = transformers.T5ForConditionalGeneration(config)
    model.generation_config.max_length = LENGTH  # to which the trainer pads
    return model


class Sequences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sequences of tokens that count on, of several lengths behind padding that has no loss."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = 3 + (torch.arange(LENGTH) * (1 + index % 3) + index) % (VOCABULARY - 3)
        labels = tokens.clone()
        labels[LENGTH - index % 5 :] = -100
        return {"input_ids": tokens, "labels": labels}


def training_arguments(folder: Path, kind: str = "TrainingArguments", **settings: Any) -> Any:
    """Return arguments for six steps of two samples a rank."""
    import transformers

    defaults = {
        "output_dir": str(folder),
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "max_steps": 6,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 3,
    }
    return getattr(transformers, kind)(**{**defaults, **settings})


def values(trainer: Any, name: str) -> list[float]:
    """Return the logged values of one name, in order."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights of a plain or sharded model, under the names of the innermost module."""
    from megatron.huggingface.states import whole_state_dict
    from megatron_fsdp import MegatronFSDP

    if isinstance(model, MegatronFSDP):
        return whole_state_dict(model)
    state = {key.removeprefix("module."): value for key, value in model.state_dict().items()}
    return {key: value.detach().clone() for key, value in state.items()}


def largest_difference(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """Return the largest difference of two models' weights, inf if they have other names."""
    if set(left) != set(right):
        return float("inf")
    return max((left[key].double() - right[key].double()).abs().max().item() for key in left)


def on_first_rank() -> bool:
    return dist.get_rank() == 0
