# SPDX-License-Identifier: Apache-2.0
"""The replacements for CUDA-only call sites: made once, and never on a machine with a GPU."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.mcore_adapter import cpu
from tests.support.rank_pool import run_ranks

ROOT = Path(__file__).parents[2]
REPLACED = [
    "torch.cuda.current_device",
    "torch.cuda.synchronize",
    "torch.cuda.get_rng_state",
    "torch.cuda.set_rng_state",
    "torch.cuda.manual_seed",
    "torch.cuda.Stream",
    "torch.cuda.Event",
    "torch.cuda.stream",
    "torch.cuda.current_stream",
    "torch.tensor",
    "torch.zeros",
    "torch.ones",
    "torch.empty",
    "torch.empty_like",
    "torch.Tensor.type",
    "torch.Tensor.cuda",
]
ON_A_GPU = f"""
import importlib.util
import torch

torch.cuda.is_available = lambda: True
found = lambda: [eval(name) for name in {REPLACED!r}]
before = found()
spec = importlib.util.spec_from_file_location("cpu", "megatron/mcore_adapter/cpu.py")
cpu = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cpu)
assert cpu.install() is False
assert all(now is then for now, then in zip(found(), before))
torch.cuda.is_available = lambda: False
try:
    cpu.install()
finally:
    replaced = [now is not then for now, then in zip(found(), before)]
    assert all(replaced), "a name above is not one that is replaced"
"""


def found() -> list[int]:
    """Identities of what stands at the replaced names."""
    return [id(eval(name)) for name in REPLACED]


def is_installed() -> bool:
    """Job: whether torch's functions are those of the module, for which no job has asked."""
    return torch.cuda.current_device.__module__ == cpu.__name__


def install_twice() -> tuple[bool, bool, bool]:
    """Job: install twice; return both results and whether the second changed nothing."""
    first = cpu.install()
    before = found()
    return first, cpu.install(), found() == before


def test_a_second_call_changes_nothing() -> None:
    assert run_ranks(1, install_twice) == [(True, True, True)]


@pytest.mark.exhaustive
def test_nothing_is_replaced_where_there_is_a_gpu() -> None:
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ON_A_GPU], cwd=ROOT, check=True, timeout=60
    )


def use_replacements() -> None:
    """Job: the calls that Megatron-Core makes work and mean what they say."""
    cpu.install()
    device: object = torch.cuda.current_device()
    assert device == torch.device("cpu")
    for made in (
        torch.tensor([1.0], device="cuda"),
        torch.zeros(2, device=torch.device("cuda", 0)),
        torch.ones(2, device="cuda:0"),
        torch.empty(2, device="cuda", pin_memory=True),
        torch.empty_like(torch.zeros(2), device="cuda"),
    ):
        assert made.device == torch.device("cpu")
    assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
    assert torch.zeros(1).type(torch.int64).dtype == torch.int64
    tensor = torch.zeros(1)
    assert tensor.cuda() is tensor
    state = torch.cuda.get_rng_state()
    first = torch.rand(3)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        event = stream.record_event()
    stream.wait_event(event)
    event.synchronize()
    assert torch.cuda.current_stream() == stream and event.query()


def test_calls_that_name_cuda_work_on_the_cpu() -> None:
    run_ranks(1, use_replacements)


def test_ranks_that_run_functions_of_the_adapter_have_it_from_the_start() -> None:
    assert run_ranks(1, is_installed) == [True]
