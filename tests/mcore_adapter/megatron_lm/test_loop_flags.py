# SPDX-License-Identifier: Apache-2.0
"""Command lines of Megatron-LM's loop: what is added, and what is refused."""

import pytest

from megatron.mcore_adapter.megatron_lm.loop_flags import LoopCommandLine, LoopFlagError

RUN = ["--micro-batch-size", "2"]
FSDP = [*RUN, "--use-megatron-fsdp"]


SECOND = ["--megatron-fsdp-version", "2"]


def completed(words: list[str], has_cuda: bool = True, **environment: str) -> LoopCommandLine:
    return LoopCommandLine(words, environment, has_cuda, has_loop=True).complete()


def test_the_one_flag_brings_what_the_loop_requires() -> None:
    assert completed(FSDP).notes() == [
        "set --ckpt-format fsdp_dtensor --data-parallel-sharding-strategy optim_grads_params"
        " --use-distributed-optimizer"
    ]


def test_what_the_user_says_stays() -> None:
    given = "--data-parallel-sharding-strategy=optim --ckpt-format fsdp_dtensor"
    words = [*FSDP, *given.split(), "--use-distributed-optimizer"]
    assert completed(words).added == []


def test_the_second_generation_is_told_to_loops_that_know_it() -> None:
    for words in (SECOND, ["--megatron-fsdp-version=2"]):
        before = completed([*FSDP, *words, "--swiglu"])
        assert before.version == 2 and before.completed[: len(FSDP) + 1] == [*FSDP, "--swiglu"]
        assert "--use-distributed-optimizer" in before.completed  # these loops demand it
        since = LoopCommandLine([*FSDP, *words], {}, True, has_loop=True, has_version=True)
        assert since.complete().completed[: len(FSDP) + len(words)] == [*FSDP, *words]
        assert "--use-distributed-optimizer" not in since.completed
    first = [*FSDP, "--megatron-fsdp-version", "1"]
    assert completed(first).version == completed(FSDP).version == 1
    assert completed(first).completed == completed(FSDP).completed


def test_ddp_on_a_gpu_and_other_programs_are_left_alone() -> None:
    assert completed(RUN).added == []
    assert completed(["--use-megatron-fsdp"], has_cuda=False).notes() == []
    assert LoopCommandLine(FSDP, {}, has_cuda=False, has_loop=False).complete().notes() == []


def test_only_a_cpu_turns_the_fusion_of_weight_gradients_off() -> None:
    assert "--no-gradient-accumulation-fusion" not in completed(FSDP).added
    assert "--no-gradient-accumulation-fusion" in completed(FSDP, has_cuda=False).added


def test_a_cpu_brings_its_own_settings_for_any_data_parallel_class() -> None:
    added = completed(RUN, has_cuda=False).added
    assert added[:4] == ["--distributed-backend", "gloo", "--transformer-impl", "local"]
    assert "--ckpt-format" not in added
    both = completed(FSDP, has_cuda=False).added
    assert sorted(both) == sorted(set(both))


def test_the_single_queue_of_scripts_for_tensor_parallelism_is_removed() -> None:
    line = completed(FSDP, CUDA_DEVICE_MAX_CONNECTIONS="1")
    assert line.unset == ["CUDA_DEVICE_MAX_CONNECTIONS"]
    assert line.notes()[-1] == "removed CUDA_DEVICE_MAX_CONNECTIONS from the environment"
    assert completed(FSDP, CUDA_DEVICE_MAX_CONNECTIONS="8").unset == []
    assert completed(RUN, CUDA_DEVICE_MAX_CONNECTIONS="1").unset == []


@pytest.mark.parametrize(
    "words, message",
    [
        (["--ckpt-format", "torch_dist"], "--ckpt-format torch_dist with --use-megatron-fsdp"),
        (["--ckpt-format=fsdp_dtensor", "--ckpt-format=torch"], "--ckpt-format torch with"),
        (["--ckpt-format", "zarr"], "write --ckpt-format fsdp_dtensor or leave it out"),
        (["--use-torch-fsdp2"], "leave one of them out"),
        ([*SECOND, "--use-distributed-optimizer"], "--megatron-fsdp-version 2: hooks do"),
        (["--megatron-fsdp-version", "3"], "expects 1 or 2 but got 3"),
        (["--check-weight-hash-across-dp-replicas-interval", "5"], "have no replicas"),
    ],
)
def test_contradictions_of_the_flag_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(LoopFlagError, match=message):
        completed([*FSDP, *words])


def test_weight_hashes_work_where_weights_are_replicated() -> None:
    interval = ["--check-weight-hash-across-dp-replicas-interval", "5"]
    completed([*FSDP, *interval, "--data-parallel-sharding-strategy", "optim"])


def test_everything_that_needs_a_gpu_is_refused_at_once() -> None:
    words = [*RUN, "--distributed-backend", "nccl", "--moe-grouped-gemm", "--fp8-format=hybrid"]
    with pytest.raises(LoopFlagError) as caught:
        completed(words, has_cuda=False)
    for part in ("write --distributed-backend gloo", "--moe-grouped-gemm needs", "--fp8-format"):
        assert part in str(caught.value)
    completed(words)


def test_registered_memory_needs_a_gpu_and_no_overlap_of_experts() -> None:
    words = [*FSDP, "--use-nccl-ub", "--overlap-moe-expert-parallel-comm"]
    assert completed(words[:-1]).problems == []
    with pytest.raises(LoopFlagError) as caught:
        completed(words, has_cuda=False)
    assert "comm does not go with --use-nccl-ub: leave one out" in str(caught.value)
    assert "--use-nccl-ub needs a GPU, and there is none: leave it out" in str(caught.value)


def test_a_cpu_keeps_layers_of_transformer_engine_where_they_can_be_imported() -> None:
    engine = ["--transformer-impl", "transformer_engine", "--fp8-format", "hybrid"]
    line = LoopCommandLine([*FSDP, *engine], {}, has_cuda=False, has_loop=True, has_engine=True)
    assert "--transformer-impl" not in line.complete().added
    assert "--no-rope-fusion" in line.added
    with pytest.raises(LoopFlagError, match="--fp8-format needs a GPU") as refused:
        completed([*FSDP, *engine], has_cuda=False)
    assert "Transformer Engine needs CUDA" in str(refused.value)
    # Whoever does not ask for them gets local layers.
    line = LoopCommandLine(FSDP, {}, has_cuda=False, has_loop=True, has_engine=True)
    assert "local" in line.complete().added
    with pytest.raises(LoopFlagError, match="--fp4-format needs a GPU"):
        words = [*FSDP, "--fp4-format", "e2m1"]
        LoopCommandLine(words, {}, has_cuda=False, has_loop=True, has_engine=True).complete()


def test_the_second_generation_needs_the_flag() -> None:
    with pytest.raises(LoopFlagError, match="--megatron-fsdp-version needs --use-megatron-fsdp"):
        completed([*RUN, *SECOND])


def test_a_run_that_saves_stops_at_a_signal_and_writes_by_itself() -> None:
    assert "--exit-signal-handler" in completed([*FSDP, "--save", "folder"]).added
    assert "--exit-signal-handler" not in completed(FSDP).added
    added = completed([*FSDP, "--save", "folder", "--async-save"]).added
    for word in ["--async-strategy", "mcore", "--use-persistent-ckpt-worker"]:
        assert word in added


def test_flags_of_this_project_are_kept_from_the_loop() -> None:
    line = completed([*FSDP, "--no-load-fallback", "--swiglu"])
    assert "--no-load-fallback" not in line.completed and "--swiglu" in line.completed
    assert line.own_arguments() == {
        "no_load_fallback": True,
        "no_verify_integrity": False,
        "no_check_checkpoint_args": False,
    }


def test_all_contradictions_are_told_at_once() -> None:
    words = (
        "--optimizer muon --fp16 --outer-dp-sharding-strategy optim"
        " --data-parallel-sharding-strategy no_shard --init-model-with-meta-device"
        " --overlap-moe-expert-parallel-comm --mtp-num-layers 1"
    )
    line = LoopCommandLine([*FSDP, *words.split()], {}, True, has_loop=True, has_muon=False)
    with pytest.raises(LoopFlagError) as error:
        line.complete()
    for part in (
        "--outer-dp-sharding-strategy optim needs --data-parallel-sharding-strategy optim_grads",
        "needs an outer axis",
        "--init-model-with-meta-device with",
        "pip install emerging-optimizers",
        "--fp16 with --optimizer muon",
        "--overlap-moe-expert-parallel-comm does not go with --mtp-num-layers",
    ):
        assert part in str(error.value)
