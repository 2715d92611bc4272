# SPDX-License-Identifier: Apache-2.0
"""Saves in the background whose tensors are copied while the next step computes."""

from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron.core.models.gpt import GPTModel

from megatron.mcore_adapter.checkpoints import staging
from megatron.mcore_adapter.checkpoints.background_save import BackgroundSaves
from megatron.mcore_adapter.checkpoints.staging import StagedContent, StagingBuffer
from tests.support.pretrain.saved_runs import DROPOUT, FSDP, GATED, SIX, assert_equal, read
from tests.support.pretrain.training_runs import Record, error_of, refuse, train
from tests.support.pretrain.warm_writers import warm_writers
from tests.support.rank_pool import run_ranks


def kept(tensor: torch.Tensor) -> bool:
    """No tensor changes before it is copied."""
    return False


def test_large_tensors_that_do_not_change_are_copied_after_staging() -> None:
    may_copy, copied = Event(), Event()
    copy = staging._copy

    def copy_late(copies: Any, content: torch.Tensor) -> None:
        if any(staged.num_bytes >= staging._LARGE for _, staged in copies):
            may_copy.wait()
        copy(copies, content)

    large, small = torch.ones(1 << 16), torch.ones(4)
    places: list[StagedContent] = []

    def then(where: StagedContent) -> None:
        places.append(where)
        copied.set()

    buffer = StagingBuffer()
    with patch.object(staging, "_copy", copy_late):
        where = buffer.stage({"large": large, "small": small}, kept, then)
        small.zero_()  # a copy already
        assert not copied.is_set()
        may_copy.set()
        buffer.finish()
    assert places == [where]
    large.zero_()
    staged = buffer.read(where)
    assert staged["large"].sum() == 1 << 16 and staged["small"].sum() == 4
    buffer.close()


def test_tensors_that_change_are_copied_at_once() -> None:
    buffer, weight = StagingBuffer(), torch.ones(1 << 16)
    with patch.object(staging, "_CopyingThread", side_effect=AssertionError):
        where = buffer.stage(weight, lambda tensor: True)
    assert buffer.read(where).sum() == 1 << 16


def test_an_error_of_the_thread_is_raised_when_it_is_waited_for() -> None:
    buffer = StagingBuffer()
    with patch.object(staging, "_copy", side_effect=[None, OSError("no page")]):
        buffer.stage(torch.ones(1 << 16), kept)
        with pytest.raises(OSError, match="no page"):
            buffer.finish()
    buffer.close()


class _LateThread(staging._CopyingThread):
    """A thread that begins when somebody waits for it: as late as can be."""

    def __init__(self, *args: Any):
        self._may_begin = Event()
        super().__init__(*args)

    def _run(self) -> None:
        self._may_begin.wait()
        super()._run()

    def finish(self) -> None:
        self._may_begin.set()
        super().finish()


def train_with_late_copies(command_line: str) -> tuple[Record, int]:
    """Job: a run whose tensors are copied just before the optimizer changes them."""
    waited: list[bool] = []
    finish_copying = BackgroundSaves.finish_copying

    def note_and_finish(self: BackgroundSaves) -> None:
        waited.append(self._buffer._copying is not None)
        finish_copying(self)

    with (
        warm_writers(),
        patch.object(staging, "_LARGE", 0),
        patch.object(staging, "_CopyingThread", _LateThread),
        patch.object(BackgroundSaves, "finish_copying", note_and_finish),
    ):
        return train(command_line)[0], sum(waited)


MOE = (
    "--num-experts 4 --moe-router-topk 2 --moe-router-score-function sigmoid"
    " --moe-router-enable-expert-bias --moe-token-dispatcher-type alltoall"
    " --moe-router-load-balancing-type none"
)
IN_BACKGROUND = "--async-save --use-persistent-ckpt-worker"
LINES = {
    "level_1_bf16": f"{DROPOUT} {GATED} {FSDP} --data-parallel-sharding-strategy optim --bf16",
    "level_2_torch_dist": f"{SIX} {FSDP} --data-parallel-sharding-strategy optim_grads --bf16"
    " --ckpt-format torch_dist",
    "level_3_expert_bias": f"{SIX} {GATED} {FSDP} {MOE}",
    "offload": f"{SIX} {GATED} {FSDP} --optimizer-cpu-offload",
    "offload_level_1": f"{DROPOUT} {FSDP} --data-parallel-sharding-strategy optim --bf16"
    " --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --ckpt-format torch_dist",
    "ddp_bf16": f"{SIX} {GATED} --bf16 --use-distributed-optimizer --overlap-grad-reduce"
    " --overlap-param-gather",
    "ddp_expert_bias": f"{SIX} {GATED} {MOE} --use-distributed-optimizer",
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", LINES)
def test_a_checkpoint_copied_during_the_next_step_is_that_of_a_blocking_save(
    name: str, tmp_path: Path
) -> None:
    line = f"{LINES[name]} --save-interval 2 --exit-interval 5 --save"
    blocking = run_ranks(2, train, f"{line} {tmp_path / 'blocking'}", timeout=300)[0][0]
    line = f"{line} {tmp_path / 'late'} {IN_BACKGROUND}"
    late, num_waited = run_ranks(2, train_with_late_copies, line, timeout=300)[0]
    assert late.losses == blocking.losses
    assert num_waited == 2
    for iteration in (2, 4):
        found, expected = (tensors(tmp_path / each, iteration) for each in ("late", "blocking"))
        assert_equal(found, expected)
    line = f"{LINES[name]} --exit-interval 5 --load {tmp_path / 'late'} --ckpt-step 2"
    assert run_ranks(2, train, line, timeout=300)[0][0].losses == blocking.losses[2:]


def tensors(folder: Path, iteration: int) -> dict[str, torch.Tensor]:
    """All tensors but those of Megatron-Core whose padding is memory that nobody has written."""
    found = read(folder, iteration)
    return {
        key: value for key, value in found.items() if not key.startswith("optimizer.distributed")
    }


def refuse_with_writing_forwards(command_line: str, first_step: int) -> str:
    """Job: the error of a run whose forwards, from a step on, write to a weight in use."""
    forward, num_forwards = GPTModel.forward, 0

    def write_and_forward(self: GPTModel, *args: Any, **keywords: Any) -> Any:
        nonlocal num_forwards
        num_forwards += 1
        weight = self.decoder.final_layernorm.weight
        if num_forwards > 2 * (first_step - 1):  # two microbatches a step
            with torch.no_grad():
                weight.mul_(1.25)
        return forward(self, *args, **keywords)

    with (
        warm_writers(),
        patch.object(staging, "_LARGE", 0),
        patch.object(GPTModel, "forward", write_and_forward),
    ):
        return refuse(command_line)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "first_step"), [("level_3_expert_bias", 5), ("level_1_bf16", 1), ("ddp_bf16", 5)]
)
def test_a_copy_while_a_forward_writes_to_weights_is_an_error(
    name: str, first_step: int, tmp_path: Path
) -> None:
    line = f"{LINES[name]} --save-interval 2 --save {tmp_path} {IN_BACKGROUND}"
    error = error_of(line, first_step, job=refuse_with_writing_forwards)
    failed = 4 if first_step == 5 else 2
    assert error.startswith(f"RunError: the checkpoint of iteration {failed} was not written:")
    for rank in range(2):
        assert f"rank {rank}: a forward has written to weights" in error
    written = ["iter_0000002"] if first_step == 5 else []
    assert [path.name for path in tmp_path.glob("iter_*")] == written
