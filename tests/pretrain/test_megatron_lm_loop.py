# SPDX-License-Identifier: Apache-2.0
"""The program's way into Megatron-LM's loop: the choice, the command line, dry runs, saves."""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.mcore_adapter.megatron_lm.loop_flags import value_of
from megatron.mcore_adapter.releases import tested
from megatron.pretrain.megatron_lm_loop import (
    build_datasets,
    chosen_loop,
    completed,
    dry_run,
    own_vocab_size,
    with_paths_of_files,
)
from tests.support import megatron_release
from tests.support.megatron_release import RELEASES
from tests.support.pretrain.arguments.command_lines import MOCK, parse
from tests.support.warm_programs import ROOT

MODEL = (
    "--use-megatron-fsdp --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32"
    " --micro-batch-size 2 --global-batch-size 4 --lr 1e-3 --log-interval 1 --eval-iters 0"
)


def start(
    words: str, folder: Path, release: str | None = None, program: str = "pretrain_gpt.py"
) -> subprocess.CompletedProcess[str]:
    """Run a program on one rank, with a release of Megatron-Core that has the loop or without."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if release is not None:
        megatron_release.require(release)
        environment |= megatron_release.environment(release)
    return subprocess.run(
        [sys.executable, str(ROOT / program), *words.split()],
        cwd=folder,
        env=environment,
        text=True,
        capture_output=True,
    )


def losses(output: str) -> list[str]:
    return re.findall(r"lm loss: (\S+)", output)


def test_the_flag_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen_loop([]) == "own"
    assert chosen_loop(["--loop=megatron-lm"]) == chosen_loop(["--loop", "megatron-lm"])
    monkeypatch.setenv("MEGATRON_LOOP", "megatron-lm")
    assert chosen_loop([]) == "megatron-lm" and chosen_loop(["--loop", "own"]) == "own"
    monkeypatch.setenv("MEGATRON_LOOP", "mine")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit):
        chosen_loop([])


def test_the_command_line_gets_what_the_loop_asks_for_and_no_more() -> None:
    words = [
        "--loop",
        "megatron-lm",
        "--dry-run",
        "--dry-run-ranks",
        "8",
        "--seq-length",
        "32",
        "--save",
        "s",
        "--lr",
        "1",
    ]
    assert completed(words) == [
        *("--seq-length", "32", "--save", "s", "--lr", "1"),
        *("--tokenizer-type", "NullTokenizer", "--vocab-size", "256"),
        *("--max-position-embeddings", "32", "--eval-interval", "1000"),
        *("--save-interval", "1000000000"),
    ]
    full = (
        "--seq-length 32 --max-position-embeddings 64 --tokenizer-type NullTokenizer"
        " --eval-interval 5 --save s --save-interval 2 --vocab-size 9"
    )
    assert completed(full.split()) == full.split()


@pytest.mark.parametrize(
    ("numbers", "words", "size"),
    [
        ((0, 17, 1), "", 256),
        ((0, 18, 0), "", 257),
        ((0, 17, 1), "--tokenizer-type ByteTokenizer --vocab-size 3072", 3071),
        ((0, 18, 0), "--tokenizer-type ByteTokenizer --vocab-size 3072", 3072),
        ((0, 17, 1), "--tokenizer-type ByteTokenizer --vocab-size 3_072", 3071),
        ((0, 17, 1), "--tokenizer-type NullTokenizer --vocab-size=128", 128),
        ((0, 18, 0), "--tokenizer-type NullTokenizer --vocab-size=128", 129),
        ((0, 17, 1), "--tokenizer-type TikTokenizer --vocab-size 128", 128),
        ((0, 18, 0), "--tokenizer-type TikTokenizer --vocab-size 128", 128),
    ],
)
def test_the_loop_gets_a_vocabulary_with_as_many_ids(
    numbers: tuple[int, int, int], words: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tested, "check", lambda: argparse.Namespace(numbers=numbers))
    line = completed(words.split())
    assert value_of(line, "--vocab-size") == str(size)
    kind = value_of(words.split(), "--tokenizer-type") or "ByteTokenizer"
    given = value_of(words.split(), "--vocab-size") or "257"
    assert own_vocab_size(argparse.Namespace(vocab_size=size), kind) == int(given)
    assert completed([*words.split(), "--vocab-size", "many"]).count("many") == 1


@pytest.mark.parametrize("ranks", ["x", "0", "-2"])
def test_a_dry_run_for_no_number_of_ranks_is_refused(
    ranks: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        dry_run(["--dry-run", "--dry-run-ranks", ranks])
    assert ended.value.code == 2
    expected = f"--dry-run-ranks expects a positive number but got {ranks}"
    assert expected in capsys.readouterr().err


def test_data_paths_may_stand_in_files(tmp_path: Path) -> None:
    whole, split = tmp_path / "whole.txt", tmp_path / "split.json"
    whole.write_text("0.3 a\n0.7 b")
    split.write_text('{"train": ["1", "a"], "valid": "b c", "test": null}')
    given = argparse.Namespace(data_args_path=str(whole), per_split_data_args_path=str(split))
    args = with_paths_of_files(given)
    assert args.data_path == ["0.3", "a", "0.7", "b"]
    assert (args.train_data_path, args.valid_data_path) == (["1", "a"], ["b", "c"])
    assert args.test_data_path is None


def test_data_is_made_of_the_samples_that_the_loop_asks_for() -> None:
    """Also for one epoch, and by the function of another program."""
    args = parse(f"{MOCK} --tokenizer-type NullTokenizer --vocab-size 9 --padded-vocab-size 10")[0]
    args = argparse.Namespace(
        **vars(args) | {"data_args_path": None, "per_split_data_args_path": None}
    )

    def build(args: Any, tokenizer: Any, source: Any) -> tuple[Any, Any, Any]:
        return source.sizes, None, tokenizer.vocab_size

    built = build_datasets(args, "NullTokenizer", [7, None, 3], build)
    assert built == ((7, None, 3), None, 10)


@pytest.mark.exhaustive
def test_what_the_program_does_not_have_is_refused(tmp_path: Path) -> None:
    done = start(f"--loop megatron-lm {MODEL} --train-iters 4 --sft", tmp_path, RELEASES[-1])
    assert done.returncode == 2 and "--sft: this program has no data" in done.stderr


@pytest.mark.exhaustive
def test_without_a_loop_one_error_names_both_ways_to_get_it(tmp_path: Path) -> None:
    done = start(f"--loop megatron-lm {MODEL}", tmp_path)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if "error" in line]
    assert "pip install 'megatron-core>=0.17.1'" in line and "PYTHONPATH" in line


@pytest.mark.exhaustive
@pytest.mark.parametrize("release", [RELEASES[0], RELEASES[-1]])
def test_a_saved_run_goes_on_with_the_same_losses_or_from_the_checkpoint_before(
    release: str, tmp_path: Path
) -> None:
    line = f"--loop megatron-lm {MODEL} --train-iters 4"
    whole = losses(start(line, tmp_path, release).stdout)
    assert len(whole) == 4
    saved = f"{line} --save saved --load saved --save-interval 2"
    first = start(f"{saved} --exit-interval 3", tmp_path, release)
    assert losses(first.stdout) == whole[:3], first.stderr
    assert "save-checkpoint ..." in first.stdout + first.stderr  # the loop's timers
    newest = tmp_path / "saved" / "iter_0000003" / ".metadata"
    newest.write_bytes(b"damaged")
    again = start(saved, tmp_path, release)
    assert "iter_0000002 is loaded instead" in again.stdout, again.stderr
    # The loop's line of the second iteration after a start is a mean over both.
    assert losses(again.stdout)[0] == whole[2], again.stderr


@pytest.mark.exhaustive
def test_a_command_line_is_planned_or_refused_in_one_line(tmp_path: Path) -> None:
    line = f"--loop megatron-lm {MODEL} --train-iters 4"
    planned = start(f"{line} --dry-run --dry-run-ranks 2", tmp_path, RELEASES[-1])
    assert "ranks: 2 = 1 tensor x 1 pipeline x 1 context x 2 data" in planned.stdout, planned.stderr
    refused = start(f"{line} --tensor-model-parallel-size 3", tmp_path, RELEASES[-1])
    assert refused.returncode == 2 and "Traceback" not in refused.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize("release", [RELEASES[0], RELEASES[-1]])
def test_a_plan_is_the_same_with_the_arguments_of_either_loop(release: str, tmp_path: Path) -> None:
    """Among them are a vocabulary beyond the tokenizer's, latent attention, and experts."""
    model = (
        "--bf16 --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64"
        " --max-position-embeddings 64 --vocab-size 3072 --untie-embeddings-and-output-weights"
        " --position-embedding-type rope --multi-latent-attention --q-lora-rank 32"
        " --kv-lora-rank 32 --num-experts 4 --moe-token-dispatcher-type alltoall"
    )
    line = f"--gpus 8 --pipeline 1,2 --micro-batch 1 --global-batch-size 16 --show 2 {model}"
    tables = []
    for loop in ("own", "megatron-lm"):
        done = start(f"{line} --loop {loop}", tmp_path, release, "tools/plan.py")
        assert done.returncode == 0, done.stderr
        tables.append(done.stdout.partition("#")[0])
    assert tables[0] == tables[1] and " 2. " in tables[0]
    refused = start(
        f"--gpus 8 {MODEL} --loop megatron-lm --sft", tmp_path, release, "tools/plan.py"
    )
    assert refused.returncode == 2 and "--sft: this program has no data" in refused.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize("release", [RELEASES[0], RELEASES[-1]])
def test_numbers_whose_end_needs_rows_of_its_own_are_trained_on(
    release: str, tmp_path: Path
) -> None:
    line = (
        f"--loop megatron-lm {MODEL} --train-iters 1 --mock-data --tokenizer-type NullTokenizer"
        " --vocab-size 128"
    )
    done = start(line, tmp_path, release)
    assert len(losses(done.stdout)) == 1, done.stderr


PROBE = """
import os, sys
import torch
from megatron.mcore_adapter import drop_in
from megatron.pretrain.megatron_lm_loop import loop_arguments

words = sys.argv[1:]
os.environ["RANK"] = "0"
os.environ["WORLD_SIZE"] = "1"
before = dict(os.environ), list(sys.argv)
args = loop_arguments(words, 2)
assert args.world_size == 2 and args.deterministic_mode
assert (dict(os.environ), sys.argv) == before
assert not torch.are_deterministic_algorithms_enabled()
with drop_in.install():
    try:
        loop_arguments(words, 2)
    except RuntimeError as error:
        print(error)
"""


@pytest.mark.exhaustive
def test_arguments_are_checked_without_a_trace_and_not_inside_of_a_run(tmp_path: Path) -> None:
    probe = tmp_path / "probe.py"
    probe.write_text(PROBE)
    done = start(
        f"{MODEL} --train-iters 4 --deterministic-mode", tmp_path, RELEASES[-1], str(probe)
    )
    assert "the drop-in is active for the command line" in done.stdout, done.stderr
