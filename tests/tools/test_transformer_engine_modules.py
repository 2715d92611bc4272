# SPDX-License-Identifier: Apache-2.0
"""Modules of Transformer Engine run on CPU ranks under every recipe, and can be trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.pairwise import each_value, pairwise
from tests.support.transformer_engine.ranks import RunOnRanks
from tools.transformer_engine_on_cpu import use

pytestmark = pytest.mark.exhaustive
"""`make test` starts ranks with Transformer Engine for few files: a start takes seconds."""

ERRORS = {
    "DelayedScaling": 0.15,
    "Float8CurrentScaling": 0.12,
    "Float8BlockScaling": 0.1,
    "MXFP8BlockScaling": 0.1,
    "NVFP4BlockScaling": 0.35,
}
"""Recipe -> the largest error that the gradients of the modules here may have with it."""
RECIPES = tuple(ERRORS)
MODULES: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("Linear", dict(in_features=128, out_features=256)),
    "layernorm_linear": ("LayerNormLinear", dict(in_features=128, out_features=256)),
    "rmsnorm_linear": (
        "LayerNormLinear",
        dict(in_features=128, out_features=256, normalization="RMSNorm", bias=False),
    ),
    "layernorm_mlp": ("LayerNormMLP", dict(hidden_size=128, ffn_hidden_size=256)),
    "swiglu_mlp": (
        "LayerNormMLP",
        dict(hidden_size=128, ffn_hidden_size=256, activation="swiglu", bias=False),
    ),
    "grouped_linear": ("GroupedLinear", dict(num_gemms=2, in_features=128, out_features=256)),
    "transformer_layer": (
        "TransformerLayer",
        dict(
            hidden_size=128,
            ffn_hidden_size=256,
            num_attention_heads=4,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            fuse_qkv_params=True,  # quantized weights cannot be split
        ),
    ),
}


# ---- modules


def gradients(module: Any, x: torch.Tensor, recipe: Any = None) -> list[torch.Tensor]:
    """Return the output and all gradients; delayed scaling has three passes to learn its scales."""
    te = use()
    splits = ([96, 160],) if isinstance(module, te.GroupedLinear) else ()
    for _ in range(3 if recipe is not None else 1):
        module.zero_grad()
        leaf = x.clone().requires_grad_()
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            output = module(leaf, *splits)
        output.backward(output.detach())  # of half its square
    grads = [param.grad for param in module.parameters()]
    return [tensor.detach().float() for tensor in (output, leaf.grad, *grads)]


def module_and_plain(name: str, recipe_name: str, quantized: bool) -> tuple[Any, Any, Any]:
    te = use()
    from transformer_engine.common import recipe as recipes

    recipe = getattr(recipes, recipe_name)()
    cls, settings = MODULES[name]
    built = []
    for enabled in (False, quantized):
        torch.manual_seed(3)
        with te.quantized_model_init(enabled, recipe, preserve_high_precision_init_val=True):
            built.append(getattr(te, cls)(**settings, params_dtype=torch.bfloat16))
    return built[1], built[0], recipe


def errors_of_module(name: str, recipe_name: str, quantized: bool) -> list[float]:
    """Return the relative errors of the output and all gradients."""
    module, plain, recipe = module_and_plain(name, recipe_name, quantized)
    num_quantized = 0
    for param, initial in zip(module.parameters(), plain.parameters()):
        if hasattr(param, "get_high_precision_init_val"):
            num_quantized += 1
            assert torch.equal(param.get_high_precision_init_val(), initial)
    weights = sum(param.dim() == 2 for param in plain.parameters())
    assert num_quantized == (weights if quantized else 0)
    torch.manual_seed(4)
    shape = (64, 4, 128) if name == "transformer_layer" else (256, 128)
    x = torch.randn(shape, dtype=torch.bfloat16)
    expected, found = gradients(plain, x), gradients(module, x, recipe)
    return [((b - a).norm() / a.norm()).item() for a, b in zip(expected, found)]


@pytest.mark.parametrize(
    ("name", "recipe", "quantized"),
    pairwise(name=MODULES, recipe=RECIPES, quantized=[False, True]),
)
def test_modules_compute_within_the_error_of_the_format(
    blackwell: RunOnRanks, name: str, recipe: str, quantized: bool
) -> None:
    first, second = blackwell(errors_of_module, name, recipe, quantized)
    assert 0 < max(first) < ERRORS[recipe], first
    if recipe != "NVFP4BlockScaling":  # it rounds gradients at random
        assert first == second


@pytest.mark.parametrize(
    ("name", "recipe", "quantized"),
    each_value(
        [("linear", "Float8CurrentScaling", True), ("transformer_layer", "DelayedScaling", True)],
        name=MODULES,
        recipe=RECIPES[:3],
        quantized=[False, True],
    ),
)
def test_modules_compute_the_same_with_transposed_weights(
    hopper: RunOnRanks, name: str, recipe: str, quantized: bool
) -> None:
    assert 0 < max(hopper(errors_of_module, name, recipe, quantized)[0]) < ERRORS[recipe]


def gradient_with_a_stale_copy() -> tuple[bool, bool]:
    module, _, recipe = module_and_plain("linear", "Float8CurrentScaling", True)
    module.weight._create_transpose()
    module.weight._transpose.zero_()
    output, grad, *_ = gradients(module, torch.randn(64, 128, dtype=torch.bfloat16), recipe)
    return bool(output.any()), bool(grad.any())


def test_a_stale_transposed_copy_is_read_as_on_the_device(hopper: RunOnRanks) -> None:
    assert hopper(gradient_with_a_stale_copy)[0] == (True, False)


def gradients_of_groups(recipe_name: str) -> list[bool]:
    module, _, recipe = module_and_plain("grouped_linear", recipe_name, True)
    with use().autocast(enabled=True, recipe=recipe):
        output = module(torch.randn(64, 128, dtype=torch.bfloat16), [0, 64])
    output.backward(output.detach())
    return [bool(getattr(module, name).grad.any()) for name in ("weight0", "weight1")]


@pytest.mark.parametrize("recipe", RECIPES)
def test_groups_may_be_empty(blackwell: RunOnRanks, recipe: str) -> None:
    assert blackwell(gradients_of_groups, recipe)[0] == [False, True]


def differences_from_reference(name: str, recipe_name: str) -> list[float]:
    """Return the relative differences from the recipe whose numerics the package has in Python."""
    from transformer_engine.common import recipe as recipes
    from transformer_engine.pytorch.custom_recipes import (
        reference_current_scaling,
        reference_nvfp4,
    )

    if recipe_name == "Float8CurrentScaling":
        own, factory = recipes.Float8CurrentScaling(), "current_scaling_ref_factory"
        reference = getattr(reference_current_scaling, factory)
    else:
        own = recipes.NVFP4BlockScaling(disable_stochastic_rounding=True)
        reference = reference_nvfp4.nvfp4_ref_rht_2d_factory
    cls, settings = MODULES[name]
    torch.manual_seed(3)
    module = getattr(use(), cls)(**{**settings, "bias": False}, params_dtype=torch.bfloat16)
    x = torch.randn(256, 128, dtype=torch.bfloat16)
    expected = gradients(module, x, recipes.CustomRecipe(qfactory=reference))
    found = gradients(module, x, own)
    return [((b - a).norm() / a.norm()).item() for a, b in zip(expected, found)]


@pytest.mark.parametrize("recipe", ["Float8CurrentScaling", "NVFP4BlockScaling"])
@pytest.mark.parametrize("name", ["linear", "rmsnorm_linear"])
def test_modules_compute_what_they_do_with_reference_recipes(
    blackwell: RunOnRanks, name: str, recipe: str
) -> None:
    # NVFP4 multiplies in another order. Products in FP8 are those of torch, whose kernels add up in
    # an order that depends on the machine: 1.5e-4 was seen, where most have equal bits.
    largest = 0.01 if recipe == "NVFP4BlockScaling" else 1e-3
    assert max(blackwell(differences_from_reference, name, recipe)[0]) <= largest


def shard_by_torch(recipe_name: str, meta: bool) -> tuple[str, bool]:
    """Return the type of local weights, and whether outputs are those of the whole module."""
    te = use()
    from torch.distributed.fsdp import fully_shard
    from transformer_engine.common import recipe as recipes

    recipe = getattr(recipes, recipe_name)()
    size = dict(in_features=256, out_features=256, params_dtype=torch.bfloat16)
    with te.quantized_model_init(True, recipe):
        module = te.Linear(**size, device="meta" if meta else "cpu")
        whole = te.Linear(**size)
    x = torch.randn(64, 256, dtype=torch.bfloat16)
    mesh = dist.init_device_mesh("cpu", (2,))
    fully_shard(module, mesh=mesh)
    if meta:
        module.reset_parameters()
    local = module.weight._local_tensor
    rows = torch.empty(256, 256)
    dist.all_gather_into_tensor(rows, local.dequantize().float().contiguous())
    with torch.no_grad():
        whole.weight.copy_(rows.bfloat16())
        whole.bias.copy_(module.bias.full_tensor())
    outputs = []
    for each in (module, whole):
        with te.autocast(enabled=True, recipe=recipe):
            outputs.append(each(x))
        te.quantization.FP8GlobalStateManager.reset()
    outputs[0].sum().backward()
    assert module.weight.grad._local_tensor.shape == (128, 256)
    return type(local).__name__, torch.equal(*outputs)


@pytest.mark.parametrize(
    ("recipe", "meta", "local"),
    [
        ("DelayedScaling", False, "Float8Tensor"),
        ("Float8CurrentScaling", False, "Float8Tensor"),
        ("MXFP8BlockScaling", False, "MXFP8Tensor"),
        ("Float8BlockScaling", True, "Float8BlockwiseQTensor"),
        ("NVFP4BlockScaling", True, "NVFP4Tensor"),
    ],
)
def test_quantized_weights_are_sharded_by_torch(
    blackwell: RunOnRanks, recipe: str, meta: bool, local: str
) -> None:
    assert blackwell(shard_by_torch, recipe, meta) == [(local, True)] * 2


# ---- training with master weights


def inner_tensors(weight: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a weight, of its scales only those of blocks that are there."""
    found = {name: getattr(weight, name) for name, _ in type(weight)._INNER_TENSORS}
    rows, columns = weight.shape
    used = {
        "Float8BlockwiseQTensor": ((-(-rows // 128), -(-columns // 128)),) * 2,
        "MXFP8Tensor": ((rows, columns // 32), (rows // 32, columns)),
        "NVFP4Tensor": ((rows, columns // 16), (columns, rows // 16)),
    }.get(type(weight).__name__)
    if used is not None:
        if type(weight).__name__ == "Float8BlockwiseQTensor":
            used = (used[0], used[0][::-1])  # those of the transposed matrix
        for name, (height, width) in zip(("rowwise", "columnwise"), used):
            scales = found[f"_{name}_scale_inv"]
            found[f"_{name}_scale_inv"] = scales[:height, :width]
    return found


def quantize_parts(recipe_name: str, cut: int, sharded: bool) -> list[str]:
    """Quantize a part of the master weight on each rank; return what differs from the whole."""
    te = use()
    from transformer_engine.common import recipe as recipes
    from transformer_engine.pytorch.tensor.utils import (
        post_all_gather_processing,
        quantize_master_weights,
    )

    recipe = getattr(recipes, recipe_name)()
    with te.quantized_model_init(True, recipe, preserve_high_precision_init_val=True):
        weight = te.Linear(96, 160, bias=False, params_dtype=torch.bfloat16).weight
    master = torch.randn(160, 96) * torch.logspace(-2, 2, 96)
    if recipe_name == "DelayedScaling":
        weight._get_quantizer().scale.fill_(0.5)
    expected = weight._get_quantizer()(master.bfloat16())
    assert weight.get_high_precision_init_val() is not None
    start, end = [(0, cut), (cut, master.numel())][dist.get_rank()]
    # Two values of NVFP4 are in a byte
    of_byte = 2 if recipe_name == "NVFP4BlockScaling" else 1
    names = [name for name in ("_data", "_rowwise_data") if hasattr(weight, name)]
    names += ["_columnwise_data"] if recipe_name == "MXFP8BlockScaling" else []
    whole = [getattr(weight, name).view(-1) for name in names]
    parts = [data[start // of_byte : end // of_byte] for data in whole]
    if sharded:
        parts = [torch.zeros_like(part) for part in parts]
    shards = [tuple(parts) if len(parts) > 1 else parts[0]] if sharded else None
    quantize_master_weights(
        [weight], [master.view(-1)[start:end]], [start], dist.group.WORLD, shards
    )
    assert weight.get_high_precision_init_val() is None
    for data, part in zip(whole, parts):
        mine = torch.zeros(len(data), dtype=torch.int32)
        mine[start // of_byte : end // of_byte] = part
        dist.all_reduce(mine)
        data.copy_(mine)
    post_all_gather_processing([weight])
    found, wanted = inner_tensors(weight), inner_tensors(expected)
    return [
        name
        for name, tensor in wanted.items()
        if (tensor is None) != (found[name] is None)
        or (tensor is not None and not torch.equal(tensor, found[name]))
    ]


@pytest.mark.parametrize(
    ("recipe", "cut", "sharded"),
    pairwise(recipe=RECIPES, cut=[160 * 96, 5002], sharded=[False, True]),
)
def test_parts_of_master_weights_are_quantized_as_the_whole(
    blackwell: RunOnRanks, recipe: str, cut: int, sharded: bool
) -> None:
    assert blackwell(quantize_parts, recipe, cut, sharded) == [[], []]


@pytest.mark.parametrize("recipe", RECIPES[:3])
def test_parts_of_transposed_weights_are_quantized_as_the_whole(
    hopper: RunOnRanks, recipe: str
) -> None:
    assert hopper(quantize_parts, recipe, 5002, False) == [[], []]


def cast_halves_of_a_byte() -> bool:
    use()
    import transformer_engine_torch as kernels

    part = torch.arange(1, 17) / 2
    scales = [torch.ones(1, 1)], [torch.ones(1)]
    whole, pieces = torch.zeros(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    for out, start, end in ((whole, 0, 16), (pieces[:4], 0, 7), (pieces[3:], 7, 16)):
        kernels.nvfp4_multi_tensor_2d_partial_cast(
            [part[start:end]], [out], *scales, [1], [16], [start], 16
        )
    return torch.equal(whole, pieces)


def test_parts_of_nvfp4_may_begin_within_a_byte(blackwell: RunOnRanks) -> None:
    assert all(blackwell(cast_halves_of_a_byte))


def accumulate_into_main_grad(recipe_name: str) -> bool:
    module, _, recipe = module_and_plain("linear", recipe_name, True)
    x = torch.randn(64, 128, dtype=torch.bfloat16)
    _, _, expected, _ = gradients(module, x, recipe)
    module.fuse_wgrad_accumulation = True
    module.weight.main_grad = torch.ones(256, 128)
    with use().autocast(enabled=True, recipe=recipe):
        output = module(x)
    output.backward(output.detach())
    difference = module.weight.main_grad - 1 - expected
    return bool(difference.norm() < 0.01 * expected.norm())


@pytest.mark.parametrize("recipe", RECIPES[1:4])
def test_gradients_of_quantized_weights_are_added_to_main_gradients(
    blackwell: RunOnRanks, recipe: str
) -> None:
    assert all(blackwell(accumulate_into_main_grad, recipe))


def train_with_adam(recipe_name: str) -> tuple[bool, float]:
    """Return whether the weight is its master weight quantized, and the error of that one."""
    module, plain, _ = module_and_plain("linear", recipe_name, True)
    plain.float()
    plain.weight.data.copy_(module.weight.dequantize(dtype=torch.float32))
    fused = use().optimizers.FusedAdam(module.parameters(), lr=0.01, master_weights=True)
    expected = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.0)
    for _ in range(3):
        for param, other in zip(module.parameters(), plain.parameters()):
            param.grad = torch.randn(other.shape, dtype=torch.bfloat16)
            other.grad = param.grad.float()
        fused.step()
        expected.step()
    weight, master = module.weight, fused.state[module.weight]["master_param"]
    quantized = weight._get_quantizer()(master).dequantize()
    error = (master - plain.weight).norm() / plain.weight.norm()
    return torch.equal(weight.dequantize(dtype=torch.float32), quantized), error.item()


@pytest.mark.parametrize("recipe", RECIPES)
def test_fused_adam_updates_quantized_weights(blackwell: RunOnRanks, recipe: str) -> None:
    for is_quantized, error in blackwell(train_with_adam, recipe):
        assert is_quantized and error < 1e-5
