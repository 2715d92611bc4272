# SPDX-License-Identifier: Apache-2.0
"""The buffers in which Transformer Engine overlaps tensor-parallel communication with products."""

from __future__ import annotations

import argparse
import importlib
import inspect
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

MODULE = "transformer_engine.pytorch.module.base"


def start(args: argparse.Namespace) -> None:
    """Make the buffers of --tp-comm-overlap; a collective of the tensor-parallel ranks.

    Args:
        args: the completed arguments. ``tp_comm_overlap_cfg`` names a YAML file with settings of
            single products, which Transformer Engine documents.
    """
    base = importlib.import_module(MODULE)
    settings: dict[str, Any] = {}
    if args.tp_comm_overlap_cfg:
        settings = yaml.safe_load(Path(args.tp_comm_overlap_cfg).read_text()) or {}
    tokens = args.seq_length * args.micro_batch_size // args.context_parallel_size
    options = {
        "shape": [tokens, args.hidden_size],
        "tp_size": args.tensor_model_parallel_size,
        "ub_cfgs": settings,
        "bootstrap_backend": args.tp_comm_bootstrap_backend,
    }
    if "quantization_modes" in inspect.signature(base.initialize_ub).parameters:
        options["quantization_modes"] = [base.UserBufferQuantizationMode.NONE]
    else:
        options["use_fp8"] = False  # Transformer Engine before 2.7
    base.initialize_ub(**options)
