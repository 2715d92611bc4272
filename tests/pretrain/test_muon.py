# SPDX-License-Identifier: Apache-2.0
"""--optimizer muon trains as Megatron-Core's own Muon does without sharding."""

from dataclasses import replace
from pathlib import Path

import pytest

from megatron.fsdp.optimizer.optimizer_state import parameters_of
from megatron.mcore_adapter.core_optimizers import MuonAndAdam
from tests.fsdp.optimizer.test_matrix_axes import assert_owned
from tests.support import emerging_optimizers_wheel, megatron_release
from tests.support.fork_servers import INSTALLED, Packages
from tests.support.megatron_release import RELEASES
from tests.support.pretrain.parity import (
    GPT2,
    LLAMA,
    MOE,
    OPTIM_OUTSIDE,
    Combination,
)
from tests.support.pretrain.saved_runs import LINE
from tests.support.pretrain.training_runs import Record, assert_close, assert_same_run, build, train
from tests.support.rank_pool import run_ranks

FLAGS = "--train-iters 3 --optimizer muon"
WHOLE_QKV = f"{FLAGS} --muon-no-split-qkv --muon-use-nesterov"
DUPLICATED = f"{FLAGS} --muon-tp-mode duplicated"
FP32 = f"{FLAGS} --muon-fp32-matmul-prec highest"
"""bfloat16 would show that ranks add up gradients in another order."""
DIST = "--optimizer dist_muon"

EXACT = {
    "level0": Combination(2, "dp", 0, GPT2, FLAGS),
    "tp2_blockwise": Combination(2, "tp2", 3, LLAMA, FLAGS),
    "tp2_duplicated": Combination(2, "tp2", 1, GPT2, f"{DUPLICATED} --muon-no-split-qkv"),
    "vpp2": Combination(2, "pp2 vpp2", 3, LLAMA, WHOLE_QKV, layers=4),
}

CLOSE = {
    "level2": Combination(2, "dp", 2, LLAMA, FP32),
    "dist_muon": Combination(2, "dp", 3, GPT2, f"{FP32} --muon-scale-mode shape_scaling", DIST),
    "tp2_distributed": Combination(2, "tp2", 3, LLAMA, f"{FP32} --muon-tp-mode distributed"),
    "tp2_sp_pp2": Combination(4, "tp2 sp pp2", 3, GPT2, f"{FP32} --muon-num-ns-steps 3"),
    "ep2": Combination(2, "ep2", 3, MOE, FP32),
    "tp2_ep2": Combination(4, "tp2 ep2", 1, MOE, f"{FP32} --sequence-parallel"),
    "etp1": Combination(4, "tp2 ep2 etp1", 3, MOE, f"{FP32} --sequence-parallel"),
    "hybrid_optim": Combination(4, "inst2", 3, LLAMA, FP32, OPTIM_OUTSIDE),
}


@pytest.fixture(autouse=True)
def package() -> None:
    emerging_optimizers_wheel.require()


def train_by_muon(*command_lines: str) -> list[Record]:
    """Job: runs one after the other, as :func:`train` does."""
    emerging_optimizers_wheel.install()
    return train(*command_lines)


def runs_of(combination: Combination, packages: Packages = INSTALLED) -> list[Record]:
    """Return a run with Megatron-Core's own data parallelism, and ours."""
    combination = combination.with_few_microbatches()
    # Several instances are a matter of sharding.
    plain = replace(combination, layout=combination.layout.replace("inst2", "dp"))
    lines = (plain.line, combination.ours)
    return run_ranks(combination.ranks, train_by_muon, *lines, packages=packages)[0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", EXACT)
def test_losses_are_those_of_megatron_core_to_the_bit(name: str) -> None:
    ddp, fsdp = runs_of(EXACT[name])
    assert fsdp.losses == ddp.losses
    assert_same_run(fsdp, ddp, loss=0.0, norm=1e-6)


@pytest.mark.always("dist_muon")
@pytest.mark.parametrize("name", CLOSE)
def test_losses_and_norms_are_those_of_megatron_core(name: str) -> None:
    ddp, fsdp = runs_of(CLOSE[name])
    assert_same_run(fsdp, ddp, loss=1e-5, norm=1e-5)


def optimizer_of(command_line: str) -> None:
    emerging_optimizers_wheel.install()
    inner = build(command_line).optimizer.optimizer
    assert isinstance(inner, MuonAndAdam)
    assert_owned(inner.muon)
    matrices, others = map(parameters_of, (inner.muon, inner.adam))
    assert {each.ndim for each in matrices} == {2}
    # The embedding, which is the output layer too, and norms.
    assert sum(each.ndim == 2 for each in others) == 1 < len(others)


def test_each_matrix_has_one_owner_and_adam_has_all_else() -> None:
    run_ranks(2, optimizer_of, f"{LINE} {FLAGS}")


@pytest.mark.exhaustive
def test_numbers_are_those_of_the_newest_release() -> None:
    megatron_release.require(RELEASES[-1])
    combination = CLOSE["tp2_distributed"]
    packages = Packages(RELEASES[-1], emerging_optimizers=True)
    expected = runs_of(combination)
    for record, mine in zip(runs_of(combination, packages), expected, strict=True):
        assert_same_run(record, mine, loss=1e-6, norm=1e-5)


# ---- checkpoints

FOUR = f"{LINE} {FP32} --train-iters 4"

LAYOUTS = {
    "same": (2, ""),
    "four_level1": (4, "--data-parallel-sharding-strategy optim"),
    "hybrid": (4, "--num-distributed-optimizer-instances 2"),
    "tp2": (2, "--tensor-model-parallel-size 2 --muon-tp-mode duplicated"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
}
SAME_SUMS = ("same", "pp2")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Record]:
    """Four steps at level 3 on two ranks, saved at two and four."""
    emerging_optimizers_wheel.require()
    folder = tmp_path_factory.mktemp("muon")
    saves = f"{FOUR} --save {folder} --save-interval 2"
    return folder, run_ranks(2, train_by_muon, saves)[0][0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_resumes_under_any_layout(saved: tuple[Path, Record], name: str) -> None:
    folder, expected = saved
    size, flags = LAYOUTS[name]
    resumed = f"{FOUR} --load {folder} --ckpt-step 2 {flags}"
    record = run_ranks(size, train_by_muon, resumed)[0][0]
    # Otherwise ranks add up losses in another order.
    assert_close(record.losses, expected.losses[2:], 0.0 if name in SAME_SUMS else 1e-6)
