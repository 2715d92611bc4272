# SPDX-License-Identifier: Apache-2.0
"""torch_dist checkpoints as Megatron-Core writes them, and the optimizer state of its ranks.

Jobs for the rank pool.
"""

import itertools
import re
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import DistributedOptimizer

from megatron.checkpoint.core.spelling import plain_name

State = dict[str, dict[str, torch.Tensor]]
"""Slot -> name -> whole tensor. Main weights have the slot `param`."""

_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+")
_LAYER = re.compile(r"(?<=^decoder\.layers\.)\d+")


def write(command_line: str, layout: str | None = None) -> State | None:
    """Job: train and save; return the optimizer's state at the last save on the first rank.

    `layout` is one that Megatron-Core can write and the training program does not ask for.
    """
    from megatron.mcore_adapter.checkpoints import checkpointing, torch_dist_format
    from tests.support.pretrain.training_runs import pretrain

    states: list[State | None] = []
    original, metadata = checkpointing.save, torch_dist_format.metadata_of

    def save(args: Any, parts: Any, *rest: Any) -> None:
        original(args, parts, *rest)
        states.append(live_state(args, parts.model, parts.optimizer))

    def with_layout(*args: Any) -> dict[str, Any]:
        return metadata(*args) | ({"distrib_optim_sharding_type": layout} if layout else {})

    with (
        patch.object(checkpointing, "save", save),
        patch.object(torch_dist_format, "metadata_of", with_layout),
    ):
        pretrain(command_line)
    return states[-1]


def live_state(args: Any, model: list[Any], optimizer: Any) -> State | None:
    """Gather the optimizer's state of all ranks on the first one, without our reader."""
    chain = getattr(optimizer, "chained_optimizers", [optimizer])
    mine = [*itertools.chain.from_iterable(_pieces(args, model, inner) for inner in chain)]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return _whole(itertools.chain.from_iterable(everyone)) if dist.get_rank() == 0 else None


def _pieces(args: Any, model: list[Any], optimizer: Any) -> Iterator[dict[str, Any]]:
    """Yield this rank's flat range of its shard of every parameter."""
    names = {}
    for chunk in model:
        while hasattr(chunk, "module"):
            chunk = chunk.module
        numbers = [layer.layer_number - 1 for layer in chunk.decoder.layers]
        for name, parameter in chunk.named_parameters():
            names[parameter] = _global_name(args, plain_name(name), numbers)
    for parameter, start, stop, slots in _slots(optimizer):
        name = names[parameter]
        if name == "output_layer.weight" and not args.untie_embeddings_and_output_weights:
            name = "embedding.word_embeddings.weight"
        is_split = getattr(parameter, "tensor_model_parallel", False)
        is_expert = ".experts." in name
        yield {
            "name": name,
            "shape": tuple(parameter.shape),
            "dim": parameter.partition_dim if is_split else None,
            "slice": _slice(is_expert) if is_split else 0,
            "gated": args.swiglu and "linear_fc1" in name,
            "range": (start, stop),
            "slots": {slot: value.detach().clone().flatten() for slot, value in slots.items()},
        }


def _slice(is_expert: bool) -> int:
    if is_expert:
        return parallel_state.get_expert_tensor_parallel_rank()
    return parallel_state.get_tensor_model_parallel_rank()


def _global_name(args: Any, name: str, numbers: list[int]) -> str:
    name = _LAYER.sub(lambda found: str(numbers[int(found[0])]), name)
    first = parallel_state.get_expert_model_parallel_rank() * (
        (args.num_experts or 0) // args.expert_model_parallel_size
    )
    return _EXPERT.sub(lambda found: str(first + int(found[0])), name)


def _slots(
    optimizer: Any,
) -> Iterator[tuple[torch.nn.Parameter, int, int, dict[str, torch.Tensor]]]:
    if isinstance(optimizer, DistributedOptimizer):
        if getattr(optimizer, "is_stub_optimizer", False):
            return
        for buffers in optimizer.gbuf_ranges:
            for buckets in buffers.values():
                for bucket in buckets:
                    for parameter, ranges in bucket["param_map"].items():
                        slots = optimizer._get_main_param_and_optimizer_states(parameter)
                        slots.pop("step", None)
                        yield parameter, ranges["param"].start, ranges["param"].end, slots
        return
    main = {}
    for model_group, main_group in zip(
        getattr(optimizer, "float16_groups", []), getattr(optimizer, "fp32_from_float16_groups", [])
    ):
        main.update(zip(main_group, model_group))
    for parameter, slots in optimizer.optimizer.state.items():
        slots = {
            "param": parameter,
            **{slot: value for slot, value in slots.items() if slot != "step"},
        }
        yield main.get(parameter, parameter), 0, parameter.numel(), slots


def _whole(pieces: Any) -> State:
    parts: dict[tuple[str, str], dict[int, torch.Tensor]] = {}
    facts: dict[str, Any] = {}
    for piece in pieces:
        facts[piece["name"]] = piece
        for slot, value in piece["slots"].items():
            part = parts.setdefault((slot, piece["name"]), {})
            flat = part.setdefault(
                piece["slice"], torch.full((torch.Size(piece["shape"]).numel(),), float("nan"))
            )
            flat[slice(*piece["range"])] = value
    state: State = {}
    for (slot, name), slices in parts.items():
        shaped = [slices[number].reshape(facts[name]["shape"]) for number in sorted(slices)]
        if facts[name]["gated"] and facts[name]["dim"] is not None:
            # Ranks have [gate 0, up 0], [gate 1, up 1]; the whole is gate 0, gate 1, up 0, up 1.
            gates, ups = zip(*(part.chunk(2) for part in shaped))
            shaped = [*gates, *ups]
        whole = (
            torch.cat(shaped, dim=facts[name]["dim"])
            if facts[name]["dim"] is not None
            else shaped[0]
        )
        assert not whole.isnan().any(), (slot, name)
        state.setdefault(slot, {})[name] = whole
    return state
