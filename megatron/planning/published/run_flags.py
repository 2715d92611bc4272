# SPDX-License-Identifier: Apache-2.0
"""The flags of ``pretrain_gpt.py`` that ask for the model and the layout of a published run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron.planning.candidates import Candidate, layers_of_ends
from megatron.planning.published.published_runs import PublishedRun

VOCABULARY_MULTIPLE = 128
"""Megatron-Core's vocabularies have a multiple of this, times the tensor-parallel ranks."""


PRECISIONS = ("bf16", "fp16", "fp32", "fp8", "mxfp8", "nvfp4")
"""Precisions of compute that are planned: those of fewer than 16 bits as FP8."""


class NotExpressibleError(ValueError):
    """A run that the flags cannot ask for."""


def flags_of(run: PublishedRun) -> list[str]:
    """Return the flags of a run.

    Raises:
        NotExpressibleError: names what no flag asks for.
    """
    return [*_flags_of_model(run), *candidate_of(run).flags(has_experts=bool(run.model.get("moe")))]


def candidate_of(run: PublishedRun) -> Candidate:
    """Return the layout of a run.

    Raises:
        NotExpressibleError: names what no flag asks for.
    """
    micro_batch = micro_batch_of(run)
    num_layers = run.model["layers"]
    ends = None
    if num_layers % run["pp"]:
        ends = layers_of_ends(num_layers, run["pp"])
        if ends == (0, 0):
            raise NotExpressibleError(f"{run['pp']} stages cannot share {num_layers} layers")
    return Candidate(
        tensor=run["tp"],
        pipeline=run["pp"],
        context=run["cp"],
        expert=run["ep"],
        level=run.get("zero_level", 0),
        outer=run.get("shard_copies", 1),
        recomputes=run["recompute"] == "full",
        micro_batch=micro_batch,
        layers_of_ends=ends,
    )


def micro_batch_of(run: PublishedRun) -> int:
    """Return the sequences of a microbatch of a run.

    Raises:
        NotExpressibleError: if they are not published, or do not divide the batch.
    """
    micro_batch: int | None = run.get("micro_batch")
    if micro_batch is None:
        raise NotExpressibleError("the sequences of a microbatch are not published")
    if run["global_batch"] % (micro_batch * run["dp"]):
        raise NotExpressibleError(
            f"{run['dp']} data ranks with {micro_batch} sequences do not divide"
            f" {run['global_batch']}"
        )
    return micro_batch


def _flags_of_model(run: PublishedRun) -> Iterator[str]:
    """Yield the flags of the model of a run."""
    model = run.model
    sizes = {
        "--num-layers": model["layers"],
        "--hidden-size": model["hidden"],
        "--num-attention-heads": model["heads"],
        "--seq-length": model["seq_length"],
        "--max-position-embeddings": model["seq_length"],
        "--vocab-size": model["vocab"],
        "--make-vocab-size-divisible-by": VOCABULARY_MULTIPLE,
        "--global-batch-size": run["global_batch"],
        "--ffn-hidden-size": model.get("ffn") or model["moe"]["expert_ffn"],
    }
    if model.get("head_dim") and not model.get("mla"):
        sizes["--kv-channels"] = model["head_dim"]
    if model["kv_heads"] != model["heads"]:
        yield "--group-query-attention"
        sizes["--num-query-groups"] = model["kv_heads"]
    yield from _words(sizes)
    if model["gated"]:
        yield "--swiglu"
    elif model.get("activation") == "squared_relu":
        yield "--squared-relu"
    if not model.get("bias") or model.get("moe"):
        yield "--disable-bias-linear"
    norm = "LayerNorm"
    if str(model.get("norm") or "").startswith("RMS"):
        norm = "RMSNorm"
    yield from ("--normalization", norm)
    position = "learned_absolute"
    if (model.get("position") or "rope") == "rope":
        position = "rope"
    yield from ("--position-embedding-type", position)
    if not model.get("tied") or run["pp"] > 1:
        yield "--untie-embeddings-and-output-weights"
    if run["precision"] == "fp16":
        yield "--fp16"
    elif run["precision"] != "fp32":
        yield "--bf16"
    yield from ("--attention-dropout", "0", "--hidden-dropout", "0")
    yield from ("--lr", "1e-4", "--train-iters", "1000", "--mock-data")
    if model.get("mla"):
        yield from _flags_of_latents(model["mla"])
    if model.get("moe"):
        yield from _flags_of_experts(model["moe"], model["layers"])


def _flags_of_latents(latent: Mapping[str, Any]) -> Iterator[str]:
    """Yield the flags of multi-latent attention."""
    yield "--multi-latent-attention"
    sizes = {
        "--q-lora-rank": latent.get("q_lora"),
        "--kv-lora-rank": latent["kv_lora"],
        "--qk-head-dim": latent["qk_head"],
        "--qk-pos-emb-head-dim": latent["qk_rope_head"],
        "--v-head-dim": latent["v_head"],
    }
    yield from _words(sizes)


def _flags_of_experts(experts: Mapping[str, Any], num_layers: int) -> Iterator[str]:
    """Yield the flags of layers with experts."""
    dense = experts.get("dense_first_layers") or 0
    sizes = {
        "--num-experts": experts["experts"],
        "--moe-router-topk": experts["top_k"],
        "--moe-ffn-hidden-size": experts["expert_ffn"],
        "--moe-shared-expert-intermediate-size": experts.get("shared_ffn"),
        "--moe-layer-freq": f"[0]*{dense}+[1]*{num_layers - dense}",
        "--moe-token-dispatcher-type": "alltoall",
    }
    yield from _words(sizes)


def _words(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield flags with their values, but for those that are missing, null or 0."""
    for flag, value in values.items():
        if value:
            yield flag
            yield str(value)
