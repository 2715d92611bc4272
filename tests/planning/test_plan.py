# SPDX-License-Identifier: Apache-2.0
"""tools/plan.py: published models, its table, and what it refuses."""

import argparse
import json
import time
import warnings
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.planning.candidates import (
    Candidate,
    Choices,
    _numbers_of_gpus,
    candidates,
    layers_of_ends,
    no_mesh,
)
from megatron.planning.costs.gpu_kernels import Kernels
from megatron.planning.costs.layer_memory import ATTENTION_CORE, FULL, MLP
from megatron.planning.costs.model_sizes import RunLayout, sizes_of_arguments
from megatron.planning.costs.software import UNFUSED
from megatron.planning.layer_costs import GptCosts, recompute_of_arguments, software_of_arguments
from megatron.planning.layout_search import is_interleaved, layouts_of
from megatron.planning.machine import MACHINES
from megatron.planning.presets import PRESETS
from megatron.planning.quick_estimate import arguments_of
from megatron.planning.search import model_arguments
from tests.support.rank_pool import run_ranks
from tools.plan import main, words_of

TINY = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --bf16"
    " --vocab-size 100 --max-position-embeddings 32 --global-batch-size 8 --swiglu"
    " --normalization RMSNorm --disable-bias-linear --position-embedding-type rope"
)


def planned(words: list[str]) -> tuple[int, str]:
    """Return the exit code and the output; on a rank of the pool, whose group it replaces."""
    if dist.is_initialized():
        dist.destroy_process_group()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron-Core's own: once in a process, among the output
        done = CliRunner().invoke(main, words)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def completed(flags: str) -> argparse.Namespace:
    problems: list[str] = []
    args = model_arguments(words_of(flags, []), problems)
    assert args is not None, problems
    return args


def number_of_parameters(args: argparse.Namespace) -> int:
    """Return the parameters of a model, by hand."""
    hidden, layers = args.hidden_size, args.num_layers
    total = 2 * args.padded_vocab_size * hidden + hidden + layers * 2 * hidden
    heads = args.num_attention_heads
    if args.multi_latent_attention:
        query = args.qk_head_dim + args.qk_pos_emb_head_dim
        attention = hidden * args.q_lora_rank + args.q_lora_rank * (1 + heads * query)
        attention += hidden * (args.kv_lora_rank + args.qk_pos_emb_head_dim) + args.kv_lora_rank
        attention += args.kv_lora_rank * heads * (args.qk_head_dim + args.v_head_dim)
        attention += heads * args.v_head_dim * hidden
    else:
        attention = 2 * hidden * args.kv_channels * (heads + args.num_query_groups)
    mlp = 3 * hidden * args.ffn_hidden_size
    if not args.num_experts:
        return total + layers * (attention + mlp)
    one = 3 * hidden * args.moe_ffn_hidden_size
    experts = (args.num_experts + 1) * one + args.num_experts * (hidden + 1)
    return total + layers * attention + 3 * mlp + (layers - 3) * experts


@pytest.mark.parametrize(
    ("model", "billions"), [("llama-3-70b", 70.55), ("deepseek-v3", 671.03)], ids=str
)
def test_a_published_model_has_as_many_parameters_as_its_report_says(
    model: str, billions: float
) -> None:
    number = number_of_parameters(completed(PRESETS[model].flags))
    assert number / 1e9 == pytest.approx(billions, abs=0.01)


def test_the_activations_of_a_layer_are_those_of_the_literature() -> None:
    args = completed(TINY.replace("--swiglu", "--ffn-hidden-size 256"))
    cost = GptCosts(args, MACHINES["h100"]).of_layer(has_experts=False)
    assert cost.kept_bytes == 32 * 32 * 64  # 32 bytes for 32 tokens of 64, without dropout
    args.recompute_granularity = "full"
    recomputing = GptCosts(args, MACHINES["h100"]).of_layer(has_experts=False)
    assert recomputing.kept_bytes == 2 * 32 * 64
    assert recomputing.recomputed_bytes == cost.kept_bytes - recomputing.kept_bytes
    assert recomputing.backward == pytest.approx(cost.backward + cost.forward)


def test_a_run_in_fp32_is_planned_in_fp32() -> None:
    half = software_of_arguments(completed(TINY))
    full = software_of_arguments(completed(TINY.replace("--bf16", "")))
    assert (half.compute_bytes, half.attention) == (2, "cudnn")
    assert (full.compute_bytes, full.gather_bytes, full.attention) == (4, 4, UNFUSED)


def test_layers_that_no_number_of_stages_divides_are_fewer_at_the_ends() -> None:
    assert layers_of_ends(61, 8) == (7, 6)
    assert layers_of_ends(61, 16) == (3, 2)
    assert layers_of_ends(80, 4) == (20, 20)
    assert layers_of_ends(5, 4) == (0, 0)


def test_candidates_divide_what_they_must() -> None:
    args = completed(f"{TINY} --untie-embeddings-and-output-weights")
    found = list(candidates(args, 16, 8, Choices(micro_batch=(1,))))
    assert len(set(found)) == len(found) > 20
    for each in found:
        data_ranks = each.num_data_ranks(16)
        assert data_ranks * each.tensor * each.pipeline * each.context == 16
        assert 8 % data_ranks == 0 and 4 % each.tensor == 0 and 4 % each.pipeline == 0
    assert Candidate(2, 1, 1, 1, 3, 1, False, 1) in found


def test_experts_with_a_strategy_of_their_own_have_ranks_of_their_own() -> None:
    flags = "--untie-embeddings-and-output-weights --num-experts 4"
    flags += " --expert-data-parallel-sharding-strategy optim"
    found = list(candidates(completed(f"{TINY} {flags}"), 16, 8, Choices(micro_batch=(1,))))
    assert found and all(each.expert > 1 for each in found)


@pytest.mark.exhaustive
def test_a_small_model_is_planned_with_commands_and_a_picture(tmp_path: Path) -> None:
    picture = tmp_path / "plan.png"
    words = ["--gpus", "4", "--pipeline", "1", "--tensor", "1,2", "--level", "2,3", "--show", "2"]
    words += ["--picture", str(picture), *TINY.split()]
    ((code, output),) = run_ranks(1, planned, words)
    assert code == 0, output
    lines = output.splitlines()
    assert lines[0] == "4 GPUs of h100, 67.1 GiB of each"
    rows = [line for line in lines if line.startswith((" 1.", " 2."))]
    assert len(rows) == 2
    for row in rows:  # of a small model too
        memory, seconds = map(float, row.split()[9:11])
        assert memory > 0 and seconds > 0, row
    assert [line for line in lines if len(line) > 100 and str(picture) not in line] == []
    assert output.count("torchrun --nnodes 1 --nproc_per_node 4 pretrain_gpt.py") == 2
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_everything_wrong_with_a_command_line_is_told_at_once() -> None:
    words = "--model gpt-9 --gpus 0 --machine abacus --memory-limit -1 --show 0 --level 4"
    words += " --tensor two --picture /nowhere/plan.png --micro-batch-size 2"
    words += " --hybrid-layer-pattern *- --num-layers-per-virtual-pipeline-stage 1"
    done = CliRunner().invoke(main, words.split())
    assert done.exit_code == 2
    for part in (
        "--model gpt-9 is none of llama-3-70b, deepseek-v3",
        "--gpus expects",
        "--machine abacus is none of",
        "--memory-limit expects GiB above 0 but got -1",
        "--show expects at least 1",
        "--level expects levels from 0 to 3 but got 4",
        "--tensor expects numbers such as 1,2,4 but got two",
        "there is no folder /nowhere",
        "--micro-batch-size is chosen by the search: limit it by --micro-batch",
        "--num-layers-per-virtual-pipeline-stage: interleaved stages (but by --beside-ddp) cannot",
        "--hybrid-layer-pattern: a HybridModel cannot be planned",
    ):
        assert part in done.output


def test_a_batch_that_no_mesh_divides_is_told() -> None:
    ((code, output),) = run_ranks(1, planned, ["--gpus", "7", *TINY.split()])
    assert code == 1 and "no mesh of 7 GPUs divides" in output and "memory" not in output
    assert "give --gpus 4 or --gpus 8 or --global-batch-size 7 or --global-batch-size 14" in output
    beside = CliRunner().invoke(main, ["--gpus", "7", "--beside-ddp", *TINY.split()])
    assert beside.exit_code == 1 and "no mesh of 7 GPUs divides" in beside.output


@pytest.mark.parametrize("flags", ["", " --num-experts 4"], ids=["dense", "experts"])
def test_the_numbers_of_gpus_that_are_named_are_those_with_candidates(flags: str) -> None:
    args = completed(f"{TINY}{flags}")
    choices = Choices(context=(1, 2), micro_batch=(1, 4))
    found = [number for number in range(1, 130) if [*candidates(args, number, 8, choices)]]
    assert sorted(_numbers_of_gpus(args, 8, choices)) == found


def test_many_gpus_that_do_not_divide_a_model_are_told_at_once() -> None:
    args = completed(TINY)
    began = time.process_time()
    assert "give --gpus 32 or --global" in no_mesh(args, 65536, 8, Choices())
    assert time.process_time() - began < 2


def test_a_model_that_fits_nowhere_is_told() -> None:
    words = ["--gpus", "2", "--memory-limit", "0.0001", *TINY.split()]
    ((code, output),) = run_ranks(1, planned, words)
    assert code == 1 and "nothing fits" in output and "it fits with" not in output


WIDE = TINY.replace("--hidden-size 64", "--hidden-size 256")
"""Its weights and their state are most of its memory."""

FEW = "--gpus 2 --tensor 1 --pipeline 1 --micro-batch 1 --level 3 --show 1"


@pytest.mark.exhaustive
def test_what_would_make_a_model_fit_is_proposed(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    machine = asdict(MACHINES["h100"])
    machine["host"]["disk_bytes_per_second"] = 1e9
    path.write_text(json.dumps(machine))
    words = [*f"{FEW} --memory-limit 0.03 --machine {path}".split(), *WIDE.split()]
    ((code, output),) = run_ranks(1, planned, words)
    text = " ".join(output.split())
    assert code == 1 and "nothing fits" in output
    assert "1. --optimizer-cpu-offload: 0.0" in text and "of each host; copies take" in text
    assert ". Memory(offload=folder), in a loop of your own:" in text
    assert "s where the host's memory caches none of it" in text
    assert ". AdamW8bit of torchao, in a loop of your own: about 0.02" in text
    assert "precision-aware" not in text  # where Transformer Engine is missing, it is refused
    assert output.count("\nOMP_NUM_THREADS=14 torchrun") == 1
    ((code, output),) = run_ranks(1, planned, [*words, "--optimizer-cpu-offload"])
    assert code == 0, output
    assert output.count("\nOMP_NUM_THREADS=14 torchrun") == 1 and "it fits with" not in output


def test_offload_needs_a_described_host(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    path.write_text(json.dumps(asdict(MACHINES["h100"]) | {"host": None}))
    words = [*f"{FEW} --machine {path}".split(), *WIDE.split()]
    done = CliRunner().invoke(main, [*words, "--optimizer-cpu-offload"])
    assert done.exit_code == 2
    assert "--optimizer-cpu-offload needs the host in the description of --machine" in done.output
    ((code, output),) = run_ranks(1, planned, [*words, "--memory-limit", "0.03"])
    assert code == 1 and "offload" not in output and "AdamW8bit" in output


def test_the_update_takes_the_bytes_of_the_formulas() -> None:
    args = completed(TINY)
    machine = MACHINES["h100"]
    seconds = GptCosts(args, machine).update_seconds(10**9)
    software = software_of_arguments(args)
    assert seconds == Kernels(machine, software).move(40e9)
    args.clip_grad = 0.0
    assert GptCosts(args, machine).update_seconds(10**9) == pytest.approx(0.7 * seconds)


def test_imbalance_of_experts_is_planned_and_refused_without_experts() -> None:
    large = TINY.replace("--hidden-size 64", "--hidden-size 4096 --moe-ffn-hidden-size 8192")
    flags = f"{large} --num-experts 4 --gpus 8 --beside-ddp --expert-imbalance"
    even, uneven = (CliRunner().invoke(main, [*flags.split(), text]) for text in ("1", "40"))
    assert even.exit_code == uneven.exit_code == 0, uneven.output
    assert even.output != uneven.output
    args = model_arguments(words_of(f"{TINY} --num-experts 4", []), [], 1.5)
    assert args is not None and software_of_arguments(args).imbalance == 1.5
    for_one = arguments_of(args, Candidate(1, 1, 1, 4, 3, 1, False, 1), 8)
    assert software_of_arguments(for_one).imbalance == 1.5
    dense = CliRunner().invoke(main, f"{TINY} --gpus 8 --expert-imbalance 2".split())
    assert "--expert-imbalance is that of experts, which the model has not" in dense.output
    small = CliRunner().invoke(main, f"{TINY} --gpus 8 --expert-imbalance 0.5".split())
    assert "--expert-imbalance expects a number of at least 1 but got 0.5" in small.output


def test_what_fsdp_and_ddp_are_not_compared_with_is_told_at_once() -> None:
    words = f"{TINY} --gpus 8 --beside-ddp --level 2 --show 3 --picture a.png"
    words += " --optimizer-cpu-offload"
    done = CliRunner().invoke(main, words.split())
    assert done.exit_code == 2
    for part in (
        "--level does not go with --beside-ddp",
        "--show does not go with --beside-ddp",
        "--picture does not go with --beside-ddp",
        "--optimizer-cpu-offload cannot be planned by --beside-ddp",
    ):
        assert part in done.output
    muon = CliRunner().invoke(main, f"{TINY} --gpus 8 --beside-ddp --optimizer muon".split())
    assert "--optimizer muon: --beside-ddp plans adam alone" in muon.output


def test_fsdp_and_ddp_are_compared_within_limits() -> None:
    words = f"{TINY} --gpus 8 --beside-ddp --tensor 2 --pipeline 1,2 --micro-batch 1"
    done = CliRunner().invoke(main, words.split())
    assert done.exit_code == 0, done.output
    first, _, header, *rows, _ = done.output.splitlines()
    assert first == "8 GPUs of h100, 67.1 GiB of each"
    assert header.split()[:2] == ["GPUs", "TP"]
    planned_rows = [row.split() for row in rows if "no layout fits" not in row]
    assert planned_rows
    for row in planned_rows:
        assert row[2] == "2" and row[3] in ("1", "2") and row[-4] == "1", row


def test_sizes_of_layouts_divide_the_model() -> None:
    sizes = replace(sizes_of_arguments(completed(TINY)), heads=12, key_heads=6, layers=6)
    found = [*layouts_of(sizes, 32, 8, 8, Choices(), is_fsdp=True)]
    found += layouts_of(sizes, 32, 8, 8, Choices(), is_fsdp=False)
    assert {layout.tensor for layout in found} == {1, 2}  # 4 do not divide 6 heads
    for layout in found:
        if layout.virtual > 1:
            assert layout.num_microbatches % layout.pipeline == 0


@pytest.mark.parametrize(("layers", "runs"), [(80, True), (126, True), (62, True), (61, False)])
def test_stages_are_interleaved_as_megatron_core_accepts_it(layers: int, runs: bool) -> None:
    sizes = replace(sizes_of_arguments(completed(TINY)), layers=layers, dense_layers=layers)
    mesh = RunLayout(8, pipeline=8, global_batch=64, level=1, is_fsdp=False)
    assert is_interleaved(sizes, mesh, 2) == runs
    assert not is_interleaved(sizes, replace(mesh, global_batch=36), 2)
    counts_ends = layers % 16 != 0
    config = partial(
        TransformerConfig,
        num_layers=layers,
        hidden_size=64,
        num_attention_heads=4,
        pipeline_model_parallel_size=8,
        virtual_pipeline_model_parallel_size=2,
        pipeline_dtype=torch.bfloat16,
        account_for_embedding_in_pipeline_split=counts_ends,
        account_for_loss_in_pipeline_split=counts_ends,
    )
    if runs:
        config()
    else:
        with pytest.raises(ValueError, match="must be divisible"):
            config()


def test_selective_recomputation_is_planned_by_the_search() -> None:
    args = completed(f"{TINY} --recompute-granularity selective")
    own = Candidate(1, 1, 1, 1, 3, 1, False, 1)
    assert recompute_of_arguments(arguments_of(args, own, 8)) == ATTENTION_CORE
    whole = replace(own, recomputes=True)
    assert recompute_of_arguments(arguments_of(args, whole, 8)) == FULL
    args.recompute_modules = ["mlp"]
    assert recompute_of_arguments(args) == MLP
    args.recompute_granularity = "full"
    found = list(candidates(args, 8, 8, Choices()))
    assert found and all(each.recomputes for each in found)
