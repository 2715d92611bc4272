# SPDX-License-Identifier: Apache-2.0
"""The sizes, the layout and the software of a published run, as the row states them.

[Note: software of frameworks] A row names its framework. What its documentation or its code states,
is a property of the software: whether kernels are fused, which attention it calls, what overlaps,
and in which dtypes gradients are kept. Numbers that no page has, such as the bytes of the loss, the
copies of heads and what the allocator reserves, are estimates. Most sources have one framework, so
a profile is little else than a choice for each source, made with its errors in view: no
cross-validation can test it.

[Note: words of a row] Where fields are texts, these words in them are read:

    hardware.gpu           "limit 500 W": of its power
    hardware.inside        "900 GB/s": of its links in both directions
    model.norm             begins with "RMS": RMSNorm, otherwise LayerNorm
    model.position         "rope", otherwise learned
    model.window_layers    begins with "every o", as "every other": half of the layers have it
    precision              one of bf16, fp16, fp32, fp8, mxfp8, nvfp4
    framework              a name of ``FRAMEWORKS`` in it
    strategy, recompute_note, notes (any of them)
        "async TP" or "asynchronous TP"       messages of tensor parallelism overlap
        "no fused attention"                  scores are in memory
        "without sequence parallelism"        norms and residuals are not divided
        "with one layer that predicts a second token"  unless not_stated has "further tokens"
    recompute_note of selective recomputation
        "every second layer"                  half of the layers, whole
        "one matrix product in two"           torchtitan's
        "latent", "mlp"                       what these names mean; otherwise the core of attention
    measured.memory_kind   "rank 0": the memory of the first stage, otherwise the most of all
"""

from __future__ import annotations

from dataclasses import replace

from megatron.planning.costs.layer_memory import (
    ATTENTION_CORE,
    FULL,
    LATENT,
    MLP,
    NONE,
    PRODUCTS,
)
from megatron.planning.costs.model_sizes import ExpertSizes, LatentSizes, ModelSizes, RunLayout
from megatron.planning.costs.software import COMPILED, EAGER, UNFUSED, Software
from megatron.planning.costs.update_bytes import ALL_BY_TORCH, CLIPPED_BY_TORCH, ONE_PASS
from megatron.planning.published.published_runs import PublishedRun
from megatron.planning.published.run_flags import (
    PRECISIONS,
    VOCABULARY_MULTIPLE,
    NotExpressibleError,
    micro_batch_of,
)

_MEGATRON = Software(loss_bytes=30, kept_logit_bytes=8, overlaps_tensor=True)
_TORCH_FSDP = Software(
    attention="flash2",
    fusion=EAGER,
    has_fused_norm=False,
    copies_of_heads=2,
    keeps_gathered=True,
    update_bytes=CLIPPED_BY_TORCH,
)

_COMPOSER = replace(
    _TORCH_FSDP, attention="triton2023", has_fused_norm=True, update_bytes=ALL_BY_TORCH
)
_XLA = Software(attention="cudnn", fusion=COMPILED, loss_bytes=12, kept_logit_bytes=8)

FRAMEWORKS: dict[str, Software] = {
    # User buffers overlap TP; gradients are kept in the dtype of their reduction.
    "nemo": _MEGATRON,
    # The same; the dispatcher of its recipes sends a token to a node once.
    "megatron-bridge": replace(
        _MEGATRON,
        loss_bytes=12,
        deduplicates_tokens=True,
        overlaps_exchange=True,
        reduce_bytes=2,
    ),
    # Unfused attention and no overlap: the release of arXiv:2205.05198.
    "megatron-lm": Software(
        attention="flash2", loss_bytes=70, overlaps_tensor=False, overlaps_data=False
    ),
    "megatron": _MEGATRON,
    "torchtitan": replace(_TORCH_FSDP, reserves=1.03),
    # llm-foundry: Triton's attention, norms in low precision, gelu.
    "composer": _COMPOSER,
    "llm-foundry": _COMPOSER,
    # FlashAttention, its RMSNorm in Triton; gradients accumulate in fp32 by hooks.
    "nanotron": Software(
        attention="flash2",
        fusion=EAGER,
        loss_bytes=70,
        overlaps_data=False,
        copies_of_heads=5,
        keeps_gathered=True,
        balances_stages=True,
        update_bytes=ALL_BY_TORCH,
    ),
    "maxtext": _XLA,
    "jax": _XLA,
    "axlearn": _XLA,
    "levanter": _XLA,
    # Its own kernels: DeepGEMM, DeepEP, a bidirectional pipeline.
    "deepseek": replace(_MEGATRON, deduplicates_tokens=True, overlaps_exchange=True),
    "deepspeed": _TORCH_FSDP,
    # This library, in a loop that does not clip: one kernel over flat segments.
    "fully_shard": replace(_TORCH_FSDP, keeps_gathered=False, update_bytes=ONE_PASS),
    "megatron-deepspeed": Software(attention="flash2", loss_bytes=70),
}
"""What frameworks do, by the begin of their names; see [Note: software of frameworks]."""


def software_of(run: PublishedRun, profile: Software | None = None) -> Software:
    """Return the software of a run.

    Args:
        run: the published run.
        profile: what its framework does; None: that of ``FRAMEWORKS``.
    """
    name = str(run["framework"]).lower()
    software = profile or profile_of(name)
    software = replace(software, imbalance=run.get("expert_imbalance", 1.0))
    notes = run.notes.lower()
    needs_compiler = name == "torchtitan" and run["precision"] == "fp8"
    if run.get("compile", needs_compiler):
        software = replace(
            software,
            fusion=COMPILED,
            copies_of_heads=0.5,
            loss_bytes=12,
            kept_logit_bytes=12,
        )
    if "no fused attention" in notes:
        software = replace(software, attention=UNFUSED)
    if "async tp" in notes or "asynchronous tp" in notes:
        software = replace(software, overlaps_tensor=True)
    if run["precision"] == "fp32":
        software = replace(software, compute_bytes=4, weight_bytes=4, gather_bytes=4)
    elif run["precision"] not in ("bf16", "fp16"):
        software = replace(software, uses_fp8=True)
        if software.fusion == COMPILED:  # torchtitan's float8 casts weights before their gather
            software = replace(software, gather_bytes=1)
    if name == "megatron-bridge" and str(run.hardware["kind"]).startswith("gb"):
        software = replace(software, uses_graphs=True)  # as its recipes have it on GB200 and GB300
    reduction = run.get("gradient_reduction")
    if reduction == "fp32":
        software = replace(software, reduce_bytes=4)
    elif reduction is not None:
        software = replace(software, reduce_bytes=2)
    if run.get("zero_level", 0) < 3:
        # Megatron-Core keeps gradients in the dtype in which it reduces them.
        software = replace(software, gradient_bytes=software.reduce_bytes)
    return software


def profile_of(framework: str) -> Software:
    """Return what a framework does, by the longest name that is known in its own."""
    profile = _TORCH_FSDP
    longest = 0
    for known, software in FRAMEWORKS.items():
        if known in framework and len(known) > longest:
            profile = software
            longest = len(known)
    return profile


def sizes_of(run: PublishedRun) -> ModelSizes:
    """Return the sizes of the model of a run."""
    model = run.model
    experts = latent = None
    dense_layers = model["layers"]
    if model.get("moe"):
        moe = model["moe"]
        experts = ExpertSizes(
            number=moe["experts"],
            top_k=moe["top_k"],
            width=moe["expert_ffn"],
            shared_width=moe.get("shared_ffn") or 0,
        )
        dense_layers = moe.get("dense_first_layers") or 0
    if model.get("mla"):
        mla = model["mla"]
        latent = LatentSizes(
            query_rank=mla.get("q_lora") or 0,
            key_rank=mla["kv_lora"],
            head=mla["qk_head"],
            rotary=mla["qk_rope_head"],
            value=mla["v_head"],
        )
    multiple = VOCABULARY_MULTIPLE * run["tp"]
    window = 0
    if str(model.get("window_layers") or "").startswith("every o"):
        window = model.get("window") or 0
    return ModelSizes(
        layers=model["layers"],
        dense_layers=dense_layers,
        hidden=model["hidden"],
        ffn=model.get("ffn") or 0,
        heads=model["heads"],
        key_heads=model["kv_heads"],
        head=model.get("head_dim") or model["hidden"] // model["heads"],
        vocabulary=-(-model["vocab"] // multiple) * multiple,
        sequence=model["seq_length"],
        is_gated=bool(model["gated"]),
        is_rms=str(model.get("norm", "RMSNorm")).startswith("RMS"),
        is_rotary=model.get("position", "rope") == "rope",
        is_tied=bool(model.get("tied")),
        experts=experts,
        latent=latent,
        window=window,
        has_query_norm=bool(model.get("qk_norm")),
        predicted_tokens=predicted_tokens_of(run),
    )


def predicted_tokens_of(run: PublishedRun) -> int:
    """Return the number of layers that predict further tokens, by the notes of a row."""
    for entry in run.get("not_stated", ()):
        if "further tokens" in str(entry):
            return 0
    return int("with one layer that predicts a second token" in run.notes)


def mesh_of(run: PublishedRun) -> RunLayout:
    """Return the layout of a run.

    Raises:
        NotExpressibleError: names what the row lacks.
    """
    if run["precision"] not in PRECISIONS:
        raise NotExpressibleError(
            f"precision {run['precision']} is none of {', '.join(PRECISIONS)}"
        )
    level = run.get("zero_level", 0)
    expert_tensor = run.get("etp")
    if expert_tensor is None:
        expert_tensor = 1
        if run.model.get("moe"):
            expert_tensor = run["tp"]
    return RunLayout(
        gpus=run["gpus"],
        tensor=run["tp"],
        pipeline=run["pp"],
        virtual=run.get("vpp", 1),
        context=run["cp"],
        expert=run["ep"],
        expert_tensor=expert_tensor,
        level=level,
        copies=run.get("shard_copies", 1),
        micro_batch=micro_batch_of(run),
        global_batch=run["global_batch"],
        is_sequence_parallel=has_sequence_parallelism(run),
        is_fsdp=level >= 2,
    )


def has_sequence_parallelism(run: PublishedRun) -> bool:
    """Return True if tensor ranks divide the sequence in norms and residuals."""
    if "without sequence parallelism" in run.notes:
        return False
    has_ranks: bool = run["tp"] > 1
    return bool(run.get("sp", has_ranks))


SELECTIVE = {"one matrix product in two": PRODUCTS, "latent": LATENT, "mlp": MLP}
"""Words of a row about its selective recomputation; otherwise it is that of attention's core."""


def recompute_of(run: PublishedRun) -> tuple[str, float] | None:
    """Return the recomputation of a run, and the part of layers that have it; None: unknown."""
    note = str(run.get("recompute_note", "")).lower()
    way = run["recompute"]
    if way == "unknown":
        return None
    if way in (NONE, FULL):
        return str(way), 1.0
    if "every second layer" in note:
        return FULL, 0.5
    for words, found in SELECTIVE.items():
        if words in note:
            return found, 1.0
    return ATTENTION_CORE, 1.0
