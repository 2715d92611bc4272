# SPDX-License-Identifier: Apache-2.0
"""Models on the meta device that a function, or transformers, gives their first weights."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.fsdp.dtensor.tensor_part import full_tensor
from megatron_fsdp import fully_shard_model
from tests.fsdp.test_hugging_face import MODELS, tokens
from tests.support.fsdp.meshes import shard_mesh
from tests.support.fsdp.models import WIDTH
from tests.support.fsdp.reference import Ranks, close
from tests.support.fsdp.wrong_calls import message_of


class ScaleNorm(nn.Module):
    """A norm as models of Hugging Face have them: without ``reset_parameters``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("scale", torch.full((WIDTH,), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.scale


def build_normed() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), ScaleNorm()) for _ in range(2)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 3))


def initialise(module: nn.Module) -> None:
    if isinstance(module, ScaleNorm):
        module.weight.fill_(1.5)
        module.scale.fill_(3.0)
    else:
        nn.init.normal_(module.weight)
        module.bias.zero_()


def initialise_by_function(level: int) -> dict[str, Tensor]:
    with torch.device("meta"):
        module = build_normed()
    torch.manual_seed(9)
    model = fully_shard_model(
        module,
        shard_mesh(),
        zero_dp_strategy=level,
        fsdp_unit_modules=[nn.Sequential],
        init_model_with_meta_device=True,
        param_init_fn=initialise,
    )
    model(torch.ones(2, WIDTH)).sum().backward()
    assert torch.equal(model.module[0][1].scale, torch.full((WIDTH,), 3.0))
    return {name: full_tensor(parameter) for name, parameter in model.named_parameters()}


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [1, 3])
def test_a_function_initialises_every_module(ranks: Ranks, level: int) -> None:
    torch.manual_seed(9)
    expected = build_normed()
    torch.manual_seed(9)
    with torch.no_grad():
        for module in expected.modules():
            if next(module.parameters(recurse=False), None) is not None:
                initialise(module)
    for world_size in (1, 2):
        for values in ranks(world_size, initialise_by_function, level):
            for name, value in values.items():
                assert torch.equal(value, expected.get_parameter(name.removeprefix("module.")))


def leave_something_out() -> list[str]:
    messages = []
    for function in (None, lambda module: None):
        with torch.device("meta"):
            module = build_normed()
        settings = {"init_model_with_meta_device": True, "param_init_fn": function}
        messages.append(message_of(ValueError, fully_shard_model, module, **settings))
    return messages


def test_modules_without_values_are_named_with_the_remedy(ranks: Ranks) -> None:
    first, second = ranks(2, leave_something_out)
    assert first == second
    assert "ScaleNorm: weight, scale" in first[0] and "param_init_fn" in first[0]
    assert "param_init_fn gives no values to Linear.weight, Linear.bias" in first[1]


def initialise_transformers(name: str, level: int, with_units: bool) -> dict[str, Tensor]:
    """Return whole weights and buffers, after a training step of which the loss is checked."""
    build, layer = MODELS[name]
    with torch.device("meta"):
        module = build()
    torch.manual_seed(4)
    settings: dict[str, Any] = {"fsdp_unit_modules": [layer] if with_units else None}
    model = fully_shard_model(
        module,
        shard_mesh(),
        zero_dp_strategy=level,
        init_model_with_meta_device=True,
        preserve_fp32_weights=False,
        **settings,
    )
    state = {
        name.removeprefix("module."): full_tensor(parameter).detach()
        for name, parameter in model.named_parameters()
    }
    reference = build()
    for buffer_name, buffer in model.module.named_buffers():
        close(buffer, reference.get_buffer(buffer_name), buffer_name)
    reference.load_state_dict(
        state, strict=name == "llama"
    )  # without the second name of a tied one
    batch = tokens(0, 0)
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    close(loss, reference(input_ids=batch, labels=batch).loss, "loss")
    return state


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("model", "with_units"),
    [("llama", True), ("tied_llama", False), ("gpt2", True), ("gpt2", False)],
)
def test_transformers_initialise_their_own_models(
    ranks: Ranks, model: str, with_units: bool
) -> None:
    (alone,) = ranks(1, initialise_transformers, model, 3, with_units)
    for state in ranks(2, initialise_transformers, model, 3, with_units):
        for name, value in state.items():
            assert torch.equal(value, alone[name]), name
            if "norm" in name or "ln_" in name:
                assert (value == (0.0 if name.endswith("bias") else 1.0)).all()
            elif name.endswith("bias"):
                assert not value.any()
            else:
                # GPT-2 scales what adds to the residual stream by its depth: two layers of two.
                wanted = 0.02 / (2 if model == "gpt2" and "c_proj" in name else 1)
                assert 0.7 * wanted < float(value.std()) < 1.3 * wanted, name
