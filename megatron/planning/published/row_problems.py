# SPDX-License-Identifier: Apache-2.0
"""The fields of a row of a file of published runs, and everything that is wrong with one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_positive(value: Any) -> bool:
    return _is_whole(value) and value > 0


def _is_count(value: Any) -> bool:
    return _is_whole(value) and value >= 0


def _is_measure(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value < inf


def _is_factor(value: Any) -> bool:
    return _is_measure(value) and value >= 1


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


@dataclass(frozen=True)
class Kind:
    """A kind of value.

    Args:
        words: for messages: what is expected.
        is_valid: returns True for a value of this kind.
    """

    words: str
    is_valid: Callable[[Any], bool]


WHOLE = Kind("a whole number above 0", _is_positive)
COUNT = Kind("a whole number of at least 0", _is_count)
MEASURE = Kind("a number above 0", _is_measure)
FACTOR = Kind("a number of at least 1", _is_factor)
TEXT = Kind("a text", _is_text)
FLAG = Kind("true or false", _is_flag)
OBJECT = Kind("an object", _is_object)
LIST = Kind("a list", _is_list)


def one_of(*choices: Any) -> Kind:
    """Return the kind of these values alone."""
    words = ", ".join(str(choice) for choice in choices)
    return Kind(f"one of {words}", choices.__contains__)


NEEDED: dict[str, Kind] = {
    "id": TEXT,
    "source": OBJECT,
    "source.title": TEXT,
    "hardware": OBJECT,
    "hardware.kind": TEXT,
    "hardware.gpus_per_node": WHOLE,
    "model": OBJECT,
    "model.seq_length": WHOLE,
    "model.layers": WHOLE,
    "model.hidden": WHOLE,
    "model.heads": WHOLE,
    "model.kv_heads": WHOLE,
    "model.vocab": WHOLE,
    "model.gated": FLAG,
    "model.moe.experts": WHOLE,
    "model.moe.top_k": WHOLE,
    "model.moe.expert_ffn": WHOLE,
    "model.mla.kv_lora": WHOLE,
    "model.mla.qk_head": WHOLE,
    "model.mla.qk_rope_head": WHOLE,
    "model.mla.v_head": WHOLE,
    "gpus": WHOLE,
    "tp": WHOLE,
    "pp": WHOLE,
    "cp": WHOLE,
    "ep": WHOLE,
    "dp": WHOLE,
    "global_batch": WHOLE,
    "framework": TEXT,
    "precision": TEXT,
    "recompute": one_of("none", "selective", "full", "unknown"),
    "measured": OBJECT,
}
"""Fields that a row has, or an object in it where there is this object."""

OPTIONAL: dict[str, Kind] = {
    "hardware.gpu": TEXT,
    "hardware.inside": TEXT,
    "hardware.memory_gb": MEASURE,
    "hardware.memory_tb_per_s": MEASURE,
    "hardware.between_gbit_per_s_per_gpu": MEASURE,
    "hardware.nvlink_domain": WHOLE,
    "model.ffn": WHOLE,
    "model.head_dim": WHOLE,
    "model.window": WHOLE,
    "model.window_layers": TEXT,
    "model.activation": TEXT,
    "model.norm": TEXT,
    "model.position": TEXT,
    "model.bias": FLAG,
    "model.tied": FLAG,
    "model.qk_norm": FLAG,
    "model.moe": OBJECT,
    "model.moe.shared_ffn": COUNT,
    "model.moe.dense_first_layers": COUNT,
    "model.mla": OBJECT,
    "model.mla.q_lora": COUNT,
    "micro_batch": WHOLE,
    "vpp": WHOLE,
    "etp": WHOLE,
    "shard_copies": WHOLE,
    "zero_level": one_of(0, 1, 2, 3),
    "sp": FLAG,
    "compile": FLAG,
    "expert_imbalance": FACTOR,
    "gradient_reduction": one_of("fp32", "bf16", "fp16"),
    "strategy": TEXT,
    "recompute_note": TEXT,
    "notes": TEXT,
    "not_stated": LIST,
    "measured.memory_gib": MEASURE,
    "measured.memory_kind": TEXT,
    "seconds_a_step": MEASURE,
    "tokens_per_second_per_gpu": MEASURE,
}
"""Fields that may be missing, or null."""


def problems_of(row: Any) -> Iterator[str]:
    """Yield everything that is wrong with one row."""
    if not isinstance(row, dict):
        yield "an object is expected"
        return
    wrong = _wrong_fields(row)
    yield from wrong.values()
    model = row.get("model")
    if isinstance(model, dict) and model.get("ffn") is None and model.get("moe") is None:
        yield "model lacks ffn"
    if row.get("seconds_a_step") is None and row.get("tokens_per_second_per_gpu") is None:
        yield "seconds_a_step or tokens_per_second_per_gpu is needed, above 0"
    if wrong.keys().isdisjoint(("gpus", "tp", "pp", "cp", "dp")):
        num_ranks = row["tp"] * row["pp"] * row["cp"] * row["dp"]
        if num_ranks != row["gpus"]:
            yield f"gpus is {row['gpus']}, but tp, pp, cp and dp are {num_ranks}"
    if wrong.keys().isdisjoint(("shard_copies", "cp", "dp")):
        copies = row.get("shard_copies") or 1
        if row["dp"] * row["cp"] % copies:
            yield f"shard_copies is {copies}, which does not divide the ranks of dp and cp"


def _wrong_fields(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields of a row whose values are not of their kinds, and what is wrong."""
    wrong: dict[str, str] = {}
    for path, kind in (NEEDED | OPTIONAL).items():
        names = path.split(".")
        owner = _value_of(row, names[:-1])
        if not isinstance(owner, dict):
            continue  # it is missing, or a problem of its own
        value = owner.get(names[-1])
        is_missing = value is None and path not in NEEDED
        if not is_missing and not kind.is_valid(value):
            wrong[path] = f"{path} expects {kind.words} but got {value!r}"
    return wrong


def _value_of(row: Mapping[str, Any], names: list[str]) -> Any:
    """Return a value by the names of the objects that it is in; None where it is missing."""
    value: Any = row
    for name in names:
        if not isinstance(value, dict):
            return None
        value = value.get(name)
    return value
