# SPDX-License-Identifier: Apache-2.0
"""Small random models of every family, on both sides, and what they answer.

For ranks: transformers is imported late.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from safetensors.torch import load_file

from megatron.checkpoint.core.key_rules import expected_shape, is_buffer
from megatron.checkpoint.core.lazy_tensor import in_memory
from megatron.checkpoint.core.spelling import canonical_name
from megatron.checkpoint.core.training_state import TrainingState
from megatron.checkpoint.hugging_face import model_reader as hugging_face
from megatron.checkpoint.hugging_face.families import FAMILIES
from megatron.checkpoint.hugging_face.model_arguments import model_flags
from megatron.checkpoint.hugging_face.model_directory import INDEX, SINGLE_FILE
from megatron.checkpoint.hugging_face.model_writer import HuggingFaceTarget
from megatron.mcore_adapter import cpu
from megatron.pretrain.arguments import parse_arguments
from megatron.pretrain.arguments.configs import transformer_config
from megatron.pretrain.model.gpt_model import build_chunk
from tests.support.model_parallel import ONE_AXIS, initialize

VOCABULARY = 40
LENGTH = 64
LLAMA: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=LENGTH,
    rms_norm_eps=0.01,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
)
EXPERTS: dict[str, Any] = dict(
    num_hidden_layers=3, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24
)
LATENT: dict[str, Any] = LLAMA | dict(
    num_hidden_layers=3,
    num_key_value_heads=4,
    rms_norm_eps=1e-6,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=6,
    n_routed_experts=8,
    n_shared_experts=2,
    moe_intermediate_size=12,
    num_experts_per_tok=4,
    n_group=4,
    topk_group=2,
    first_k_dense_replace=1,
    routed_scaling_factor=2.5,
)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3["original_max_position_embeddings"] = 8192
YARN = dict(
    rope_type="yarn", factor=40.0, beta_fast=32, beta_slow=1, original_max_position_embeddings=4096
)
GPT2: dict[str, Any] = dict(
    vocab_size=VOCABULARY, n_embd=32, n_head=4, n_layer=2, n_positions=LENGTH
)
GPT2 |= dict(bos_token_id=None, eos_token_id=None, layer_norm_epsilon=0.01)

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", LLAMA),
    "llama_stretched_and_tied": (
        "llama",
        LLAMA | dict(tie_word_embeddings=True, rope_parameters=LLAMA3 | {"rope_theta": 500000.0}),
    ),
    "llama_wide_heads_without_groups": ("llama", LLAMA | dict(head_dim=12, num_key_value_heads=4)),
    "qwen2": ("qwen2", LLAMA),
    "qwen2_tied": ("qwen2", LLAMA | dict(tie_word_embeddings=True, num_key_value_heads=1)),
    "qwen3": ("qwen3", LLAMA | dict(head_dim=12)),
    "qwen3_tied": ("qwen3", LLAMA | dict(head_dim=16, tie_word_embeddings=True)),
    "mixtral": ("mixtral", LLAMA | dict(num_local_experts=4, num_experts_per_tok=2)),
    "qwen3_moe": (
        "qwen3_moe",
        LLAMA | EXPERTS | dict(head_dim=12, norm_topk_prob=True, mlp_only_layers=[1]),
    ),
    "qwen3_moe_scores_as_they_are": (
        "qwen3_moe",
        LLAMA | EXPERTS | dict(norm_topk_prob=False, decoder_sparse_step=2),
    ),
    "deepseek_v3": ("deepseek_v3", LATENT),
    "deepseek_v3_yarn": (
        "deepseek_v3",
        LATENT
        | dict(
            rope_parameters=YARN | {"rope_theta": 10000.0, "mscale": 1.0, "mscale_all_dim": 0.7}
        ),
    ),
    "deepseek_v3_yarn_without_mscale": (
        "deepseek_v3",
        LATENT | dict(rope_parameters=YARN | {"rope_theta": 10000.0}),
    ),
    "deepseek_v3_whole_queries_tied": (
        "deepseek_v3",
        LATENT
        | dict(
            q_lora_rank=None,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=0,
            tie_word_embeddings=True,
        ),
    ),
    "gpt2": ("gpt2", GPT2),
    "gpt2_exact_gelu_untied": (
        "gpt2",
        GPT2 | dict(activation_function="gelu", tie_word_embeddings=False, n_inner=48),
    ),
}
"""Name -> model_type and settings."""
RUN = (
    f"--seq-length {LENGTH} --micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data"
    " --tokenizer-type NullTokenizer"
)
"""Flags of a run that have nothing to do with its model."""
SHORT_RUN = (
    f"{RUN} --global-batch-size 4 --lr-decay-style constant --num-workers 0 --eval-iters 0"
    f" --vocab-size {VOCABULARY - 1}"
)
"""Flags of a run on two ranks, for models of any family."""


def randomize(model: torch.nn.Module) -> None:
    """Draw values that all matter: norms are not one, biases are not zero."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))
            elif isinstance(tensor, torch.nn.Parameter):
                values = torch.randn(tensor.shape, generator=generator)
                plain = 1.0 if "norm" in name or "ln_" in name else 0.0
                scaled = (
                    1.5 * values / tensor.shape[-1] ** 0.5
                    if tensor.dim() > 1
                    else plain + 0.3 * values
                )
                tensor.copy_(scaled)


def saved_model(kind: str, directory: Path, **options: Any) -> Any:
    """Build and save a random model of transformers.

    In the directory it has the tensors of released models.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    family, settings = KINDS[kind]
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **settings), attn_implementation="eager"
    )
    randomize(model)
    model.save_pretrained(directory, **options)
    return model.eval()


def save_model(kind: str, directory: Path) -> None:
    """Job: save a small random model."""
    saved_model(kind, directory)


def config_of(kind: str, **changes: Any) -> dict[str, Any]:
    """Content of a config.json."""
    family, settings = KINDS[kind]
    return {"model_type": family, **settings, **changes}


def random_state(kind: str, dtype: torch.dtype = torch.float32, **changes: Any) -> TrainingState:
    """Build the state of a model of this kind without either program."""
    args, problems = FAMILIES[KINDS[kind][0]].read_config(config_of(kind, **changes))
    assert not problems
    args.padded_vocab_size = args.vocab_size
    args.params_dtype = dtype
    generator = torch.Generator().manual_seed(7)
    state = TrainingState({}, args=args)
    for name in dict.fromkeys(pairing.ours for pairing in FAMILIES[KINDS[kind][0]].pairings(args)):
        values = torch.randn(expected_shape(name, args), generator=generator)
        if is_buffer(name):
            state.buffers[name] = in_memory(values)
        else:
            state.weights[name] = in_memory(values.to(dtype))
    return state


def tokens(length: int = LENGTH) -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def their_logits(model: torch.nn.Module) -> torch.Tensor:
    return model(input_ids=tokens()).logits


@torch.no_grad()
def our_logits(model: GPTModel) -> torch.Tensor:
    return model(tokens(), torch.arange(LENGTH).expand(2, LENGTH).contiguous(), None)[
        ..., :VOCABULARY
    ]


def parsed(flags: list[str]) -> argparse.Namespace:
    """Parse model flags as the training program does, with everything that follows from them."""
    words = [*flags, *RUN.split(), "--vocab-size", str(VOCABULARY - 1)]
    return parse_arguments(words, world_size=1, cuda=False, transformer_engine=False)[0]


def megatron_model(args: argparse.Namespace) -> GPTModel:
    """Build the model that the training program builds."""
    cpu.install()
    initialize(ONE_AXIS)
    model_parallel_cuda_manual_seed(5, force_reset_rng=True)
    return build_chunk(
        args, transformer_config(args), args.padded_vocab_size, torch.device("cpu"), None
    ).eval()


def own_tensors(model: GPTModel) -> dict[str, torch.Tensor]:
    """Canonical name -> parameter or stored buffer."""
    stored = {
        name for name in model.state_dict(keep_vars=True) if not name.endswith("_extra_state")
    }
    every = dict(model.named_parameters()) | dict(model.named_buffers())
    return {canonical_name(name): tensor for name, tensor in every.items() if name in stored}


def load(model: GPTModel, state: TrainingState) -> None:
    """Give the model all values of the state, which has neither more nor less."""
    content, own = state.weights | state.buffers, own_tensors(model)
    assert content.keys() == own.keys(), sorted(content.keys() ^ own.keys())
    for name, tensor in own.items():
        assert content[name].shape == tensor.shape, name
        tensor.data.copy_(content[name].read())


def state_of(model: GPTModel, args: argparse.Namespace) -> TrainingState:
    """Return the state that a reader of the model's checkpoint returns."""
    own = {name: in_memory(tensor.detach()) for name, tensor in own_tensors(model).items()}
    buffers = {name: tensor for name, tensor in own.items() if is_buffer(name)}
    return TrainingState(
        {name: tensor for name, tensor in own.items() if name not in buffers},
        buffers=buffers,
        args=args,
    )


def write(target: HuggingFaceTarget, directory: Path) -> list[int]:
    """Write all parts, last ones first; bytes that each reported.

    Results go through JSON as in a conversion.
    """
    directory.mkdir(parents=True, exist_ok=True)
    results, reported = {}, []
    for part in reversed(target.parts):
        steps: list[int] = []
        results[part.name] = json.loads(json.dumps(part.write(directory, steps.append)))
        reported.append(sum(steps))
    target.finish(directory, results)
    return reported[::-1]


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest value."""
    assert found.shape == expected.shape
    return float((found - expected).abs().max() / expected.abs().max())


def of_each(job: Callable[..., Any], kinds: Sequence[str], directory: Path) -> dict[str, Any]:
    """Job: the results of another one for some kinds, each in a folder of its own."""
    return {kind: job(kind, directory / kind) for kind in kinds}


def import_and_compare(kind: str, directory: Path) -> float:
    """Job: import a model of transformers; return how far Megatron-Core's answers differ."""
    model = saved_model(kind, directory)
    state = hugging_face.read(directory)
    ours = megatron_model(parsed(model_flags(state.args)))
    load(ours, state)
    return difference(our_logits(ours), their_logits(model))


def read_both_formats(kind: str, directory: Path) -> bool:
    """Compare a model in transformers' own format with the same one in the original format."""
    model = saved_model(kind, directory / "original")
    model.save_pretrained(directory / "own", save_original_format=False)
    names = load_file(directory / "own" / SINGLE_FILE).keys()
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in names)
    one, other = (hugging_face.read(directory / name).weights for name in ("original", "own"))
    return one.keys() == other.keys() and all(
        torch.equal(one[name].read(), other[name].read()) for name in one
    )


def export_and_compare(kind: str, directory: Path) -> tuple[float, str]:
    """Job: export a random model; return how far transformers' answers differ, and its family."""
    from transformers import AutoConfig, AutoModelForCausalLM

    family, settings = KINDS[kind]
    AutoConfig.for_model(family, **settings).save_pretrained(directory / "settings")
    args, _ = FAMILIES[family].read_config(
        json.loads((directory / "settings" / "config.json").read_text())
    )
    args.padded_vocab_size = VOCABULARY + 8  # as a run has that divides it over ranks
    args = parsed(model_flags(args))
    ours = megatron_model(args)
    randomize(ours)
    target = HuggingFaceTarget(state_of(ours, args), shard_bytes=20_000)
    write(target, directory / "written")
    model, problems = AutoModelForCausalLM.from_pretrained(
        directory / "written", attn_implementation="eager", output_loading_info=True
    )
    assert not any(problems.values()), problems
    assert model.dtype == torch.float32
    return difference(their_logits(model.eval()), our_logits(ours)), target.family_name


def predict_and_compare(kind: str, directory: Path) -> tuple[float, float, float] | None:
    """Job: export a model with a layer that predicts a further token.

    Returns how far the answers of the model, of the layer, and of the layer read again are from
    those of transformers, or None if this release of transformers has no such layers.
    """
    from transformers import AutoModelForCausalLM, modeling_layers

    mtp_model = getattr(modeling_layers, "MtpModel", None)
    if mtp_model is None:
        return None

    settings = parsed([*model_flags(random_state(kind).args), "--mtp-num-layers", "1"])
    ours = megatron_model(settings)
    randomize(ours)
    write(HuggingFaceTarget(state_of(ours, settings)), directory)
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    model._keys_to_ignore_on_load_unexpected = [
        rf"model\.layers\.{settings.num_layers}\..*"
    ]  # of the released size: 61
    predicting = mtp_model.from_pretrained(model).eval()
    answers, predictions = their_predictions(model, predicting)
    found_answers, found_predictions = our_predictions(ours)
    state = hugging_face.read(directory)
    again = megatron_model(parsed(model_flags(state.args)))
    load(again, state)
    return (
        difference(found_answers, answers),
        difference(found_predictions, predictions),
        difference(our_predictions(again)[1], predictions),
    )


@torch.no_grad()
def their_predictions(model: Any, predicting: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the next token, and those of the one after it except for the last token."""
    hidden = model.model(input_ids=tokens()).last_hidden_state
    positions = torch.arange(1, LENGTH).expand(2, LENGTH - 1)
    further = predicting.forward_layer(
        0, hidden[:, :-1], positions, None, input_ids=tokens()[:, 1:]
    )
    return model.lm_head(hidden), predicting._project_to_logits(further)


@torch.no_grad()
def our_predictions(model: GPTModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Return our logits for the next and the second next token.

    The model itself only computes losses from the second.
    """
    seen: list[torch.Tensor] = []
    hook = model.mtp.register_forward_hook(lambda module, inputs, output: seen.append(output))
    model(tokens(), torch.arange(LENGTH).expand(2, LENGTH).contiguous(), None, labels=tokens())
    hook.remove()
    weight = (
        model.shared_embedding_or_output_weight()
        if model.share_embeddings_and_output_weights
        else None
    )
    hidden, further = (
        model.output_layer(each, weight=weight)[0].transpose(0, 1) for each in seen[0].chunk(2)
    )
    return hidden, further[:, :-1]


def write_again_and_compare(kind: str, directory: Path) -> None:
    """Job: read and write a model in several files, with itself as the template; compare."""
    from transformers import AutoConfig, AutoModelForCausalLM

    family, settings = KINDS[kind]
    dtype = (torch.float32, torch.bfloat16)[list(KINDS).index(kind) % 2]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings), dtype=dtype)
    randomize(model)
    for name, tensor in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # in released models too
            tensor.data = tensor.data.float()
    model.save_pretrained(directory / "first", max_shard_size="20KB")
    assert (directory / "first" / INDEX).is_file()
    state = hugging_face.read(directory / "first")
    assert state.args.params_dtype == dtype and state.iteration is None
    target = HuggingFaceTarget(state, template=directory / "first", shard_bytes=10_000)
    reported = write(target, directory / "second")
    first, second = (_tensors_of(directory / each) for each in ("first", "second"))
    assert first.keys() == second.keys()
    for name in first:
        assert first[name].dtype == second[name].dtype, name
        assert torch.equal(first[name], second[name]), name
    places = json.loads((directory / "second" / INDEX).read_text())
    assert places["weight_map"].keys() == first.keys()
    num_bytes = [part.num_bytes for part in target.parts]
    assert reported == num_bytes and places["metadata"]["total_size"] == sum(num_bytes)
    configs = [
        AutoConfig.from_pretrained(directory / each).to_dict() for each in ("first", "second")
    ]
    differing = {
        key for key, value in configs[0].items() if configs[1].get(key, "absent") != value
    } - {"_name_or_path"}
    assert differing <= {"num_nextn_predict_layers"}, (
        differing
    )  # transformers has not saved the layers that it speaks of


def _tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for file in directory.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors
