# SPDX-License-Identifier: Apache-2.0
"""The distributed optimizer's buffers, as ranks keep them in memory and two layouts of torch_dist checkpoints store them.

A *buffer* holds all parameters of one dtype that a rank has in one chunk of the pipeline, in the
reverse of the order in which the model registers them. It is cut into *buckets*. Each parameter
begins at a multiple of 64 elements, counted from the beginning of its bucket, and is this rank's
part of it, flattened. Data ranks share one buffer.

Nothing in a file says which parameters are where. That follows from how many layers each pipeline
stage has, over how many ranks tensor parallelism goes, and which layers the model was made of.
Layouts are tried, that of the arguments first, and the one is taken in which every parameter begins
and ends where something does in the file.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megatron.checkpoint.core import key_rules, spelling
from megatron.checkpoint.core.key_rules import OUTPUT_LAYER, WORD_EMBEDDINGS
from megatron.checkpoint.core.lazy_tensor import LazyTensor, concatenate
from megatron.checkpoint.core.stored_checkpoint import StoredCheckpoint

ALIGNMENT = 64
"""Parameters begin at multiples of this number of elements."""

_DOWN_PROJECTION = re.compile(r"\.self_attention\.linear_(q|kv)_down_proj\.")
_EMBEDDING, _FINAL_NORM, _PREDICTION = "embedding.", "decoder.final_layernorm.", "mtp."


class DoesNotFit(ValueError):
    """A layout is not that of the file."""


# ---- buffers
# ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """What one rank has of a parameter.

    Attributes:
        name: of the parameter.
        shape: of the part.
        has_own_bucket: as embeddings have that two pipeline stages share.
    """

    name: str
    shape: tuple[int, ...]
    has_own_bucket: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Buffer(Protocol):
    """All parameters of one dtype that a rank has in one chunk of the pipeline."""

    dtype: str
    """Of the parameters in the model, as in ``torch.bfloat16``."""
    slots: Mapping[str, torch.dtype]
    numel: int
    shows_order: bool
    """Whether it shows where parameters begin, not only how many elements there are."""

    def place(self, parts: Sequence[Part]) -> list[Any]:
        """Where each of the rank's parameters is, which are given in the order of registration.

        Raises:
            DoesNotFit: where they do not fill the buffer.
        """
        ...

    def read(self, slot: str, place: Any, start: int, stop: int) -> torch.Tensor:
        """Elements ``[start, stop)`` of the parameter at ``place``."""
        ...


class StoredBuckets:
    """A buffer whose buckets are tensors of their own: ``dp_reshardable``.

    Args:
        keys: of each bucket, slot -> key.

    Raises:
        ValueError: where slots of a bucket differ in length.
    """

    shows_order = True

    def __init__(self, stored: StoredCheckpoint, dtype: str, keys: Sequence[Mapping[str, str]]):
        self._stored, self._keys, self.dtype = stored, keys, dtype
        self.slots = {slot: stored.dtype(key) for slot, key in keys[0].items()}
        self.lengths = []
        for bucket in keys:
            shapes = {stored.shape(key) for key in bucket.values()}
            if (
                bucket.keys() != self.slots.keys()
                or len(shapes) != 1
                or len(next(iter(shapes))) != 1
            ):
                raise ValueError(
                    "the tensors of a bucket differ:"
                    f" {', '.join(f'{key} {stored.shape(key)}' for key in bucket.values())},"
                    f" expected one dim of the same length for {', '.join(self.slots)}"
                )
            self.lengths.append(next(iter(shapes))[0])
        self.numel = sum(self.lengths)

    @functools.cached_property
    def _edges(self) -> list[set[int]]:
        """Where chunks of the file begin and end in each bucket: where parameters, gaps and data ranks' parts do."""
        chunks = [self._stored.tensors[next(iter(bucket.values()))].chunks for bucket in self._keys]
        return [
            {edge for each in of for edge in (each.offsets[0], each.offsets[0] + each.sizes[0])}
            for of in chunks
        ]

    def place(self, parts: Sequence[Part]) -> list[tuple[int, int]]:
        places: list[tuple[int, int]] = []
        bucket = start = 0
        for part in reversed(parts):
            if bucket == len(self.lengths):
                raise DoesNotFit(f"{part.name} comes after the last bucket")
            start = _aligned(start)
            end, length = start + part.numel, self.lengths[bucket]
            if end > length or not {start, end} <= self._edges[bucket]:
                raise DoesNotFit(
                    f"{part.name} is not at {start} to {end} of bucket {bucket}, which has {length}"
                    " elements"
                )
            places.append((bucket, start))
            # A bucket of its own begins at an aligned place, and what is before it belongs to the
            # bucket before.
            bucket, start = (bucket + 1, 0) if length in (end, _aligned(end)) else (bucket, end)
        if bucket < len(self.lengths):
            raise DoesNotFit(
                f"buckets from {bucket} on, of {self.lengths[bucket:]} elements, have more than the"
                " parameters"
            )
        return places[::-1]

    def read(self, slot: str, place: tuple[int, int], start: int, stop: int) -> torch.Tensor:
        bucket, first = place
        return self._stored.read_region(self._keys[bucket][slot], [first + start], [stop - start])


class CoalescedBuckets:
    """A buffer whose buckets follow one another in one tensor, which is in an object: ``dp_zero_gather_scatter``.

    Args:
        load: reads ``slot -> tensor``.
        bucket_size: at which a bucket is closed; None where there is but one.
    """

    shows_order = False

    def __init__(self, load: Any, dtype: str, bucket_size: int | None):
        self._load, self.dtype, self._bucket_size = load, dtype, bucket_size
        content = load()
        self.slots = {
            slot: value.dtype for slot, value in content.items() if isinstance(value, torch.Tensor)
        }
        sizes = {slot: tuple(content[slot].shape) for slot in self.slots}
        self.numel = int(content["numel_unpadded"])
        if set(sizes.values()) != {(self.numel,)}:
            raise ValueError(
                f"the tensors of a buffer are {sizes}, expected {self.numel} elements for each"
            )

    def place(self, parts: Sequence[Part]) -> list[int]:
        places: list[int] = []
        bucket = end = (
            0  # both from the beginning of the buffer, where paddings between buckets are left out
        )
        for part in reversed(parts):
            start = bucket + _aligned(end - bucket)
            end = start + part.numel
            places.append(start)
            if part.has_own_bucket or (
                self._bucket_size is not None and end - bucket >= self._bucket_size
            ):
                bucket = end
        if end != self.numel:
            raise DoesNotFit(f"the parameters fill {end} of its {self.numel} elements")
        return places[::-1]

    def read(self, slot: str, place: int, start: int, stop: int) -> torch.Tensor:
        return self._load()[slot][place + start : place + stop].clone()


def _aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT


def coalesced(
    stored: StoredCheckpoint, keys: Mapping[tuple[int, int], str], args: argparse.Namespace | None
) -> dict[tuple[int, int], list[CoalescedBuckets]]:
    """Chained optimizer and rank -> its buffers, from the objects with these keys.

    Raises:
        ValueError: for objects of the years when buckets were stored one by one.
    """
    num_slices = getattr(args, "tensor_model_parallel_size", None) or 1

    @functools.lru_cache(maxsize=num_slices)  # what reading one whole parameter needs
    def load(key: str) -> Any:
        value = stored.read_object(key)
        return value[0] if isinstance(value, list) and len(value) == 1 else value

    found: dict[tuple[int, int], list[CoalescedBuckets]] = {}
    for (chain, rank), key in keys.items():
        content = load(key)
        if not isinstance(content, dict) or not content.get("buckets_coalesced"):
            raise ValueError(
                f"{key} is not {{'buckets_coalesced': True, number: {{dtypes: tensors}}}}"
            )
        num_ranks = sum(other == chain for other, _ in keys)
        is_first_stage = rank < num_ranks // (
            getattr(args, "pipeline_model_parallel_size", None) or 1
        )
        buffers = found.setdefault((chain, rank), [])
        for number in sorted(name for name in content if isinstance(name, int)):
            for dtypes in content[number]:
                dtype = str(dtypes[0])
                # Later chunks have one bucket: their gradients are not on the critical path.
                is_first = is_first_stage and all(buffer.dtype != dtype for buffer in buffers)
                read = functools.partial(
                    lambda key, number, dtypes: load(key)[number][dtypes], key, number, dtypes
                )
                buffers.append(
                    CoalescedBuckets(read, dtype, _bucket_size(args) if is_first else None)
                )
    return found


def _bucket_size(args: argparse.Namespace | None) -> int | None:
    """At how many elements a bucket is closed, by Megatron-LM's rules."""
    if not getattr(args, "overlap_grad_reduce", False):
        return None
    if getattr(args, "ddp_num_buckets", None):
        raise ValueError(
            "dp_zero_gather_scatter of a run with --ddp-num-buckets: where its buckets end is not"
            " known"
        )
    return getattr(args, "ddp_bucket_size", None) or max(
        40_000_000, 1_000_000 * getattr(args, "data_parallel_size", 1)
    )


# ---- the model
# -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """One way in which a run can have been laid out over ranks.

    Attributes:
        num_slices: of tensor parallelism.
        num_expert_slices: of tensor parallelism in experts.
        engine: the layers are Transformer Engine's, whose linear layers have the norm before them
            inside.
        grouped_experts: all experts of a layer are one module.
        divided_down: tensor parallelism divides the down projections of latent attention.
    """

    num_slices: int
    num_expert_slices: int
    engine: bool
    grouped_experts: bool
    divided_down: bool

    def __str__(self) -> str:
        layers = "Transformer Engine's" if self.engine else "local"
        experts = " with grouped experts" if self.grouped_experts else ""
        down = ", whole down projections" if not self.divided_down else ""
        slices = f"tensor parallelism of {self.num_slices}, {self.num_expert_slices} in experts"
        return f"{slices}, {layers} layers{experts}{down}"

    def split_dim(self, name: str) -> int | None:
        """The dim along which tensor parallelism divides a parameter."""
        if self.divided_down and _DOWN_PROJECTION.search(name):
            return 0
        return key_rules.split_dim(name)


@dataclass(frozen=True)
class Share:
    """What a chunk of the pipeline has of the layers, of the final norm, and of those that predict further tokens."""

    layers: range
    norm: bool
    predicting: bool


class Model:
    """The parameters of a model in a layout, in the order of registration.

    Attributes:
        before, decoder, final_norm, predicting, output: names of the parameters; of each layer in
            ``decoder``.
        num_experts: in a layer.
    """

    def __init__(self, weights: Mapping[str, LazyTensor], layout: Layout):
        self._weights, self.layout = weights, layout
        self._shapes = {name: tensor.shape for name, tensor in weights.items()}
        names = [name for name in weights if not key_rules.is_buffer(name)]
        spelled = spelling.Spelling(
            layout.engine, layout.grouped_experts, True, spelling.layer_kinds(names)
        )
        names.sort(key=lambda name: key_rules.registration_order(name, spelled))
        numbers = {
            name: number for name in names if (number := key_rules.layer_number(name)) is not None
        }
        self.decoder: list[list[str]] = [[] for _ in range(max(numbers.values(), default=-1) + 1)]
        for name, number in numbers.items():
            self.decoder[number].append(name)
        self.before = [name for name in names if name.startswith(_EMBEDDING)]
        self.final_norm = [name for name in names if name.startswith(_FINAL_NORM)]
        self.predicting = [name for name in names if name.startswith(_PREDICTION)]
        self.output = [name for name in names if name == OUTPUT_LAYER]
        self.names = [
            *self.before,
            *itertools.chain(*self.decoder),
            *self.final_norm,
            *self.predicting,
            *self.output,
        ]
        experts = [number for number in map(key_rules.expert_number, names) if number is not None]
        self.num_experts = max(experts, default=-1) + 1
        known = {
            *self.before,
            *itertools.chain(*self.decoder),
            *self.final_norm,
            *self.predicting,
            *self.output,
        }
        if len(known) != len(names):
            raise ValueError(
                "where the optimizer's buckets have these is not known:"
                f" {', '.join(sorted({*names} - known))}"
            )

    def parts(self, share: Share, is_first: bool, is_last: bool, num_stages: int) -> list[Part]:
        """What every tensor-parallel rank has of a chunk of the pipeline, in the order of registration.

        Chunks that need the embeddings for their output or to predict from have copies of them.
        """
        is_shared = num_stages > 1 and bool(self.predicting or not self.output)
        embedding = self.before if is_first else [WORD_EMBEDDINGS] if share.predicting else []
        parts = [
            self.part(name, has_own_bucket=is_shared and name == WORD_EMBEDDINGS)
            for name in embedding
        ]
        names = [*itertools.chain(*(self.decoder[layer] for layer in share.layers))]
        names += [
            *(self.final_norm if share.norm else []),
            *(self.predicting if share.predicting else []),
        ]
        parts += [self.part(name) for name in [*names, *(self.output if is_last else [])]]
        if is_last and not is_first and not self.output and not share.predicting:
            parts.append(self.part(WORD_EMBEDDINGS, has_own_bucket=True))
        return parts

    def part(self, name: str, has_own_bucket: bool = False) -> Part:
        """What every tensor-parallel rank has of a parameter.

        Raises:
            DoesNotFit: where it cannot be divided so.
        """
        shape, dim = list(self._weights[name].shape), self.layout.split_dim(name)
        if dim is not None:
            if shape[dim] % self.num_slices(name):
                raise DoesNotFit(
                    f"{name} with the shape {tuple(shape)} cannot be divided by"
                    f" {self.num_slices(name)}"
                )
            shape[dim] //= self.num_slices(name)
        return Part(name, tuple(shape), has_own_bucket)

    def num_slices(self, name: str) -> int:
        return (
            self.layout.num_expert_slices if key_rules.is_expert(name) else self.layout.num_slices
        )

    def dtype(self, name: str) -> str:
        return str(self._weights[name].dtype)

    def has_halves(self, name: str) -> bool:
        return key_rules.has_halves(name, self._shapes)


# ---- decoding
# --------------------------------------------------------------------------------------------------------

Pieces = dict[str, list[list[tuple[Buffer, Any]]]]
"""Name -> copies of the parameter -> buffer and place of every tensor-parallel rank's part."""


def decode(
    dense: Sequence[Sequence[Buffer]],
    experts: Sequence[Sequence[Buffer]],
    weights: Mapping[str, LazyTensor],
    args: argparse.Namespace | None,
) -> Iterator[tuple[str, str, LazyTensor]]:
    """Every parameter's tensors: name, slot, whole tensor.

    Args:
        dense: buffers of every model-parallel rank, tensor-parallel ranks fastest, then pipeline
            stages; of each rank, chunk after chunk.
        experts: those of the optimizer that has the experts, where they have one: expert tensor
            parallelism fastest, then expert parallelism, then pipeline stages.
        args: of the run; what they lack is tried.

    Raises:
        ValueError: where no layout fits, or several do and ``args`` do not say which it was. While
            a tensor is read, where two pipeline stages have different copies of it.
    """
    model, pieces = _find_layout(dense, experts, weights, args)
    for name, copies in pieces.items():
        for slot in copies[0][0][0].slots:
            yield (
                name,
                slot,
                _agreeing(name, slot, [_joined(model, name, slot, copy) for copy in copies]),
            )


def _find_layout(
    dense: Sequence[Sequence[Buffer]],
    experts: Sequence[Sequence[Buffer]],
    weights: Mapping[str, LazyTensor],
    args: argparse.Namespace | None,
) -> tuple[Model, Pieces]:
    """The layout that fits, as the model in it and where its parameters are."""
    missing = [
        name
        for name in ("tensor_model_parallel_size", "transformer_impl")
        if getattr(args, name, None) is None
    ]
    found: list[tuple[Layout, Model, Pieces]] = []
    failures: dict[str, Layout] = {}
    for layout in _layouts(dense, experts, args):
        try:
            model = Model(weights, layout)
            pieces = _find_pieces(model, dense, experts)
        except DoesNotFit as error:
            failures.setdefault(str(error), layout)
            continue
        if not any(pieces == other for _, _, other in found):
            found.append((layout, model, pieces))
        if not missing:
            break
    if not found:
        reasons = [f"{layout}: {reason}" for reason, layout in failures.items()]
        raise ValueError("\n  ".join(["the optimizer's buckets do not fit the model:", *reasons]))
    if len(found) > 1:
        head = (
            "the optimizer's buckets fit several layouts, and the checkpoint's args lack"
            f" {', '.join(missing)}:"
        )
        raise ValueError("\n  ".join([head, *(str(layout) for layout, _, _ in found)]))
    return found[0][1:]


def _layouts(
    dense: Sequence[Sequence[Buffer]],
    experts: Sequence[Sequence[Buffer]],
    args: argparse.Namespace | None,
) -> Iterator[Layout]:
    """All layouts that are possible, that of the arguments first."""
    impl = getattr(args, "transformer_impl", None)
    # Local layers divide the down projections, Transformer Engine's have them whole but in early
    # releases.
    kinds = [
        (False, False, True),
        (True, False, False),
        (True, True, False),
        (True, False, True),
        (True, True, True),
    ]
    if impl is not None:
        grouped = impl != "local" and bool(getattr(args, "moe_grouped_gemm", False))
        own = (impl != "local", grouped, impl == "local")
        # Models can be made of other layers than `args` name: where the file shows the order, that
        # counts.
        shows_order = all(buffer.shows_order for rank in (*dense, *experts) for buffer in rank)
        kinds = [
            own,
            *(kind for kind in kinds if kind != own and (shows_order or kind[:2] == own[:2])),
        ]
    slices = getattr(args, "tensor_model_parallel_size", None)
    for kind in kinds:
        for num_slices in [slices] if slices else _divisors(len(dense)):
            expert_slices = getattr(args, "expert_tensor_parallel_size", None)
            if expert_slices is None and (slices or not experts):
                expert_slices = num_slices
            for num_expert_slices in [expert_slices] if expert_slices else _divisors(len(experts)):
                yield Layout(num_slices, num_expert_slices, *kind)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _find_pieces(
    model: Model, dense: Sequence[Sequence[Buffer]], experts: Sequence[Sequence[Buffer]]
) -> Pieces:
    """Go through the pipeline and give every chunk as many layers as its buffers have place for."""
    num_stages, rest = divmod(len(dense), model.layout.num_slices)
    if rest or not num_stages:
        raise DoesNotFit(f"{len(dense)} ranks have buffers")
    ranks = [_chunks(rank) for rank in dense]
    num_chunks = max(map(len, ranks))
    pipeline = [  # in the order of the layers: all stages, then all again
        [
            _at(rank, chunk)
            for rank in ranks[
                stage * model.layout.num_slices : (stage + 1) * model.layout.num_slices
            ]
        ]
        for chunk in range(num_chunks)
        for stage in range(num_stages)
    ]
    pieces: Pieces = {}
    contents = _split(model, pipeline, num_stages, bool(experts))
    for slices, parts in zip(pipeline, contents):
        dense_parts = [part for part in parts if not (experts and key_rules.is_expert(part.name))]
        _note(pieces, [_place(model, dense_parts, buffers) for buffers in slices])
    if experts:
        _place_experts(model, experts, contents, num_stages, pieces)
    return pieces


def _chunks(rank: Sequence[Buffer]) -> list[dict[str, Buffer]]:
    """A rank's buffers, by dtype in each chunk of the pipeline: a chunk has no dtype twice."""
    chunks: list[dict[str, Buffer]] = []
    for buffer in rank:
        if not chunks or buffer.dtype in chunks[-1]:
            chunks.append({})
        chunks[-1][buffer.dtype] = buffer
    return chunks


def _at(chunks: Sequence[dict[str, Buffer]], number: int) -> dict[str, Buffer]:
    return chunks[number] if number < len(chunks) else {}  # a stage may be empty


def _split(
    model: Model,
    pipeline: Sequence[Sequence[dict[str, Buffer]]],
    num_stages: int,
    experts_apart: bool,
) -> list[list[Part]]:
    """The parameters of every chunk of the pipeline."""
    contents: list[list[Part]] = []
    layer, is_open = 0, {"norm": bool(model.final_norm), "predicting": bool(model.predicting)}
    for number, slices in enumerate(pipeline):
        reasons = []
        for share in _shares(model, layer, is_open, number + 1 == len(pipeline)):
            parts = model.parts(share, number == 0, number + 1 == len(pipeline), num_stages)
            dense = [
                part for part in parts if not (experts_apart and key_rules.is_expert(part.name))
            ]
            try:
                _place(model, dense, slices[0])
                contents.append(parts)
                break
            except DoesNotFit as error:
                reasons.append(f"with {len(share.layers)} layers, {error}")
                if sum(part.numel for part in dense) > sum(
                    buffer.numel for buffer in slices[0].values()
                ):
                    break
        if len(contents) == number:
            where = (
                f"chunk {number} of the pipeline's {len(pipeline)} is to begin with layer {layer}"
            )
            raise DoesNotFit("; ".join([where, *reasons[-2:]]))
        layer = share.layers.stop
        is_open = {
            "norm": is_open["norm"] and not share.norm,
            "predicting": is_open["predicting"] and not share.predicting,
        }
    return contents


def _shares(
    model: Model, layer: int, is_open: Mapping[str, bool], is_last: bool
) -> Iterator[Share]:
    """What a chunk can have that begins with ``layer``: for the last one, all that is left.

    Where layers predict further tokens, they and the final norm can be in an earlier chunk, after
    all other layers.
    """
    total = len(model.decoder)
    if is_last:
        yield Share(range(layer, total), is_open["norm"], is_open["predicting"])
        return
    for stop in range(layer, total + 1):
        may_end = bool(model.predicting) and stop == total
        for predicting in {False, may_end and is_open["predicting"]}:
            for norm in {False, may_end and is_open["norm"]}:
                yield Share(range(layer, stop), norm, predicting)


def _place(
    model: Model, parts: Sequence[Part], buffers: Mapping[str, Buffer]
) -> list[tuple[Part, Buffer, Any]]:
    """Where the parameters of one rank's chunk are."""
    by_dtype = _by_dtype(model, parts)
    if by_dtype.keys() != buffers.keys():
        raise DoesNotFit(
            f"parameters have the dtypes {sorted(by_dtype)}, buffers are for {sorted(buffers)}"
        )
    placed = []
    for dtype, some in by_dtype.items():
        numel, buffer = sum(part.numel for part in some), buffers[dtype]
        if not numel <= buffer.numel < numel + ALIGNMENT * len(some):
            raise DoesNotFit(f"parameters have {numel} elements and the buffer {buffer.numel}")
        placed += [(part, buffer, place) for part, place in zip(some, buffer.place(some))]
    return placed


def _by_dtype(model: Model, parts: Iterable[Part]) -> dict[str, list[Part]]:
    found: dict[str, list[Part]] = {}
    for part in parts:
        found.setdefault(model.dtype(part.name), []).append(part)
    return found


def _note(pieces: Pieces, slices: Sequence[Sequence[tuple[Part, Buffer, Any]]]) -> None:
    """Add a copy of every parameter, given what each of its tensor-parallel ranks has."""
    for found in zip(*slices):
        pieces.setdefault(found[0][0].name, []).append(
            [(buffer, place) for _, buffer, place in found]
        )


def _place_experts(
    model: Model,
    experts: Sequence[Sequence[Buffer]],
    contents: Sequence[Sequence[Part]],
    num_stages: int,
    pieces: Pieces,
) -> None:
    """Add the experts, which are divided among the ranks of a stage in the order of their numbers."""
    num_slices = model.layout.num_expert_slices
    num_groups, rest = divmod(len(experts), num_slices * num_stages)
    if rest or not num_groups or model.num_experts % num_groups:
        raise DoesNotFit(
            f"{len(experts)} ranks have buffers of {model.num_experts} experts in {num_stages}"
            " pipeline stages"
        )
    share = model.num_experts // num_groups
    for stage, group in itertools.product(range(num_stages), range(num_groups)):
        mine = []
        for parts in contents[stage::num_stages]:
            of_experts = [part for part in parts if key_rules.is_expert(part.name)]
            some = [
                part for part in of_experts if key_rules.expert_number(part.name) // share == group
            ]
            mine += _by_dtype(model, some).items()
        slices = [
            _place_in_turn(mine, experts[slice_ + num_slices * (group + num_groups * stage)])
            for slice_ in range(num_slices)
        ]
        _note(pieces, slices)


def _place_in_turn(
    contents: Sequence[tuple[str, list[Part]]], buffers: Sequence[Buffer]
) -> list[tuple[Part, Buffer, Any]]:
    """Where experts are; chunks without any have no buffer."""
    if [dtype for dtype, _ in contents] != [buffer.dtype for buffer in buffers]:
        raise DoesNotFit(f"a rank has {len(buffers)} buffers of experts, expected {len(contents)}")
    return [
        (part, buffer, place)
        for (_, parts), buffer in zip(contents, buffers)
        for part, place in zip(parts, buffer.place(parts))
    ]


# ---- whole tensors
# ---------------------------------------------------------------------------------------------------


def _joined(model: Model, name: str, slot: str, pieces: Sequence[tuple[Buffer, Any]]) -> LazyTensor:
    """One tensor of what tensor-parallel ranks have of it."""
    dim = model.layout.split_dim(name)
    num_slices = 1 if dim is None else model.num_slices(name)
    if num_slices > len(pieces):
        raise ValueError(f"{name} is divided among {num_slices} ranks, but {len(pieces)} have it")
    parts = [
        _flat(buffer, slot, place, model.part(name).shape) for buffer, place in pieces[:num_slices]
    ]
    if num_slices == 1:
        return parts[0]
    if dim == 0 and model.has_halves(name):
        half = parts[0].num_rows // 2
        return concatenate(
            [part.rows(*rows) for rows in ((0, half), (half, 2 * half)) for part in parts]
        )
    if dim == 0:
        return concatenate(parts)
    rows, columns = parts[0].shape
    return LazyTensor(
        (rows, columns * num_slices),
        parts[0].dtype,
        lambda start, stop: torch.cat([part.read_rows(start, stop) for part in parts], dim=1),
    )


def _flat(buffer: Buffer, slot: str, place: Any, shape: tuple[int, ...]) -> LazyTensor:
    row = math.prod(shape[1:])

    def read_rows(start: int, stop: int) -> torch.Tensor:
        return buffer.read(slot, place, start * row, stop * row).reshape(stop - start, *shape[1:])

    return LazyTensor(shape, buffer.slots[slot], read_rows)


def _agreeing(name: str, slot: str, copies: Sequence[LazyTensor]) -> LazyTensor:
    """The first of the copies that pipeline stages have; the others are read with it."""
    first, *others = copies

    def read_rows(start: int, stop: int) -> torch.Tensor:
        rows = first.read_rows(start, stop)
        if any(not torch.equal(rows, other.read_rows(start, stop)) for other in others):
            raise ValueError(
                f"the pipeline stages that share {name} have different copies of its {slot}"
            )
        return rows

    return LazyTensor(first.shape, first.dtype, read_rows) if others else first
