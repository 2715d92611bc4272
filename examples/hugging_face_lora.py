# SPDX-License-Identifier: Apache-2.0
"""LoRA with PEFT and transformers' Trainer on a fully sharded model, on CPU or GPU.

    torchrun --nproc_per_node 2 examples/hugging_face_lora.py

The frozen base is sharded over the ranks; only adapters have gradients and optimizer state, and
only they are saved. The program loads them with PEFT and compares the evaluation.
"""

import argparse

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from megatron_fsdp.huggingface import ShardedTrainer

VOCABULARY, LENGTH = 64, 16


class SteppingSequences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sequences of tokens that count on in steps of three."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return tokens, int64 (length), which are the labels too."""
        tokens = (index + torch.arange(LENGTH) * 3) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


def build_base() -> LlamaForCausalLM:
    """Build a small model, in practice `AutoModelForCausalLM.from_pretrained(...)`."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def main() -> None:
    """Train adapters, save them, and load them onto the base model again."""
    parser = argparse.ArgumentParser(description="Train LoRA adapters on a sharded model.")
    parser.add_argument("--output-dir", default="lora_output")
    folder = parser.parse_args().output_dir

    adapters = LoraConfig(
        r=8, lora_alpha=32, target_modules="all-linear", modules_to_save=["lm_head"]
    )
    args = TrainingArguments(
        output_dir=folder,
        max_steps=60,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        logging_steps=20,
        save_steps=60,
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    data = SteppingSequences(512)
    model = get_peft_model(build_base(), adapters)
    trainer = ShardedTrainer(model, args, train_dataset=data, eval_dataset=data)
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model(f"{folder}/adapters")
    dist.barrier()  # the first rank has written the files

    if dist.get_rank() == 0:
        loaded = PeftModel.from_pretrained(build_base(), f"{folder}/adapters").eval()
        batch = torch.stack([sample["input_ids"] for sample in map(data.__getitem__, range(512))])
        with torch.no_grad():
            again = loaded(input_ids=batch, labels=batch).loss.item()
        print(f"evaluation {loss:.4f}, with the adapters loaded by PEFT {again:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
