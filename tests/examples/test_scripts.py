# SPDX-License-Identifier: Apache-2.0
"""Scripts for large models, for clusters and for conversion.

Every flag is parsed as on the machine that it is for, and every script is run to its end in small.
"""

import argparse
import json
import re
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import tokenizers
from click.testing import CliRunner
from megatron.core.models.common.embeddings import rope_utils
from torch.distributed.run import parse_args as parse_torchrun

from megatron.checkpoint.commands import command_line, conversion
from megatron.pretrain.arguments import parse_arguments
from tests.examples.conftest import Shell
from tests.support.checkpoint.samples import DATA
from tests.support.pretrain.training_runs import CORPUS
from tests.support.warm_programs import ROOT
from tools.preprocess_data import preprocess_data

FOLDER = Path("examples", "megatron_fsdp")
SCRIPTS = sorted(path.name for path in (ROOT / FOLDER).glob("*.sh"))
SAMPLE = DATA / "torch_dist" / "dense_swiglu_bf16_tp2_dp2"
TRACKER = "latest_checkpointed_iteration.txt"
GROWING = "expandable_segments:True"
LOSS = re.compile(r"^iteration +(\d+)/.* lm loss: (\S+)", re.MULTILINE)


def write_tokenizer(folder: Path) -> Path:
    """Write a Hugging Face tokenizer with the hundred ids of the corpus."""
    folder.mkdir(exist_ok=True)
    words = {str(number): number for number in range(99)} | {"<eos>": 99}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<eos>")).save(
        str(folder / "tokenizer.json")
    )
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}'
    )
    return folder


def words_of(script: str, shell: Shell, *more: str, **environment: str) -> list[dict[str, Any]]:
    """Return the words that a script gives to torchrun and python, for each node of a cluster."""
    record = shell.directory / "record"
    starter = "sbatch" if script.startswith("sbatch") else "bash"
    done = shell.run(
        starter,
        FOLDER / script,
        *more,
        RECORD=str(record),
        CUDA_DEVICE_MAX_CONNECTIONS="1",
        **environment,
    )
    assert done.returncode == 0, done.stdout
    return [json.loads(line) for line in record.read_text().splitlines()]


def parsed(request: dict[str, Any], with_gpus: bool = True) -> argparse.Namespace | None:
    """Parse the words as their program does; return None for a tool."""
    script, words, num_ranks = request["words"][0], request["words"][1:], 1
    if request["program"] == "torchrun":
        launch = parse_torchrun(request["words"])
        script, words = launch.training_script, launch.training_script_args
        num_ranks = int(launch.nnodes.split(":")[0]) * int(launch.nproc_per_node)
    if script == "tools/checkpoint/checkpoint_inspector.py":
        command_line.main.commands[words[0]].make_context(words[0], list(words[1:]))
        return None
    if script == "tools/preprocess_data.py":
        preprocess_data.make_context(script, list(words))
        return None
    assert script in ("pretrain_gpt.py", "examples/finetune/sft_packed.py")
    with patch.object(
        rope_utils, "fused_apply_rotary_pos_emb", "as where Transformer Engine is installed"
    ):
        return parse_arguments(
            words,
            world_size=num_ranks,
            cuda=with_gpus,
            transformer_engine=with_gpus,
            environment=request["environment"],
        )[0]


def losses(output: str) -> dict[int, float]:
    return {int(iteration): float(loss) for iteration, loss in LOSS.findall(output)}


def tool(*words: str | Path) -> tuple[int, str]:
    """Run the checkpoint tool in this process; return its exit code and output."""
    result = CliRunner().invoke(command_line.main, list(map(str, words)))
    return result.exit_code, result.output


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_shell_understands_the_script(script: str, recorder: Shell) -> None:
    done = recorder.run("bash", "-n", FOLDER / script)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.exhaustive
def test_deepseek_v3_is_accepted_on_64_nodes_and_has_its_published_size(
    recorder: Shell, tmp_path: Path
) -> None:
    data = {"DATA_PATH": str(CORPUS), "TOKENIZER": str(write_tokenizer(tmp_path / "tokenizer"))}
    requests = words_of("sbatch_mfsdp_deepseek_v3.sh", recorder, "--seed", "5", **data)
    assert len(requests) == 64 and len({tuple(request["words"]) for request in requests}) == 1
    launch = parse_torchrun(requests[0]["words"])
    assert launch.nnodes == "64" and launch.rdzv_endpoint.startswith("127.0.0.1:")
    assert launch.max_restarts == 3
    args = parsed(requests[0])
    assert args is not None
    assert args.world_size == 512
    assert args.seed == 5
    assert args.bf16
    assert args.init_model_with_meta_device
    assert args.calculate_per_token_loss
    assert args.grad_reduce_in_bf16
    assert args.fsdp_double_buffer
    assert args.nccl_ub
    assert not any("CUDA_DEVICE_MAX_CONNECTIONS" in request["environment"] for request in requests)
    main, active, predicting = deepseek_parameters(args)
    assert (round(main / 1e9), round(active / 1e9), round(predicting / 1e9, 1)) == (671, 37, 11.6)


@pytest.mark.exhaustive
def test_deepseek_v3_registers_no_memory_in_segments_that_grow(recorder: Shell) -> None:
    script = "sbatch_mfsdp_deepseek_v3.sh"
    args = parsed(words_of(script, recorder, PYTORCH_CUDA_ALLOC_CONF=GROWING)[0])
    assert args is not None and args.fsdp_double_buffer and not args.nccl_ub


def deepseek_parameters(args: argparse.Namespace) -> tuple[int, int, int]:
    """Count parameters: all, active per token (without embedding), and of the MTP layer."""
    hidden, heads = args.hidden_size, args.num_attention_heads
    queries = args.q_lora_rank * (
        hidden + 1 + heads * (args.qk_head_dim + args.qk_pos_emb_head_dim)
    )
    keys = hidden * (args.kv_lora_rank + args.qk_pos_emb_head_dim) + args.kv_lora_rank
    values = args.kv_lora_rank * heads * (args.qk_head_dim + args.v_head_dim)
    attention = queries + keys + values + heads * args.v_head_dim * hidden + 2 * hidden
    expert = 3 * hidden * args.moe_ffn_hidden_size
    beside = (hidden + 1) * args.num_experts + 3 * hidden * args.moe_shared_expert_intermediate_size
    dense, sparse = args.moe_layer_freq.count(0), args.moe_layer_freq.count(1)
    vocabulary = args.padded_vocab_size * hidden
    rest = (
        2 * vocabulary
        + hidden
        + dense * (attention + 3 * hidden * args.ffn_hidden_size)
        + sparse * (attention + beside)
    )
    predicting = attention + beside + args.num_experts * expert + 2 * hidden * hidden + 3 * hidden
    return (
        rest + sparse * args.num_experts * expert,
        rest - vocabulary + sparse * args.moe_router_topk * expert,
        predicting,
    )


SMALL_DEEPSEEK = """--num-layers 2 --moe-layer-freq [0]*1+[1]*1 --hidden-size 64
    --ffn-hidden-size 96 --num-attention-heads 4 --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 8
    --qk-pos-emb-head-dim 4 --v-head-dim 8 --num-experts 16 --moe-ffn-hidden-size 16
    --moe-shared-expert-intermediate-size 16 --padded-vocab-size 128 --seq-length 32
    --global-batch-size 8 --train-iters 4 --lr 1e-2 --lr-warmup-iters 1 --log-interval 1
    --eval-iters 0 --init-method-std 0.02 --num-workers 0"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("reason", ["limit", "preempt"])
def test_deepseek_v3_trains_in_small_and_goes_on_after_it_was_queued_again(
    reason: str, shell: Shell, tmp_path: Path
) -> None:
    environment = {
        "GPUS_PER_NODE": "1",
        "EXPERT_PARALLEL": "2",
        "PYTORCH_CUDA_ALLOC_CONF": GROWING,  # so that nothing needs NCCL
        "CHECKPOINTS": str(tmp_path / "saved"),
        "END_AT": f"{reason}: iteration 1/",
    }
    environment |= {
        "DATA_PATH": f"1 {CORPUS} 2 {CORPUS}",
        "TOKENIZER": str(write_tokenizer(tmp_path / "t")),
    }
    command = [
        "sbatch",
        "--nodes=2",
        FOLDER / "sbatch_mfsdp_deepseek_v3.sh",
        *SMALL_DEEPSEEK.split(),
    ]
    job = shell.run(*command, **environment)
    output = (tmp_path / "slurm-1.out").read_text()
    assert job.returncode == 0, output
    assert "no latest_checkpointed_iteration.txt: starting from scratch" in output
    assert re.search(r"stopping at iteration [1-3]: signal", output) and "loaded " in output
    assert (tmp_path / "saved" / TRACKER).read_text() == "4"
    found = LOSS.findall(output)
    assert [iteration for iteration, _ in found] == ["1", "2", "3", "4"]
    assert float(found[3][1]) < float(found[0][1]) - 0.1


@pytest.mark.parametrize("script", ["sbatch_mfsdp_deepseek_v3.sh", "sbatch_checkpoint_convert.sh"])
def test_a_job_submitted_elsewhere_says_so(script: str, recorder: Shell, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    done = recorder.run(
        "sbatch", FOLDER / script, "in", "out", REPOSITORY=str(tmp_path / "elsewhere")
    )
    assert done.returncode == 1
    assert "submit from the repository, or set REPOSITORY" in (tmp_path / "slurm-1.out").read_text()


@pytest.mark.parametrize(
    "start", ["from_synthetic_tokens", "from_the_beginning", "from_hugging_face"]
)
def test_llama3_8b_is_accepted_on_eight_gpus_and_has_its_published_size(
    start: str, recorder: Shell, tmp_path: Path
) -> None:
    folder = str(write_tokenizer(tmp_path / "model"))
    environments: dict[str, dict[str, str]] = {
        "from_synthetic_tokens": {},
        "from_the_beginning": {"DATA_PATH": str(CORPUS), "TOKENIZER": folder},
        "from_hugging_face": {"DATA_PATH": str(CORPUS), "HF_MODEL": folder},
    }
    requests = words_of("pretrain_llama3_8b.sh", recorder, "--seed", "5", **environments[start])
    *before, args = map(parsed, requests)
    assert before == ([None] if start == "from_hugging_face" else []) and args is not None
    assert args.finetune == bool(before) and args.world_size == 8 and args.seed == 5
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in requests[-1]["environment"]
    hidden, head = args.hidden_size, args.hidden_size // args.num_attention_heads
    layer = (
        2 * hidden * (hidden + head * args.num_query_groups + 1) + 3 * hidden * args.ffn_hidden_size
    )
    size = args.num_layers * layer + (2 * args.padded_vocab_size + 1) * hidden
    assert size == 8_030_261_248


@pytest.mark.exhaustive
def test_llama3_8b_fine_tunes_a_hugging_face_model_in_small_and_goes_on(
    shell: Shell, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    code, output = tool("convert-to-hf", SAMPLE, model)
    assert code == 0, output
    write_tokenizer(model)
    code, output = tool("convert-from-hf", "--json", model, tmp_path / "flags")
    flags = json.loads(output)["model_flags"]
    small = "--seq-length 32 --global-batch-size 8 --train-iters 4 --lr 5e-3 --log-interval 1"
    small += " --eval-iters 0 --num-workers 0 --save-interval 2"
    command = ["bash", FOLDER / "pretrain_llama3_8b.sh", *flags, *small.split()]
    environment = {"NPROC_PER_NODE": "2", "DATA_PATH": str(CORPUS), "HF_MODEL": str(model)}
    first = shell.run(*command, "--exit-interval", "2", **environment)
    second = shell.run(*command, **environment)
    assert first.returncode == second.returncode == 0, first.stdout + second.stdout
    assert "loaded the weights of checkpoints/llama3_8b_converted/release" in first.stdout
    assert "loaded checkpoints/llama3_8b/iter_0000002, iteration 2" in second.stdout
    assert "release" not in second.stdout
    assert list(losses(first.stdout)) == [1, 2] and list(losses(second.stdout)) == [3, 4]
    assert losses(second.stdout)[4] < losses(first.stdout)[1]


def test_every_word_for_the_conversion_is_accepted(recorder: Shell) -> None:
    options = ["--swiglu", "--output-model-weight-prefix", "model.module"]
    requests = words_of("sbatch_checkpoint_convert.sh", recorder, "in", "out", *options)
    assert len(requests) == 2 and [parsed(request) for request in requests] == [None, None]
    expected = ["convert-torch-dist-to-fsdp-dtensor", "in", "out", *options]
    assert requests[0]["words"][-6:] == expected


@pytest.mark.exhaustive
def test_a_checkpoint_is_converted_on_two_nodes_there_and_back(
    shell: Shell, tmp_path: Path
) -> None:
    script = FOLDER / "sbatch_checkpoint_convert.sh"
    output = tmp_path / "slurm-1.out"
    there = shell.run("sbatch", script, SAMPLE, "there", "--swiglu", RANKS_PER_NODE="1")
    assert there.returncode == 0, output.read_text()
    environment = {
        "INPUT": "there",
        "OUTPUT": "back",
        "COMMAND": "convert-fsdp-dtensor-to-torch-dist",
    }
    back = shell.run("sbatch", script, RANKS_PER_NODE="1", **environment)
    assert back.returncode == 0, output.read_text()
    for result in ("there", "back"):
        assert tool("verify", tmp_path / result)[0] == 0
        assert tool("diff", SAMPLE, tmp_path / result)[0] == 0
    again = shell.run("sbatch", script, SAMPLE, "there", RANKS_PER_NODE="1")
    assert again.returncode == 1 and "nothing is overwritten" in output.read_text()


@pytest.mark.exhaustive
def test_a_conversion_that_was_killed_goes_on_when_it_is_queued_again(
    shell: Shell, tmp_path: Path
) -> None:
    words = ["convert-torch-dist-to-fsdp-dtensor", SAMPLE, tmp_path / "out", "--swiglu"]
    with patch.object(conversion, "_publish", side_effect=KeyboardInterrupt):
        assert tool(*words)[0] != 0
    assert not (tmp_path / "out" / TRACKER).exists()
    written = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.distcp")}
    done = shell.run(
        "sbatch", FOLDER / "sbatch_checkpoint_convert.sh", *words[1:], RANKS_PER_NODE="1"
    )
    assert done.returncode == 0, (tmp_path / "slurm-1.out").read_text()
    kept = {
        path.name: path.stat().st_mtime_ns
        for path in (tmp_path / "out" / "iter_0000003").glob("*.distcp")
    }
    assert kept == written and (tmp_path / "out" / TRACKER).read_text() == "3"
    assert tool("diff", SAMPLE, tmp_path / "out")[0] == 0


@pytest.mark.exhaustive
def test_the_laptop_script_goes_from_tensor_and_pipeline_parallelism_to_hugging_face(
    shell: Shell, tmp_path: Path
) -> None:
    script = "migrate_to_fsdp_laptop.sh"
    requests = words_of(script, shell, "--mock-data", "--vocab-size", "99")
    runs = [parsed(request, with_gpus=False) for request in requests]
    assert [args.use_megatron_fsdp for args in runs if args is not None] == [
        False,
        True,
    ]
    assert runs.count(None) == 6

    short = "--mock-data --vocab-size 99 --num-workers 0 --log-interval 1 --train-iters 6"
    short += " --save-interval 3 --exit-interval 3"
    done = shell.run("bash", FOLDER / script, *short.split())
    assert done.returncode == 0, done.stdout
    results = tmp_path / "checkpoints" / "migration"
    assert done.stdout.count("there is no difference") == 1 and done.stdout.count("): sound") == 2
    found = losses(done.stdout)
    assert list(found) == [1, 2, 3, 4, 5, 6] and found[6] < found[4] < found[3] < found[1]
    assert json.loads((results / "hf" / "config.json").read_text())["num_hidden_layers"] == 2
    shutil.rmtree(results / "fsdp")
    refused = shell.run("bash", FOLDER / script)
    assert refused.returncode == 1 and "has results already" in refused.stdout
