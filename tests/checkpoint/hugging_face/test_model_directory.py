# SPDX-License-Identifier: Apache-2.0
"""Safetensors files: read row by row, written as the library writes them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from megatron.checkpoint.core.lazy_tensor import LazyTensor, in_memory
from megatron.checkpoint.hugging_face.model_directory import (
    DTYPES,
    SINGLE_FILE,
    stored_tensors,
    write_shard,
)
from megatron.checkpoint.hugging_face.model_writer import HuggingFaceTarget
from tests.support.checkpoint.hugging_face.saved_models import saved
from tests.support.checkpoint.hugging_face_models import random_state, write


def test_nothing_but_the_rows_is_read_from_a_large_file(tmp_path: Path) -> None:
    """The file has 64 GiB of zeros that are on no disk: reading all of them would not end well."""
    rows, width = 2**20, 2**14
    header = json.dumps(
        {"a": {"dtype": "F32", "shape": [rows, width], "data_offsets": [0, rows * width * 4]}}
    ).encode()
    with open(tmp_path / "large.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + rows * width * 4)
    found = stored_tensors(tmp_path / "large.safetensors")["a"].read_rows(rows - 2, rows)
    assert found.shape == (2, width) and found.untyped_storage().nbytes() == 2 * width * 4


def test_files_are_those_of_the_library_in_both_directions(tmp_path: Path) -> None:
    """Try every dtype, a scalar, a tensor without elements, and names with any character."""
    numbers = torch.arange(6).reshape(2, 3)
    content = {f"of {name}": numbers.to(dtype) for name, dtype in DTYPES.items()}
    content |= {
        "scalar": torch.tensor(2.5),
        "nothing": torch.empty(0, 3),
        'a "b" \u00e9': torch.ones(1),
    }
    save_file(content, tmp_path / "library", metadata={"format": "pt"})
    write_shard(
        tmp_path / "ours",
        {name: in_memory(tensor) for name, tensor in content.items()},
        lambda size: None,
    )
    ours, library = stored_tensors(tmp_path / "library"), load_file(tmp_path / "ours")
    assert ours.keys() == library.keys() == content.keys()
    for name, tensor in content.items():
        for found in (ours[name].read(), library[name]):
            assert found.dtype == tensor.dtype and found.shape == tensor.shape, name
            assert torch.equal(found.float(), tensor.float()), name


DAMAGED = {
    "empty": (b"", "does not begin with a header"),
    "a length without end": (
        (1 << 60).to_bytes(8, "little") + b"{}",
        "does not begin with a header",
    ),
    "no object": ((2).to_bytes(8, "little") + b"[]", "does not begin with a header"),
    "no JSON": ((2).to_bytes(8, "little") + b"{x", "cannot be read"),
    "cut off": (
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        "a: F32 \\(2,\\) is not what bytes 0 to 8 of 0",
    ),
    "wrong size": (
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,0]}}',
        "a: F32 \\(2,\\) is not what bytes 0 to 0",
    ),
    "dtype": (
        b'{"a":{"dtype":"F3","shape":[],"data_offsets":[0,0]}}',
        "a: torch does not know its dtype F3",
    ),
    "description": (b'{"a":{"dtype":"F32"}}', "a: its description is damaged"),
}


@pytest.mark.parametrize(("content", "words"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_named_with_its_damage(
    content: bytes, words: str, tmp_path: Path
) -> None:
    whole = len(content).to_bytes(8, "little") + content if content.startswith(b"{") else content
    (tmp_path / "damaged").write_bytes(whole)
    with pytest.raises(
        ValueError, match=f"damaged cannot be read as a safetensors file:(.|\n)*{words}|{words}"
    ):
        stored_tensors(tmp_path / "damaged")


@pytest.mark.parametrize(
    ("second", "num_bytes", "words"),
    [
        ([8, 16], 20, "its tensors end at byte 16 of 20"),
        ([12, 20], 20, "b begins at byte 12, not at 8, where the tensor before it ends"),
        ([4, 12], 12, "b begins at byte 4, not at 8, where the tensor before it ends"),
    ],
    ids=["longer", "gap", "overlap"],
)
def test_values_that_the_header_does_not_describe_are_damage(
    second: list[int], num_bytes: int, words: str, tmp_path: Path
) -> None:
    entry = {"dtype": "F32", "shape": [2]}
    header = json.dumps(
        {"a": {**entry, "data_offsets": [0, 8]}, "b": {**entry, "data_offsets": second}}
    ).encode()
    path = tmp_path / "damaged"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(num_bytes))
    with pytest.raises(ValueError, match=words):
        stored_tensors(path)
    with pytest.raises(SafetensorError):  # as the library's
        load_file(path)


def test_values_are_aligned_whatever_their_dtypes(tmp_path: Path) -> None:
    state = random_state(
        "deepseek_v3", torch.bfloat16, n_routed_experts=12, n_group=1, topk_group=1, q_lora_rank=23
    )
    path = saved(state, tmp_path) / SINGLE_FILE
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    assert start % 8 == 0 and header.pop("__metadata__") == {"format": "pt"}
    assert {each["dtype"] for each in header.values()} == {"F32", "BF16"}
    for name, each in header.items():
        assert (start + each["data_offsets"][0]) % (4 if each["dtype"] == "F32" else 2) == 0, name
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(
        load_file(path)[bias], state.buffers["decoder.layers.1.mlp.router.expert_bias"].read()
    )


def test_a_tensor_that_is_not_as_it_said_stops_the_writing(tmp_path: Path) -> None:
    state = random_state("llama")
    state.weights["decoder.final_layernorm.weight"] = LazyTensor(
        (32,), torch.float32, lambda start, stop: torch.zeros(31)
    )
    with pytest.raises(RuntimeError, match=r"model\.norm\.weight should be"):
        write(HuggingFaceTarget(state), tmp_path)
