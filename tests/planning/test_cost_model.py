# SPDX-License-Identifier: Apache-2.0
"""The model of time: products by shape, attention by length, pipelines, and FSDP beside DDP."""

import argparse
from dataclasses import replace
from typing import Any

import pytest

from megatron.planning.candidates import Candidate
from megatron.planning.costs.gpu_kernels import Fitted, Kernels, part_of_tiles
from megatron.planning.costs.layer_memory import FULL, NONE, LayerMemory
from megatron.planning.costs.layer_seconds import LayerWork
from megatron.planning.costs.message_seconds import collective_seconds, stage_message_seconds
from megatron.planning.costs.model_sizes import ExpertSizes, ModelSizes, RunLayout
from megatron.planning.costs.pipeline_stages import stages_of
from megatron.planning.costs.software import Software
from megatron.planning.costs.step_formula import FormulaStep, StepFormula, UnitElements
from megatron.planning.layout_search import ChosenLayout
from megatron.planning.machine import MACHINES, Cluster, Link
from megatron.planning.search import Prediction
from megatron.planning.sharding_choice import Choice, choices_of, turn_of

H100 = MACHINES["h100"]
MODEL = ModelSizes(
    layers=16,
    dense_layers=16,
    hidden=4096,
    ffn=14336,
    heads=32,
    key_heads=8,
    head=128,
    vocabulary=128256,
    sequence=8192,
    is_gated=True,
)
EXPERTS = replace(MODEL, dense_layers=0, experts=ExpertSizes(number=64, top_k=4, width=2048))


def seconds_of(sizes: ModelSizes = MODEL, machine: Cluster = H100, **mesh: Any) -> float:
    software = mesh.pop("software", Software())
    layout = RunLayout(**{"gpus": 64, "global_batch": 256, **mesh})
    return StepFormula(sizes, layout, machine, software).step().seconds


def test_tiles_of_a_product_waste_what_the_last_wave_and_the_edges_leave() -> None:
    assert part_of_tiles(256 * 132, 128, 1, 132) == 1.0
    assert part_of_tiles(256 * 133, 128, 1, 132) < 0.9  # a second wave for one tile
    assert part_of_tiles(256 * 132 + 1, 128, 1, 132) < 1.0
    assert part_of_tiles(64, 64, 1, 132) < 0.01  # one of all multiprocessors works


@pytest.mark.parametrize("is_fp8", [False, True], ids=["bf16", "fp8"])
def test_a_product_is_never_faster_than_the_best_and_never_slower_for_less_work(
    is_fp8: bool,
) -> None:
    kernels = Kernels(H100, Software())
    flops = H100.fp8_flops if is_fp8 else H100.flops
    assert flops is not None
    for size in (64, 333, 1024, 4096, 16384):
        seconds = kernels.product(size, size, size, is_fp8=is_fp8)
        assert seconds >= 2.0 * size**3 / flops
        assert kernels.product(2 * size, size, size, is_fp8=is_fp8) > 0.999 * seconds
        assert kernels.product(size, size, 2 * size, is_fp8=is_fp8) > 0.999 * seconds
    big = kernels.product(16384, 16384, 16384, is_fp8=is_fp8)
    best = 2.0 * 16384**3 / (flops * (H100.fp8_efficiency if is_fp8 else H100.compute_efficiency))
    assert big < 1.2 * best


def test_a_thin_product_is_bound_by_memory() -> None:
    seconds = Kernels(H100, Software()).product(1, 8192, 8192)
    assert seconds >= 2 * 8192**2 / H100.memory_bytes_per_second


def test_attention_is_slower_for_short_sequences_old_kernels_and_narrow_heads() -> None:
    def rate(length: int, attention: str = "cudnn", head: int = 128) -> float:
        kernels = Kernels(H100, Software(attention=attention))
        forward, backward = kernels.attention(1, length, length / 2, 2 * 32 * head, head)
        return length**2 * head / (forward + backward)

    assert rate(512) < rate(2048) < rate(65536)
    assert rate(8192, "triton2023") < rate(8192, "flash2") < rate(8192, "cudnn")
    assert rate(8192, head=64) < rate(8192)


def test_a_lower_power_limit_slows_products_and_not_memory() -> None:
    limited = Kernels(replace(H100, power_part=0.7), Software())
    free = Kernels(H100, Software())
    assert limited.product(8192, 8192, 8192) > 1.1 * free.product(8192, 8192, 8192)
    assert limited.move(1e9) == free.move(1e9)


def test_the_step_gets_longer_with_everything_that_costs_time() -> None:
    seconds = seconds_of()
    assert seconds_of(machine=replace(H100, flops=H100.flops / 2)) > seconds
    assert seconds_of(machine=replace(H100, memory_bytes_per_second=1e12)) > seconds
    slow_links = replace(H100, between=replace(H100.between, bytes_per_second=1e9))
    assert seconds_of(machine=slow_links) > 2 * seconds
    assert seconds_of(machine=MACHINES["a100"]) > 1.5 * seconds
    assert seconds_of(machine=MACHINES["gb200"]) < seconds
    assert seconds_of(software=Software(fusion="eager", has_fused_norm=False)) > seconds
    assert seconds_of(software=Software(overlaps_data=False)) > seconds
    assert seconds_of(software=Software(uses_fp8=True)) < seconds


def test_tensor_parallelism_costs_messages_and_overlap_hides_a_part_of_them() -> None:
    alone = seconds_of(gpus=8, global_batch=8)
    exposed = seconds_of(gpus=8, global_batch=8, tensor=8)
    overlapped = seconds_of(
        gpus=8, global_batch=8, tensor=8, software=Software(overlaps_tensor=True)
    )
    assert alone < overlapped < exposed


@pytest.mark.parametrize(
    ("level", "copies"), [(0, 1), (1, 1), (1, 8)], ids=["ddp", "zero1", "hybrid"]
)
def test_buckets_have_the_elements_of_whole_units(level: int, copies: int) -> None:
    small = replace(MODEL, layers=2, hidden=512, ffn=2048, heads=4, key_heads=4, vocabulary=1024)
    mesh = RunLayout(64, level=level, copies=copies, global_batch=64, is_fsdp=False)
    no_links = replace(H100, inside=Link(1e30, 0.0), between=Link(1e30, 0.0))
    found = StepFormula(small, mesh, H100, Software()).step()
    alone = StepFormula(small, mesh, no_links, Software()).step()
    plain = Software(overlaps_data=False)
    exposed = StepFormula(small, mesh, H100, plain).step()
    # All weights are in one bucket, which is full when the backward ends: nothing overlaps.
    assert found.seconds - alone.seconds >= 0.999 * (exposed.seconds - alone.seconds)


def test_buckets_are_larger_on_more_data_ranks() -> None:
    sizes = replace(MODEL, layers=1, vocabulary=1024)  # 226 million elements

    def part_exposed(gpus: int) -> float:
        """Return the part of the messages that waits for the last bucket or longer."""
        mesh = RunLayout(gpus, level=1, global_batch=8 * gpus, is_fsdp=False)
        found = StepFormula(sizes, mesh, H100, Software()).step().exposed_seconds
        plain = Software(overlaps_data=False)
        return found / StepFormula(sizes, mesh, H100, plain).step().exposed_seconds

    assert part_exposed(512) > 0.999 > 0.95 > part_exposed(8)


@pytest.mark.parametrize(
    ("level", "is_fsdp"), [(0, False), (1, False), (2, True), (3, True)], ids=str
)
def test_a_tied_vocabulary_is_gathered_reduced_and_updated_once(level: int, is_fsdp: bool) -> None:
    slow_links = replace(H100, inside=Link(1e9, 0.0))
    software = Software(overlaps_data=False)
    mesh = RunLayout(8, level=level, global_batch=8, is_fsdp=is_fsdp)

    def messages(vocabulary: int, is_tied: bool) -> float:
        """Return the seconds of the messages and the update."""
        sizes = replace(MODEL, layers=1, vocabulary=vocabulary, is_tied=is_tied)
        return StepFormula(sizes, mesh, slow_links, software).step().exposed_seconds

    of_layer = messages(0, False)
    of_two = messages(128256, False) - of_layer
    of_tied = messages(128256, True) - of_layer
    assert of_tied == pytest.approx(of_two / 2)


def test_virtual_stages_divide_the_bubble() -> None:
    def step(virtual: int) -> FormulaStep:
        mesh = RunLayout(64, pipeline=8, virtual=virtual, global_batch=64, level=1, is_fsdp=False)
        return StepFormula(MODEL, mesh, H100, Software()).step()

    assert step(2).bubble_seconds == pytest.approx(step(1).bubble_seconds / 2, rel=0.1)
    assert step(2).seconds < step(1).seconds


def test_imbalance_and_exchanges_slow_experts() -> None:
    near = seconds_of(EXPERTS, expert=8)
    assert seconds_of(EXPERTS, expert=8, software=Software(imbalance=1.5)) > near
    assert seconds_of(EXPERTS, expert=64) > near  # between nodes
    once = seconds_of(EXPERTS, expert=64, software=Software(deduplicates_tokens=True))
    beside = seconds_of(EXPERTS, expert=64, software=Software(overlaps_exchange=True))
    assert max(once, beside) < seconds_of(EXPERTS, expert=64)


def test_layers_that_predict_further_tokens_cost_a_layer_and_an_output() -> None:
    more = replace(MODEL, predicted_tokens=1)
    assert 1.05 < seconds_of(more) / seconds_of() < 1.25
    assert more.flops_per_token > MODEL.flops_per_token


def test_stages_have_all_layers_and_the_ends_fewer_where_they_do_not_divide() -> None:
    for layers, num_stages in ((126, 8), (94, 4), (61, 16), (24, 16), (80, 4)):
        stages = stages_of(replace(MODEL, layers=layers), RunLayout(64, pipeline=num_stages))
        assert sum(stage.dense for stage in stages) == layers and len(stages) == num_stages
    counts = [
        stage.dense for stage in stages_of(replace(MODEL, layers=126), RunLayout(64, pipeline=8))
    ]
    assert counts == [15, 16, 16, 16, 16, 16, 16, 15]


def test_recomputed_layers_keep_their_inputs_alone() -> None:
    mesh = RunLayout(8)
    memory = LayerMemory(MODEL, mesh, Software(), FULL)
    assert memory.kept(False) == 2 * 8192 * 4096
    half = replace(memory, part=0.5)
    assert memory.kept(False) < half.kept(False) < memory.whole_layer(False)


def test_fsdp_and_ddp_are_compared_with_what_fits() -> None:
    small = replace(MODEL, layers=8)
    found = choices_of(
        sizes=small,
        global_batch=64,
        machine=H100,
        software=Software(),
        memory_limit=72e9,
        gpus=[8, 64],
    )
    assert [choice.gpus for choice in found] == [8, 64]
    for choice in found:
        for layout in (choice.fsdp, choice.ddp):
            assert layout is not None and layout.step.peak_bytes <= 72e9
    none = choices_of(
        sizes=small,
        global_batch=64,
        machine=H100,
        software=Software(),
        memory_limit=1e9,
        gpus=[8],
    )
    assert none[0].fsdp is None and none[0].ddp is None
    assert turn_of(none) == "neither fits on these numbers of GPUs"


def test_the_turn_is_where_the_faster_one_changes() -> None:
    def layout(seconds: float) -> ChosenLayout:
        return ChosenLayout(RunLayout(8), FormulaStep(seconds, 0, 0, 0, 0, "none", 1.0))

    found = [Choice(8, layout(1.0), layout(2.0)), Choice(16, layout(1.0), layout(0.5))]
    assert turn_of(found) == "FSDP is faster below 16 GPUs, DDP with TP and PP from there on"
    assert turn_of(found[:1]) == "FSDP is faster on all of these numbers of GPUs"


def test_a_slower_host_launches_the_output_later() -> None:
    machine = replace(H100, host_speed=0.5)
    mesh = RunLayout(8)
    usual = LayerWork(MODEL, mesh, H100, Software()).of_output().host
    slow = LayerWork(MODEL, mesh, machine, Software()).of_output().host
    assert slow.forward == pytest.approx(2 * usual.forward)


def test_a_slower_host_sends_messages_between_stages_later() -> None:
    usual = stage_message_seconds(H100, 1e6, 8, virtual=2)
    slow = stage_message_seconds(replace(H100, host_speed=0.5), 1e6, 8, virtual=2)
    assert slow - usual == pytest.approx(2 * 4 * Fitted().launch)
    with_stages = {"pipeline": 8, "gpus": 8, "global_batch": 8, "level": 1, "is_fsdp": False}
    args = argparse.Namespace(
        world_size=8,
        pipeline_model_parallel_size=8,
        context_parallel_size=1,
        micro_batch_size=1,
        sequence_parallel=False,
        seq_length=MODEL.sequence,
        hidden_size=MODEL.hidden,
        bf16=True,
        fp16=False,
    )
    num_bytes = 2 * MODEL.sequence * MODEL.hidden
    alone = Candidate(1, 8, 1, 1, 1, 1, recomputes=False, micro_batch=1)
    for speed in (1.0, 0.01):
        machine = replace(H100, host_speed=speed)
        expected = stage_message_seconds(machine, num_bytes, 1)
        # The search and the formulas send the same messages.
        found = Prediction(candidate=alone, flags=[], args=args, machine=machine, stages=[])
        assert found.message_seconds == pytest.approx(expected)
        formula = StepFormula(MODEL, RunLayout(**with_stages), machine, Software())
        assert formula._stage_messages() == pytest.approx(expected)


def test_messages_between_stages_are_sent_for_each_virtual_stage() -> None:
    software = Software(overlaps_data=False)
    slow = replace(H100, between=replace(H100.between, bytes_per_second=1e9))

    def lost(virtual: int) -> float:
        """Return the seconds that slow links cost."""
        mesh = {"pipeline": 8, "virtual": virtual, "level": 1, "is_fsdp": False}
        mesh |= {"gpus": 64, "global_batch": 64}
        fast = seconds_of(software=software, **mesh)
        return seconds_of(software=software, machine=slow, **mesh) - fast

    assert lost(2) > 1.5 * lost(1)


def test_level_2_gathers_once_a_step_and_level_3_with_each_microbatch() -> None:
    slow = replace(H100, inside=replace(H100.inside, bytes_per_second=10e9))

    def exposed(level: int, global_batch: int) -> float:
        mesh = RunLayout(8, level=level, global_batch=global_batch)
        return StepFormula(MODEL, mesh, slow, Software()).step().exposed_seconds

    for level in (2, 3):
        assert exposed(level, 64) > exposed(level, 8)  # gradients are reduced each time
    assert exposed(2, 64) < 0.7 * exposed(3, 64)


def test_a_part_of_recomputed_layers_needs_the_memory_of_a_whole_one() -> None:
    memory = LayerMemory(MODEL, RunLayout(8), Software(), FULL, part=0.5)
    whole = memory.whole_layer(False) - memory.input_bytes
    assert memory.recomputed(False) == whole
    assert replace(memory, part=1.0).recomputed(False) == whole
    assert replace(memory, recompute=NONE).recomputed(False) == 0


def test_a_layer_that_predicts_further_tokens_has_weights_and_activations() -> None:
    mesh = RunLayout(8, global_batch=8)
    one = StepFormula(MODEL, mesh, H100, Software()).step()
    more = replace(MODEL, predicted_tokens=1)
    two = StepFormula(more, mesh, H100, Software()).step()
    layer = (MODEL.attention_weights + MODEL.dense_weights) / 8
    kept = LayerMemory(MODEL, mesh, Software()).kept(False)
    assert two.peak_bytes - one.peak_bytes > 16 * layer + kept


def test_fp32_is_slower_and_larger_than_bf16() -> None:
    plain = Software(compute_bytes=4, weight_bytes=4, gather_bytes=4)
    mesh = RunLayout(8, global_batch=8, level=1, is_fsdp=False)
    half = StepFormula(MODEL, mesh, H100, Software()).step()
    full = StepFormula(MODEL, mesh, H100, plain).step()
    assert full.seconds > 1.7 * half.seconds
    assert full.peak_bytes > 1.2 * half.peak_bytes
    kept = LayerMemory(MODEL, mesh, Software()).kept(False)
    assert LayerMemory(MODEL, mesh, plain).kept(False) == 2 * kept


@pytest.mark.parametrize("copies", [2, 4, 8])
def test_experts_with_fewer_ranks_than_copies_are_reduced_among_these(copies: int) -> None:
    elements = UnitElements(dense=0.0, experts=1e9)
    mesh = RunLayout(64, expert=32, copies=copies, global_batch=256)
    formula = StepFormula(EXPERTS, mesh, H100, Software())
    # The two ranks that have the same experts are a copy each: they gather nothing.
    assert elements.of_shard(mesh) == elements.whole
    assert formula._gather_seconds(elements) == 0
    among_two = collective_seconds(H100, "all_reduce", 4e9, range(0, 64, 32))
    assert formula._reduce_seconds(elements) == among_two > 0
