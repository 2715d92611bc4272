# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine is imported on CPU ranks, and its emulated kernels compute what they should.

Where the package has numerics in Python, the kernels agree with them bit by bit.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.support.transformer_engine.ranks import RunOnRanks
from tools import transformer_engine_on_cpu as tool
from tools.transformer_engine_on_cpu import number_formats, use, wheel
from tools.transformer_engine_on_cpu.__main__ import main
from tools.transformer_engine_on_cpu.quantization import values
from tools.wheels import DownloadError

README = Path(tool.__file__).parent / "README.md"


def matrix(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return random values whose rows and columns differ in size, with zeros in places."""
    generator = torch.Generator().manual_seed(7)
    result = torch.randn(shape, generator=generator)
    result *= torch.logspace(-2, 2, shape[-1]) * torch.logspace(1, -1, shape[0])[:, None]
    result[:, :40] = 0
    result[3, 2:9] = torch.tensor([1e-6, -1e-6, 0.25, -0.75, 2.5, -5.0, 1e-20])
    return result.to(dtype)


# ---- loading


@pytest.mark.exhaustive
def test_a_wheel_that_pip_does_not_find_is_an_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setattr(wheel, "UNPACKED", tmp_path)
    with pytest.raises(DownloadError, match="pip finds no transformer-engine==2"):
        wheel.unpack()
    assert [*tmp_path.iterdir()] == [tmp_path / "lock"]


def printed_by(*words: str) -> str:
    """Return what the tool prints for a command line, in a process that has the package already."""
    with (
        patch.object(sys, "argv", [tool.__name__, *words]),
        patch.object(sys, "path", [*sys.path]),
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        main()
    return printed.getvalue()


@pytest.mark.exhaustive
def test_the_program_of_the_readme_trains(blackwell: RunOnRanks, tmp_path: Path) -> None:
    page = README.read_text()
    (program,) = re.findall(r'```python title="train.py"\n(.*?)```', page, re.DOTALL)
    (words,) = re.findall(rf"```bash\npython -m {tool.__name__} train.py (.*)\n```", page)
    (expected,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    path = tmp_path / "train.py"
    path.write_text(program)
    assert blackwell(printed_by, str(path), *words.split()) == [expected] * 2


def test_a_program_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tool", "no_program.py"])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err.endswith("error: there is no file no_program.py\n")


def what_is_there() -> tuple[bool, ...]:
    use()
    names = ("transformer_engine.pytorch", "triton", "onnxscript", "onnx")
    return tuple(name in sys.modules for name in names)


@pytest.mark.exhaustive
def test_only_ranks_that_use_it_see_the_package(blackwell: RunOnRanks) -> None:
    expected = (True, *(name in sys.modules for name in ("triton", "onnxscript", "onnx")))
    assert blackwell(what_is_there) == [expected] * 2
    assert "transformer_engine" not in sys.modules
    assert wheel.RELEASE not in "".join(sys.path) and not find_spec("transformer_engine")


def call_what_is_missing() -> list[str]:
    use()
    import transformer_engine_torch
    from transformer_engine.common.triton.cross_entropy import cross_entropy_forward_kernel

    with pytest.raises(NotImplementedError) as compiled:
        transformer_engine_torch.fused_rope_forward(1, 2)
    with pytest.raises(NotImplementedError) as in_triton:
        cross_entropy_forward_kernel[(1,)](torch.randn(4, 8))
    return [str(compiled.value), str(in_triton.value)]


@pytest.mark.exhaustive
def test_a_kernel_that_is_not_emulated_says_so(blackwell: RunOnRanks) -> None:
    assert blackwell(call_what_is_missing)[0] == [
        "the kernel fused_rope_forward is not emulated",
        "kernels in triton and the export to ONNX are not emulated",
    ]


# ---- number formats


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"])
def test_every_code_of_fp8_is_its_own_value(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = number_formats.from_float8(codes, dtype)
    finite = values.isfinite()
    assert torch.equal(number_formats.to_float8(values[finite], dtype), codes[finite])
    largest = number_formats.largest(dtype)
    too_large = torch.tensor([2 * largest, -torch.inf])
    clamped = number_formats.from_float8(number_formats.to_float8(too_large, dtype), dtype)
    assert clamped.tolist() == [largest, -largest]


def test_every_power_of_two_has_its_exponent_and_others_are_rounded_up() -> None:
    exponents = torch.arange(255, dtype=torch.uint8)
    powers = number_formats.from_e8m0(exponents)
    assert powers.tolist() == [2.0 ** (number - 127) for number in range(255)]
    assert torch.equal(number_formats.to_e8m0(powers), exponents)
    above = torch.nextafter(powers, torch.tensor(torch.inf))
    assert torch.equal(number_formats.to_e8m0(above[:-1]), exponents[1:])
    assert torch.equal(number_formats.inverse_of_e8m0(exponents[1:]) * powers[1:], torch.ones(254))


def test_fp4_rounds_to_the_nearest_value_and_ties_to_even_codes() -> None:
    table = torch.tensor(number_formats.FP4_VALUES)
    codes = torch.arange(16, dtype=torch.uint8)
    both = torch.cat((table, -table))
    pairs = number_formats.to_float4(both[1:8].repeat_interleave(2))
    assert torch.equal(pairs, codes[1:8] * 17)  # the same value in both halves of a byte
    ties = (table[:-1] + table[1:]) / 2
    rounded = number_formats.from_float4(number_formats.to_float4(torch.cat((ties, -ties))))
    even = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0])
    assert torch.equal(rounded, torch.cat((even, -even)))
    data = torch.randint(256, (6, 4), dtype=torch.uint8)
    swapped = number_formats.from_float4(number_formats.swap_float4(data))
    assert torch.equal(swapped, number_formats.from_float4(data).T)


# ---- numerics that the package has in Python


def compare_current_scaling(dtype: torch.dtype, number: int, settings: dict[str, Any]) -> None:
    te = use()
    from transformer_engine.pytorch.custom_recipes.reference_current_scaling import (
        CurrentScalingQuantizerRef,
    )

    fp8 = {7: torch.float8_e4m3fn, 8: torch.float8_e5m2}[number]
    names = {"pow_2_scales": "force_pow_2_scales", "eps": "amax_epsilon"}
    own = {names[name]: value for name, value in settings.items()}
    x = matrix(96, 160, dtype=dtype)
    result = te.Float8CurrentScalingQuantizer(te.DType(number), "cpu", **own)(x)
    expected = CurrentScalingQuantizerRef(fp8, **settings).quantize(x)
    assert torch.equal(result._data, expected.data.view(torch.uint8))
    assert torch.equal(result._scale_inv, expected.scale)
    if result._transpose is not None:
        assert torch.equal(result._transpose, expected.data_t.view(torch.uint8))
    dequantized = CurrentScalingQuantizerRef(fp8).dequantize(expected.data, expected.scale)
    assert torch.equal(result.dequantize(dtype=torch.float32), dequantized)


@pytest.mark.exhaustive
@pytest.mark.parametrize("settings", [{}, {"pow_2_scales": True}, {"eps": 1e4}], ids=str)
@pytest.mark.parametrize("number", [7, 8], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_current_scaling_is_that_of_the_reference(
    hopper: RunOnRanks, dtype: torch.dtype, number: int, settings: dict[str, Any]
) -> None:
    hopper(compare_current_scaling, dtype, number, settings)


def compare_nvfp4(dtype: torch.dtype, tile: tuple[int, int], rotated: bool) -> None:
    te = use()
    from transformer_engine.pytorch.custom_recipes import reference_nvfp4, reference_utils

    x = matrix(96, 160, dtype=dtype)
    expected = reference_nvfp4.NVFP4QuantizerRef(
        dtype=reference_utils.Fp4Formats.E2M1, quant_tile_shape=tile, with_rht=rotated
    ).quantize(x)
    quantizer = te.NVFP4Quantizer(
        with_rht=rotated, with_post_rht_amax=rotated, with_2d_quantization=tile == (16, 16)
    )
    result = quantizer(x)
    assert torch.equal(result._rowwise_data, expected.data)
    assert torch.equal(result._rowwise_scale_inv[:96, :10], expected.scale.view(torch.uint8))
    assert torch.equal(result._amax_rowwise, expected.global_amax_row)
    assert torch.equal(result._columnwise_data, expected.data_t)
    assert torch.equal(result._columnwise_scale_inv[:160, :6], expected.scale_t.view(torch.uint8))
    assert torch.equal(result._amax_columnwise, expected.global_amax_col)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("dtype", "tile", "rotated"),
    [
        (torch.bfloat16, (1, 16), False),
        (torch.float32, (1, 16), False),
        (torch.bfloat16, (1, 16), True),
        (torch.bfloat16, (16, 16), False),
        (torch.float32, (16, 16), False),
    ],
    ids=["bf16", "fp32", "bf16-rotated", "bf16-tiles", "fp32-tiles"],
)
def test_nvfp4_is_that_of_the_reference(
    blackwell: RunOnRanks, dtype: torch.dtype, tile: tuple[int, int], rotated: bool
) -> None:
    blackwell(compare_nvfp4, dtype, tile, rotated)


def compare_delayed_scaling(algorithm: str, margin: int) -> None:
    use()
    import transformer_engine_torch
    from transformer_engine.common import recipe
    from transformer_engine.pytorch.quantization import _amax_and_scale_update

    settings = recipe.DelayedScaling(amax_compute_algo=algorithm, margin=margin)
    history = 2.0 ** torch.randint(-9, 9, (5, 3))  # what is not a power of two is rounded twice
    history[:, 1] = 0  # never used
    expected_history, expected_scale = history.clone(), torch.tensor([1.0, 2.0, 3.0])
    _amax_and_scale_update(expected_history, expected_scale, 448.0, settings)
    scale = torch.tensor([1.0, 2.0, 3.0])
    transformer_engine_torch.fused_amax_and_scale_update_after_reduction(
        history[0].clone(), [history], [scale], algorithm, 7, margin
    )
    assert torch.equal(scale, expected_scale)
    assert torch.equal(history, expected_history)


@pytest.mark.exhaustive
@pytest.mark.parametrize("margin", [0, 2])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_delayed_scaling_is_updated_as_without_the_kernel(
    blackwell: RunOnRanks, algorithm: str, margin: int
) -> None:
    blackwell(compare_delayed_scaling, algorithm, margin)


# ---- numerics that are only in kernels: by their definitions


def quantize_mxfp8(x: torch.Tensor) -> dict[str, torch.Tensor]:
    te = use()
    result = te.MXFP8Quantizer(te.DType.kFloat8E4M3)(x)
    inner = {name: getattr(result, name) for name, _ in type(result)._INNER_TENSORS}
    read = {"values": values(result), "values_columnwise": values(result, columnwise=True)}
    return {**inner, **read, "dequantized": result.dequantize(dtype=torch.float32)}


def block_by_block(x: torch.Tensor, largest: float = 448.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what 32 values of a row become, and the E8M0 scales: one block after the other."""
    result, scales = torch.empty_like(x, dtype=torch.float32), []
    for row, target in zip(x.float(), result):
        for block, out in zip(row.split(32), target.split(32)):
            amax = block.abs().max()
            exponent = torch.log2(amax / largest).ceil().clamp(min=-127)
            scales.append(int(exponent) + 127)
            scale = 2.0**exponent if amax else torch.tensor(1.0)
            out.copy_((block / scale).to(torch.float8_e4m3fn).float() * scale)
    return result, torch.tensor(scales, dtype=torch.uint8).reshape(x.shape[0], -1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_mxfp8_has_a_power_of_two_for_32_values(blackwell: RunOnRanks, dtype: torch.dtype) -> None:
    x = matrix(64, 160, dtype=dtype)
    (result, _) = blackwell(quantize_mxfp8, x)
    rows, scales = block_by_block(x)
    columns, scales_t = block_by_block(x.T)
    assert torch.equal(result["_rowwise_scale_inv"][:64, :5], scales)
    assert torch.equal(result["_columnwise_scale_inv"][:2, :160], scales_t.T)
    assert torch.equal(result["values"], rows) and torch.equal(result["dequantized"], rows)
    assert torch.equal(result["values_columnwise"], columns.T)


def quantize_in_blocks(x: torch.Tensor, dims: int, power_of_two: bool) -> list[torch.Tensor]:
    te = use()
    result = te.Float8BlockQuantizer(
        te.DType.kFloat8E4M3,
        rowwise=True,
        columnwise=True,
        block_scaling_dim=dims,
        force_pow_2_scales=power_of_two,
    )(x)
    found = [values(result), values(result, columnwise=True)]
    found.append(result.dequantize(dtype=torch.float32))
    result.update_usage(rowwise_usage=False)
    return [*found, result.dequantize(dtype=torch.float32)]


def tile_by_tile(x: torch.Tensor, rows: int, power_of_two: bool) -> torch.Tensor:
    """Return what tiles of `rows` times 128 values become, one after the other."""
    result = torch.empty_like(x, dtype=torch.float32)
    for strip, target in zip(x.float().split(rows), result.split(rows)):
        for tile, out in zip(strip.split(128, dim=1), target.split(128, dim=1)):
            scale = torch.tensor(448.0) / tile.abs().max()
            scale = torch.where(tile.any(), scale, 1.0)
            if power_of_two:
                scale = 2.0 ** scale.log2().floor()
            out.copy_((tile * scale).to(torch.float8_e4m3fn).float() * (1 / scale))
    return result


@pytest.mark.exhaustive
@pytest.mark.parametrize("power_of_two", [True, False], ids=["power_of_two", "any_scale"])
@pytest.mark.parametrize("dims", [1, 2], ids=["rows", "tiles"])
def test_blocks_are_scaled_as_the_package_reads_them(
    blackwell: RunOnRanks, dims: int, power_of_two: bool
) -> None:
    x = matrix(160, 300)
    rows = 1 if dims == 1 else 128
    expected = tile_by_tile(x, rows, power_of_two)
    columnwise = tile_by_tile(x.T, rows, power_of_two).T
    found = blackwell(quantize_in_blocks, x, dims, power_of_two)[0]
    for result, wanted in zip(found, (expected, columnwise, expected, columnwise)):
        assert torch.equal(result, wanted)
