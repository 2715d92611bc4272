# SPDX-License-Identifier: Apache-2.0
"""Hugging Face models with weights in FP8 and a scale for each block, as DeepSeek-V3 publishes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.checkpoint.core.lazy_tensor import in_memory
from megatron.checkpoint.hugging_face import model_reader as hugging_face
from megatron.checkpoint.hugging_face.model_directory import dequantized, quantized
from megatron.checkpoint.hugging_face.model_writer import HuggingFaceTarget
from tests.support.checkpoint.command_runs import run_json
from tests.support.checkpoint.hugging_face_models import config_of, random_state, write

CODES = torch.float8_e4m3fn
BLOCK = [16, 8]
DEEPSEEK = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": BLOCK,
}
"""With blocks that are smaller than the matrices of small models, and cut at their edges."""
WEIGHT = "model.layers.1.self_attn.q_b_proj.weight"


def published(directory: Path, kind: str = "deepseek_v3", **quantization: Any) -> Path:
    """Write a model as its publisher would: codes and scales are those of the file."""
    template = directory / "template"
    template.mkdir(parents=True)
    config = config_of(kind, dtype="bfloat16", quantization_config=DEEPSEEK | quantization)
    (template / "config.json").write_text(json.dumps(config))
    state = random_state(kind, torch.bfloat16)
    write(HuggingFaceTarget(state, template=template, fp8=True), directory / "model")
    return directory / "model"


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def product(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Multiply element by element."""
    whole = codes.float()
    for row in range(whole.shape[0]):
        for column in range(whole.shape[1]):
            whole[row, column] *= scales[row // BLOCK[0], column // BLOCK[1]]
    return whole


def test_codes_are_multiplied_by_the_scales_of_their_blocks(tmp_path: Path) -> None:
    model = published(tmp_path)
    stored, state = tensors(model), hugging_face.read(model)
    name = "decoder.layers.1.self_attention.linear_q_up_proj.weight"
    assert stored[WEIGHT].dtype == CODES and stored[WEIGHT].shape == (48, 24)
    expected = product(stored[WEIGHT], stored[f"{WEIGHT}_scale_inv"])
    weight = state.weights[name]
    assert torch.equal(weight.read(), expected)
    for start, stop in ((0, 3), (15, 17), (20, 48)):
        assert torch.equal(weight.read_rows(start, stop), expected[start:stop])
    assert state.args.params_dtype == torch.bfloat16
    assert stored["model.layers.1.mlp.gate.weight"].dtype == torch.bfloat16
    # 24 rows of 20, in blocks of 16 and 8: the last blocks are smaller.
    down = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight_scale_inv"
    assert stored[down].shape == (2, 4)


def test_the_products_are_those_of_transformers() -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    values = torch.randn(64, 48, generator=torch.Generator().manual_seed(3))
    codes, scales = (one.read() for one in quantized(in_memory(values), BLOCK))
    parts = {"w": in_memory(codes), "w_scale_inv": in_memory(scales)}
    mine = dequantized(parts, DEEPSEEK, Path())["w"].read()
    theirs = Fp8Dequantize(None)._dequantize_one(codes, scales)
    assert theirs.dtype == torch.float32 and torch.equal(mine, theirs)
    assert (mine - values).abs().max() < 0.04 * values.abs().max()


@pytest.mark.parametrize("form", ["fsdp_dtensor", "torch_dist"])
def test_a_round_trip_keeps_every_code(form: str, tmp_path: Path) -> None:
    model = published(tmp_path)
    run_json("convert-from-hf", model, tmp_path / "ours", "--format", form)
    back = tmp_path / "back"
    run_json("convert-to-hf", tmp_path / "ours", back, "--fp8", "--template", model)
    before, after = tensors(model), tensors(back)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype
        if name.endswith("_scale_inv"):
            rounded = 2**-8 if form == "torch_dist" else 2**-22  # its weights are in bf16
            torch.testing.assert_close(after[name], tensor, rtol=rounded, atol=0)
        else:
            assert torch.equal(after[name].view(torch.uint8), tensor.view(torch.uint8)), name
    configs = [json.loads((path / "config.json").read_text()) for path in (model, back)]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"] == DEEPSEEK


def test_without_the_option_weights_are_plain_and_so_is_the_config(tmp_path: Path) -> None:
    model = published(tmp_path)
    run_json("convert-from-hf", model, tmp_path / "ours")
    run_json("convert-to-hf", tmp_path / "ours", tmp_path / "plain", "--template", model)
    plain = tensors(tmp_path / "plain")
    assert {tensor.dtype for name, tensor in plain.items() if "bias" not in name} == {
        torch.bfloat16
    }
    assert "quantization_config" not in (tmp_path / "plain/config.json").read_text()


def test_blocks_of_zeros_have_a_scale() -> None:
    values = torch.zeros(20, 12)
    values[17, 9] = -3.0
    codes, scales = (one.read() for one in quantized(in_memory(values), BLOCK))
    assert scales.shape == (2, 2) and bool((scales > 0).all())
    assert torch.equal(product(codes, scales), values)


def test_modules_that_are_not_converted_stay(tmp_path: Path) -> None:
    kept = ["model.layers.0", "down_proj", r"model.layers.\d+.self_attn.o_proj"]
    model = published(tmp_path, modules_to_not_convert=kept)
    coded = [name for name, tensor in tensors(model).items() if tensor.dtype == CODES]
    assert WEIGHT in coded and "model.layers.1.mlp.experts.3.up_proj.weight" in coded
    for part in ("layers.0.", "down_proj", "o_proj"):
        assert not any(part in name for name in coded)
    hugging_face.read(model)
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"].append("q_b_proj")
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=rf"{WEIGHT} has codes, and is one of modules_to_not"):
        hugging_face.read(model)


def test_wrong_scales_are_one_error(tmp_path: Path) -> None:
    model = published(tmp_path)
    stored = tensors(model)
    other = "model.layers.2.self_attn.o_proj.weight"
    stored[f"{WEIGHT}_scale_inv"] = stored[f"{WEIGHT}_scale_inv"][:-1].clone()
    del stored[f"{other}_scale_inv"]
    save_file(stored, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError) as raised:
        hugging_face.read(model)
    text = str(raised.value)
    assert f"{WEIGHT}: {CODES} (48, 24), scales torch.float32 (2, 3) instead of" in text
    assert f"{other}: {CODES} (32, 24), scales missing instead of torch.float32 (2, 3)" in text
    assert "blocks" in text or "[16, 8]" in text


def test_a_family_without_linear_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="FP8 is for linear layers, which GPT2LMHeadModel has not"):
        HuggingFaceTarget(random_state("gpt2"), fp8=True)
