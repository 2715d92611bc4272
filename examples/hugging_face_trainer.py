# SPDX-License-Identifier: Apache-2.0
"""transformers' Trainer with a fully sharded model, on CPU or GPU.

    torchrun --nproc_per_node 2 examples/hugging_face_trainer.py --output-dir out

Only the class of the trainer differs from a program for one device. Run it again, with more
`--max-steps`, and it continues from its last checkpoint, also on another number of ranks.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

from megatron_fsdp.huggingface import ShardedTrainer

VOCABULARY, LENGTH = 64, 16


class CountingSequences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sequences of tokens that count on in steps of one to three."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return tokens, int64 (length), which are the labels too."""
        tokens = (index + torch.arange(LENGTH) * (1 + index % 3)) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


def build(name: str | None) -> PreTrainedModel:
    """Load a model by name or folder, or build a small one."""
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name)
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
    """Train, evaluate, generate, and save a model that `from_pretrained` loads."""
    parser = argparse.ArgumentParser(description="Fine-tune a model with transformers' Trainer.")
    parser.add_argument("--model", help="name or folder of a model; otherwise a small one is built")
    parser.add_argument("--output-dir", default="trainer_output")
    parser.add_argument("--max-steps", type=int, default=60)
    options = parser.parse_args()
    os.makedirs(options.output_dir, exist_ok=True)  # on every rank, before it looks for checkpoints

    args = TrainingArguments(
        output_dir=options.output_dir,
        max_steps=options.max_steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=5,
        max_grad_norm=1.0,
        bf16=True,
        logging_steps=20,
        eval_strategy="steps",
        eval_steps=20,
        save_steps=20,
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = ShardedTrainer(
        build(options.model),
        args,
        train_dataset=CountingSequences(2048),
        eval_dataset=CountingSequences(64),
        sharding={"zero_dp_strategy": "optim_grads_params"},
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(options.output_dir))

    prompt = CountingSequences(8)[2 + dist.get_rank()]["input_ids"][None, :4].to(args.device)
    # Every rank has a prompt of its own; `synced_gpus` lets ranks that are done wait for others.
    tokens = trainer.model.generate(prompt, max_new_tokens=6, do_sample=False, synced_gpus=True)
    print(f"rank {dist.get_rank()}: {prompt[0].tolist()} goes on {tokens[0, 4:].tolist()}")

    trainer.save_model()
    dist.barrier()  # the first rank has written the files
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
