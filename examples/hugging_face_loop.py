# SPDX-License-Identifier: Apache-2.0
"""A training loop with accelerate and a fully sharded model of transformers, on CPU or GPU.

    torchrun --nproc_per_node 2 examples/hugging_face_loop.py

Only the class of the accelerator differs from a loop for DDP. The model learns to continue
sequences that count on. The program saves its state, continues from it, and saves a model that
`from_pretrained` loads.
"""

import argparse

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

from megatron_fsdp.huggingface import ShardedAccelerator

VOCABULARY, LENGTH, STEPS = 64, 16, 60


def build() -> LlamaForCausalLM:
    """Build a small model, the same on every rank."""
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


def sequences(count: int) -> list[dict[str, torch.Tensor]]:
    """Return samples of tokens, int64 (length), which are the labels too."""
    samples = []
    for index in range(count):
        tokens = (index + torch.arange(LENGTH) * (1 + index % 3)) % VOCABULARY
        samples.append({"input_ids": tokens, "labels": tokens})
    return samples


def main() -> None:
    """Train, save the state, load it, evaluate, and save the whole model."""
    parser = argparse.ArgumentParser(description="Train a small model in a loop of accelerate.")
    parser.add_argument("--output-dir", default="loop_output")
    folder = parser.parse_args().output_dir

    accelerator = ShardedAccelerator(
        mixed_precision="bf16",
        gradient_accumulation_steps=2,
        sharding={"zero_dp_strategy": "optim_grads_params"},
    )
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 5, STEPS * accelerator.num_processes)
    loader = DataLoader(sequences(2048), batch_size=8, shuffle=True)
    held_out = DataLoader(sequences(64), batch_size=8)
    model, optimizer, loader, held_out, scheduler = accelerator.prepare(
        model, optimizer, loader, held_out, scheduler
    )

    model.train()
    for step, batch in zip(range(2 * STEPS), loader):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if step % 20 == 19:
            mean = accelerator.reduce(loss.detach(), "mean")
            accelerator.print(f"batch {step + 1:3d}  loss {mean.item():.4f}")

    accelerator.save_state(f"{folder}/state")  # every rank writes its shards
    accelerator.load_state(f"{folder}/state")  # also on another number of ranks

    model.eval()
    losses = []
    with torch.no_grad():
        for batch in held_out:
            losses.append(accelerator.gather_for_metrics(model(**batch).loss[None]))
    accelerator.print(f"evaluation  loss {torch.cat(losses).mean().item():.4f}")

    accelerator.unwrap_model(model).save_pretrained(
        f"{folder}/model",
        state_dict=accelerator.get_state_dict(model),
        is_main_process=accelerator.is_main_process,
    )
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
