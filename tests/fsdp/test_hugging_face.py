# SPDX-License-Identifier: Apache-2.0
"""Models of Hugging Face transformers: training, generation, outputs and state dicts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.fsdp.dtensor.tensor_part import full_tensor
from megatron_fsdp import MegatronFSDP, fully_shard
from tests.support.fsdp.reference import TOLERANCE, Ranks, close, compare_shards, optimizer_over
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


def train(
    name: str, recompute: str, steps: int = 2, **settings: Any
) -> tuple[nn.Module, MegatronFSDP]:
    """Compare losses, gradients and weights of every step with the unsharded model in float64."""
    build, _ = MODELS[name]
    reference, module = build(), build()
    if recompute:
        module.gradient_checkpointing_enable({"use_reentrant": recompute == "reentrant"})
        if recompute == "reentrant":
            # Without it torch's reentrant kind gives the first layer no gradients
            module.enable_input_require_grads()
    expected_optimizer = optimizer_over(reference, "fused_adamw")
    model, optimizer = fully_shard(module, optimizer_over(module, "fused_adamw"), **settings)
    # The one-line call keeps fp32 main weights and gradients unless told otherwise; fp64 weights
    # are rounded to them.
    tolerance = TOLERANCE if "preserve_fp32_weights" in settings else 2e-6
    for each in (reference, model):
        each.train()
    for step in range(steps):
        expected_optimizer.zero_grad()
        losses = [loss_on(reference, step, rank) for rank in range(dist.get_world_size())]
        (sum(losses) / dist.get_world_size()).backward()
        optimizer.zero_grad()
        loss = loss_on(model, step, dist.get_rank())
        close(loss, losses[dist.get_rank()], f"loss of step {step}", tolerance)
        loss.backward()
        gradients = {key: parameter.grad.clone() for key, parameter in reference.named_parameters()}
        actual = {key: parameter.grad for key, parameter in model.named_parameters()}
        compare_shards(model, actual, gradients, f"gradient in step {step}", tolerance)
        expected_optimizer.step()
        optimizer.step()
        weights = {key: parameter.detach() for key, parameter in reference.named_parameters()}
        compare_shards(
            model, dict(model.named_parameters()), weights, f"weight after step {step}", tolerance
        )
    return reference, model


def train_at_levels(name: str, recompute: str, levels: tuple[int, ...], by_path: bool) -> None:
    units = [MODELS[name][1] if by_path else import_class(MODELS[name][1])]
    for level in levels:
        settings = {
            "zero_dp_strategy": level,
            "fsdp_unit_modules": units,
            "preserve_fp32_weights": False,
        }
        reference, model = train(name, recompute, **settings)
        for each in (reference, model):
            each.eval()
        with torch.no_grad():
            close(model(tokens(9, 0)).logits, reference(tokens(9, 0)).logits, "evaluation")


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


def train_without_units(name: str) -> None:
    train(name, "", preserve_fp32_weights=False)


@pytest.mark.always("llama")
@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_one_line_is_enough(ranks: Ranks, model: str) -> None:
    ranks(2, train_without_units, model)


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
    compare_shards(
        model,
        {key: parameter.grad for key, parameter in model.named_parameters()},
        gradients,
        "gradient",
    )


@pytest.mark.always("tied_llama")
@pytest.mark.parametrize("model", MODELS)
def test_model_outputs_are_whole_and_differentiable(ranks: Ranks, model: str) -> None:
    ranks(2, outputs, model)


def generate(name: str) -> None:
    """Generate greedily, with a cache and without; then train on."""
    reference, model = train(
        name, "", steps=1, fsdp_unit_modules=[MODELS[name][1]], preserve_fp32_weights=False
    )
    prompt = tokens(3, 0)
    for use_cache in (True, False):
        settings = {
            "max_new_tokens": 5,
            "do_sample": False,
            "use_cache": use_cache,
            "attention_mask": torch.ones_like(prompt),
        }
        with torch.no_grad():
            expected = reference.generate(prompt, **settings)
            assert expected.shape == (2, LENGTH + 5)
            assert torch.equal(model.module.generate(prompt, **settings), expected)
    assert {group.state.name for group in model.groups} == {"SHARDED"}
    loss_on(model, 1, dist.get_rank()).backward()
    sum(loss_on(reference, 1, rank) for rank in range(2)).backward()
    # `train` left gradients of its step, to which these are added on both sides.
    gradients = {key: parameter.grad for key, parameter in reference.named_parameters()}
    for key, parameter in model.named_parameters():
        assert full_tensor(parameter.grad).shape == gradients[key.removeprefix("module.")].shape


@pytest.mark.always("llama")
@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_generation_gives_the_same_tokens(ranks: Ranks, model: str) -> None:
    ranks(2, generate, model)


def back_into_the_unsharded_model(name: str) -> None:
    reference, model = train(
        name, "", steps=2, fsdp_unit_modules=[MODELS[name][1]], preserve_fp32_weights=False
    )
    state = {key.removeprefix("module."): full(value) for key, value in model.state_dict().items()}
    fresh = MODELS[name][0]()
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.zero_()
    assert set(state) == set(fresh.state_dict())
    fresh.load_state_dict(state)
    for key, parameter in fresh.named_parameters():
        close(parameter, reference.get_parameter(key), key)
    model.load_state_dict(
        MODELS[name][0]().state_dict()
    )  # and the other way, by the model's own names
    with torch.no_grad():
        close(model(tokens(0, 0)).logits, MODELS[name][0]()(tokens(0, 0)).logits, "logits")


def full(value: Tensor) -> Tensor:
    return full_tensor(value) if hasattr(value, "device_mesh") else value


@pytest.mark.always("llama")
@pytest.mark.parametrize("model", ["llama", "tied_llama"])
def test_a_state_dict_of_whole_tensors_loads_into_the_unsharded_model(
    ranks: Ranks, model: str
) -> None:
    ranks(2, back_into_the_unsharded_model, model)
