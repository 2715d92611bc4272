# SPDX-License-Identifier: Apache-2.0
"""Rules of --hybrid-layer-pattern, which brings a HybridModel instead of a GPTModel."""

import importlib.util
from typing import Any

import megatron.core

from megatron.pretrain.arguments.check import Check
from megatron.pretrain.arguments.flags import as_written

LAYERS = {"*": "attention", "-": "MLP", "E": "experts", "M": "Mamba"}
OF_GPT = """spec qk_layernorm qk_l2_norm multi_latent_attention mtp_num_layers use_rope_scaling
    pipeline_model_parallel_size dry_run"""
"""Destinations of flags that are not built for a HybridModel, or that it would ignore."""
PACKAGES_OF_MAMBA = ("mamba_ssm", "causal_conv1d", "einops")


def follow_pattern(check: Check) -> None:
    """Derive from a pattern the number of layers, and which of them have experts."""
    args, pattern = check.args, check.args.hybrid_layer_pattern
    if pattern is None:
        return
    flag = f"--hybrid-layer-pattern {pattern}"
    check_layers(check, flag, pattern)
    others = [check.flag(d) for d in OF_GPT.split() if d in check.given and check.changed(d)]
    check.require(not others, f"{', '.join(others)}: not built for HybridModel; leave it out")
    check.require(
        ("E" in pattern) == (args.num_experts is not None),
        f"{flag} needs --num-experts" if "E" in pattern else f"--num-experts needs E in {flag}",
    )
    check.require(
        not args.use_megatron_fsdp or check.given.get("ckpt_format") != "torch_dist",
        f"{flag}: --use-megatron-fsdp writes no torch_dist of it; use --ckpt-format fsdp_dtensor",
    )
    derived: dict[str, Any] = {"num_layers": len(pattern)}
    if "E" in pattern:
        derived["moe_layer_freq"] = [int(letter == "E") for letter in pattern]
    for dest, value in derived.items():
        given = check.given.get(dest)
        check.require(
            given in (None, value, check.defaults[dest]),
            f"{check.flag(dest)} {as_written(given)} contradicts {flag}: leave it out",
        )
        setattr(args, dest, value)


def check_layers(check: Check, flag: str, pattern: str) -> None:
    """Refuse unknown layers, and layers whose packages are missing."""
    known = ", ".join(f"{letter} ({name})" for letter, name in LAYERS.items())
    check.require(
        pattern and set(pattern) <= LAYERS.keys(),
        f"{flag}: layers can be {known}; other letters, pipeline stages (|) and multi-token"
        " prediction (/) are not built",
    )
    try:
        importlib.import_module("megatron.core.models.hybrid.hybrid_model")
    except ImportError as error:
        check.problems.append(
            f"{flag}: HybridModel needs Megatron-Core 0.18 or newer, and triton; with"
            f" {megatron.core.__version__}: {error}"
        )
    machine = check.machine
    missing = [name for name in PACKAGES_OF_MAMBA if importlib.util.find_spec(name) is None]
    if not machine.cuda or not machine.transformer_engine or check.args.transformer_impl == "local":
        missing.append("GPUs with layers of Transformer Engine")
    check.require(
        "M" not in pattern or not missing, f"{flag}: Mamba layers need {', '.join(missing)}"
    )
