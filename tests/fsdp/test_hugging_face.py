# SPDX-License-Identifier: Apache-2.0
"""Models of Hugging Face transformers: training and outputs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_fsdp import fully_shard
from tests.support.fsdp.reference import (
    Ranks,
    close,
    compare_shards,
    optimizer_over,
    shown_gradients,
)
from tests.support.fsdp.side_by_side import train_side_by_side
from tests.support.huggingface import tiny_runs
from tests.support.huggingface.tiny_runs import VOCABULARY

transformers = pytest.importorskip("transformers", reason="needs the package transformers")


LENGTH = 9


LLAMA_LAYER = "transformers.models.llama.modeling_llama.LlamaDecoderLayer"


GPT2_LAYER = "transformers.models.gpt2.modeling_gpt2.GPT2Block"


def build_llama(tied: bool = False) -> nn.Module:
    return tiny_runs.build_llama(tied, torch.float64, end=None)


def build_gpt2() -> nn.Module:
    """Build a model whose output layer has the weight of its embedding."""
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=12,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    torch.manual_seed(7)
    return transformers.GPT2LMHeadModel(config).double()


def build_tied_llama() -> nn.Module:
    return build_llama(tied=True)


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "llama": (build_llama, LLAMA_LAYER),
    "tied_llama": (build_tied_llama, LLAMA_LAYER),
    "gpt2": (build_gpt2, GPT2_LAYER),
}


def tokens(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(step * 8 + rank)
    return torch.randint(2, VOCABULARY, (2, LENGTH), generator=generator)


def loss_on(model: nn.Module, step: int, rank: int) -> Tensor:
    batch = tokens(step, rank)
    output = model(input_ids=batch, labels=batch)
    assert isinstance(output, transformers.modeling_outputs.ModelOutput)
    return output.loss


def backward(model: nn.Module, step: int, rank: int) -> None:
    loss_on(model, step, rank).backward()


def train(name: str, recompute: str, level: int, units: list[Any] | None) -> None:
    """Compare gradients and weights of two steps, and outputs, with the unsharded model."""
    build, _ = MODELS[name]

    def build_sharded() -> nn.Module:
        module = build()
        if recompute:
            module.gradient_checkpointing_enable({"use_reentrant": recompute == "reentrant"})
        if recompute == "reentrant":
            # Without it torch's reentrant kind gives the first layer no gradients
            module.enable_input_require_grads()
        return module

    reference, model = train_side_by_side(
        build,
        backward,
        level,
        steps=2,
        prepare=nn.Module.train,
        build_sharded=build_sharded,
        fsdp_unit_modules=units,
    )
    for each in (reference, model):
        each.eval()
    with torch.no_grad():
        close(model(tokens(9, 0)).logits, reference(tokens(9, 0)).logits, "evaluation")


def train_at_levels(name: str, recompute: str, levels: tuple[int, ...], by_path: bool) -> None:
    layer = MODELS[name][1]
    for level in levels:
        train(name, recompute, level, [layer if by_path else import_class(layer)])


def import_class(path: str) -> type:
    module, _, name = path.rpartition(".")
    return getattr(__import__(module, fromlist=[name]), name)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("model", "recompute", "levels"),
    [
        ("llama", "", (0, 2, 3)),
        ("tied_llama", "", (1, 3)),
        ("gpt2", "", (2, 3)),
        ("llama", "reentrant", (3,)),
        ("tied_llama", "reentrant", (3,)),
        ("gpt2", "non_reentrant", (3,)),
    ],
)
def test_training_matches_the_unsharded_model(
    ranks: Ranks, model: str, recompute: str, levels: tuple[int, ...]
) -> None:
    ranks(2, train_at_levels, model, recompute, levels, by_path=model == "llama")


@pytest.mark.always("llama")
@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_one_line_is_enough(ranks: Ranks, model: str) -> None:
    ranks(2, train, model, "", 3, None)


def outputs(name: str) -> None:
    """Check that outputs are there by name, by key and by number, and have gradients."""
    build, layer = MODELS[name]
    reference, module = build(), build()
    model, _ = fully_shard(
        module, optimizer_over(module), fsdp_unit_modules=[layer], preserve_fp32_weights=False
    )
    batch = tokens(0, 0)
    actual, expected = (
        each(input_ids=batch, output_hidden_states=True, use_cache=True)
        for each in (model, reference)
    )
    assert type(actual) is type(expected) and list(actual) == list(expected)
    for left, right in zip(actual.hidden_states, expected.hidden_states, strict=True):
        close(left, right, "hidden state")
    close(actual["logits"], expected[0], "logits")
    assert actual.past_key_values.get_seq_length() == LENGTH
    sum(state.pow(2).mean() for state in actual.hidden_states).backward()
    sum(state.pow(2).mean() for state in expected.hidden_states).backward()
    gradients = {
        key: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for key, parameter in reference.named_parameters()
    }
    compare_shards(model, shown_gradients(model), gradients, "gradient")


@pytest.mark.always("tied_llama")
@pytest.mark.parametrize("model", MODELS)
def test_model_outputs_are_whole_and_differentiable(ranks: Ranks, model: str) -> None:
    ranks(2, outputs, model)
