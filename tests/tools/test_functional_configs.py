# SPDX-License-Identifier: Apache-2.0
"""The report on configurations of Megatron-LM's functional tests.

The flags are those of the public tag core_v0.16.1.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]
from click.testing import CliRunner

from tests.support import megatron_release
from tests.support.megatron_release import ROOT
from tools.functional_configs import CASES, main, num_ranks, ranks_of_a_node, words_of


def model_args(line: str) -> dict[str, object]:
    """Return the section MODEL_ARGS of these flags; one without a value is true."""
    found = re.findall(r"(--\S+)((?: (?!--)\S+)*)", " ".join(line.split()))
    return {flag: value.strip() or True for flag, value in found}


COMMON = model_args(
    r"""--num-layers 12 --hidden-size 512 --num-attention-heads 8 --log-params-norm
    --tensorboard-dir ${TENSORBOARD_PATH} --micro-batch-size 4 --global-batch-size 32
    --seq-length 1024 --max-position-embeddings 1024 --train-iters 50 --lr-decay-iters 320000
    --save ${CHECKPOINT_SAVE_PATH} --load ${CHECKPOINT_LOAD_PATH}
    --data-path ${DATA_PATH}/text/my-gpt3_00_text_document --split 949,50,1
    --distributed-backend nccl --lr 0.00015 --lr-decay-style cosine --min-lr 1e-05
    --weight-decay 1e-2 --lr-warmup-fraction 0.01 --save-interval 10000
    --transformer-impl transformer_engine --deterministic-mode --no-gradient-accumulation-fusion
    --attention-softmax-in-fp32 --use-mcore-models --ckpt-format torch_dist
    --dist-ckpt-strictness log_all --data-cache-path ${DATA_CACHE_PATH} --bf16
    --attention-backend unfused"""
)
EXPERTS = """--tensor-model-parallel-size 2 --expert-model-parallel-size 2 --disable-bias-linear
    --sequence-parallel --num-experts 8 --moe-router-load-balancing-type aux_loss
    --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm"""
PARTS = {
    "gpt/plain": "",
    "gpt/split_pipeline": """--num-layers 14 --pipeline-model-parallel-size 4
        --num-virtual-stages-per-pipeline-rank 2 --account-for-embedding-in-pipeline-split
        --account-for-loss-in-pipeline-split""",
    "gpt/tuned_overlap": """--pipeline-model-parallel-size 4
        --num-layers-per-virtual-pipeline-stage 1
        --microbatch-group-size-per-virtual-pipeline-stage 4
        --overlap-p2p-communication-warmup-flush""",
    "gpt/test_mode": "--tensor-model-parallel-size 4 --qk-layernorm --test-mode",
    "gpt/expert_tensor_without_experts": "--expert-tensor-parallel-size 4",
    "moe/experts": EXPERTS,
    "moe/sharded": f"""{EXPERTS} --use-megatron-fsdp --data-parallel-sharding-strategy
        optim_grads_params --calculate-per-token-loss --use-distributed-optimizer
        --ckpt-format fsdp_dtensor""",
    "moe/layers": rf"""{EXPERTS} --pipeline-model-parallel-size 2 --num-layers 15
        --pipeline-model-parallel-layout Et*3\\|\\(tt\\|\\)*6L --moe-layer-freq ([0]*3+[1]*12)
        --swiglu --recompute-granularity selective --recompute-modules [layernorm mlp moe_act]""",
    "moe/kernels_of_transformer_engine": f"""{EXPERTS} --position-embedding-type rope
        --moe-permute-fusion --moe-token-dispatcher-type alltoall""",
    "gpt/deterministic_flash_attention": "--attention-backend flash",
    "gpt/repeated": "--seed ${REPEAT}",
    "gpt/half_a_node": "--micro-batch-size 8",
    "gpt/low_precision": "--fp8-format hybrid",
    "gpt/unknown": "--zz-qq 9",
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name, part in PARTS.items():
        folder = tmp_path / CASES / name
        folder.mkdir(parents=True)
        arguments = COMMON | model_args(part)
        variables = {"NCCL_ALGO": "Ring", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
        if "--use-megatron-fsdp" not in arguments:
            variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        content = {"ENV_VARS": variables, "MODEL_ARGS": arguments}
        (folder / "model_config.yaml").write_text(yaml.safe_dump(content))
    return tmp_path


def test_configurations_that_are_taken_are_counted_and_the_others_explained(
    checkout: Path,
) -> None:
    result = CliRunner().invoke(main, [str(checkout), "--json"], catch_exceptions=False)
    problems = json.loads(result.stdout)
    stopped = {name: found for name, found in problems.items() if found}
    assert set(stopped) == {"gpt/unknown"}
    assert stopped["gpt/unknown"] == ["--zz-qq: unknown flag"]
    result = CliRunner().invoke(main, [str(checkout)], catch_exceptions=False)
    lines = result.stdout.splitlines()
    assert lines[0] == f"{len(PARTS) - 1} of {len(PARTS)} configurations are taken"
    assert "    1 (1)  --zz-qq: unknown flag" in lines


@pytest.mark.exhaustive
def test_the_loop_of_megatron_lm_takes_them_too(checkout: Path) -> None:
    release = megatron_release.RELEASES[-1]
    megatron_release.require(release)
    done = subprocess.run(
        [sys.executable, "tools/functional_configs.py", str(checkout), "--loop", "megatron-lm"],
        cwd=ROOT,
        env={**os.environ, **megatron_release.environment(release)},
        text=True,
        capture_output=True,
    )
    lines = done.stdout.splitlines()
    assert lines[0] == f"{len(PARTS) - 1} of {len(PARTS)} configurations are taken", done.stderr
    assert "    1 (1)  unrecognized arguments: --zz-qq 9" in lines


def test_values_become_words_as_in_the_run_script(tmp_path: Path) -> None:
    arguments = {"--a": True, "--b": "[1 2]", "--c": "([0]*1+[1]*2)", "--d": r"x\\|y", "--e": 3}
    expected = ["--a", "--b", "1", "2", "--c", "([0]*1+[1]*2)", "--d", "x|y", "--e", "3"]
    assert words_of(arguments, tmp_path) == expected


def test_ranks_are_whole_nodes_that_the_parallel_sizes_divide() -> None:
    sizes = {"--tensor-model-parallel-size": 2, "--pipeline-model-parallel-size": 3}
    assert num_ranks(sizes) == 24
    assert num_ranks({"--num-experts": 8, "--expert-model-parallel-size": 16}) == 16


@pytest.mark.parametrize("value", [None, "many", 0])
def test_a_size_that_is_no_number_of_ranks_is_left_to_the_check(value: object) -> None:
    assert num_ranks({"--num-experts": 8, "--expert-model-parallel-size": value}) == 8


@pytest.mark.parametrize(
    ("batch", "microbatch", "expected"), [(16, 2, 8), (8, 2, 4), (12, 2, 6), (7, 2, 8)]
)
def test_ranks_are_fewer_than_a_node_where_the_batch_needs_it(
    batch: int, microbatch: int, expected: int
) -> None:
    sizes = {"--global-batch-size": batch, "--micro-batch-size": microbatch}
    assert num_ranks(sizes) == expected


def test_a_configuration_can_ask_for_a_part_of_a_node() -> None:
    content = {"MODEL_ENV_VARS": {"MODEL_ARGS": {"GPUS_PER_NODE": 2}}}
    assert num_ranks({"--tensor-model-parallel-size": 2}, ranks_of_a_node(content)) == 2
    assert ranks_of_a_node({}) == 8


def test_a_folder_without_configurations_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, [str(tmp_path)])
    assert result.exit_code == 1 and "has no gpt*" in result.output
