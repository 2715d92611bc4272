# SPDX-License-Identifier: Apache-2.0
"""Copies of offloaded shards, and other uses of main weights, on the model of a CUDA device."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from megatron.fsdp.backends.host_memory import TO_DEVICE, TO_HOST
from megatron.fsdp.weight_average import WeightAverage
from megatron_fsdp import fully_shard
from tests.support.cuda_model.machine import cuda_model
from tests.support.cuda_model.scenarios import stack_on, step
from tests.support.fsdp.meshes import Meshes
from tests.support.fsdp.reference import Ranks, on_ranks
from tools.cuda_model.machine import CudaModel
from tools.cuda_model.machine import cuda_model as cuda_model_by_name

FORWARD_AND_BACKWARD, STEP = "forward and backward", "step"


class DeviceCopy(NamedTuple):
    """A copy between host and device: where it goes, the stream that it runs on, and when."""

    target: str
    stream: Any
    during: str


class WatchedCopies:
    """The copies and the waits of the host while a model is trained."""

    def __init__(self) -> None:
        self.during = ""
        self.copies: list[DeviceCopy] = []
        self.waits: list[str] = []

    @contextmanager
    def watching(self, machine: CudaModel) -> Iterator[None]:
        """Note copies and waits inside the context."""
        to, copy_, synchronize = Tensor.to, Tensor.copy_, machine.detector.synchronize

        def noted(target: Tensor, source: Tensor) -> None:
            if target.device.type != source.device.type:
                stream = torch.cuda.current_stream()
                self.copies.append(DeviceCopy(target.device.type, stream, self.during))

        def noted_to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            result: Tensor = to(tensor, *args, **kwargs)
            noted(result, tensor)
            return result

        def noted_copy(tensor: Tensor, source: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            noted(tensor, source)
            return copy_(tensor, source, *args, **kwargs)

        def noted_wait(*streams: Any) -> None:
            self.waits.append(self.during)
            synchronize(*streams)

        with (
            patch.object(Tensor, "to", noted_to),
            patch.object(Tensor, "copy_", noted_copy),
            patch.object(machine.detector, "synchronize", noted_wait),
        ):
            yield


@pytest.mark.parametrize("level", [1, 3], ids="level{}".format)
@on_ranks(2)
def test_offloaded_shards_are_copied_beside_compute_and_awaited_once_a_step(level: int) -> None:
    watched = WatchedCopies()
    with cuda_model_by_name(names_cuda=True) as machine:
        torch.manual_seed(0)
        module = nn.Sequential(*[nn.Linear(64, 64, device="cuda") for _ in range(3)])
        model, optimizer = fully_shard(
            module,
            torch.optim.AdamW(module.parameters()),
            device_mesh=init_device_mesh("cuda", (2,), mesh_dim_names=("dp",)),
            dp_shard_dim="dp",
            fsdp_unit_modules=[nn.Linear],
            zero_dp_strategy=level,
            offload_policy="host",
        )
        streams, compute = model.groups[0].memory.streams._streams, torch.cuda.current_stream()
        with watched.watching(machine):
            for _ in range(2):
                watched.during = FORWARD_AND_BACKWARD
                with model.no_sync():
                    for _ in range(2):
                        model(torch.randn(2, 64, device="cuda")).sum().backward()
                watched.during = STEP
                optimizer.step()
                optimizer.zero_grad()
    to_device, to_host = streams.get(TO_DEVICE), streams.get(TO_HOST)
    expected = {"cuda": {to_device}, "cpu": {to_host}}
    if level == 3:
        expected["cuda"].add(to_host)  # the sums of the first microbatch
    for target, own in expected.items():
        found = {each.stream for each in watched.copies if each.target == target}
        assert own <= found and compute not in found
    assert set(watched.waits) == {STEP}
    assert not machine.reports, "\n".join(map(str, machine.reports))


def averaged(model: Any, optimizer: Any) -> None:
    """Average main weights, and train with the average."""
    average = WeightAverage(model)
    step(model, optimizer, 1)
    model.start_param_sync()
    average.update()
    model.start_param_sync()
    with average.applied():
        model.start_param_sync()


def loaded(model: Any, optimizer: Any) -> None:
    """Load whole weights and shards of them."""
    whole = {name: torch.full(value.shape, 0.5) for name, value in model.state_dict().items()}
    model.start_param_sync()
    model.load_state_dict(whole)
    model.start_param_sync()
    model.load_state_dict(model.state_dict())


def copied(model: Any, optimizer: Any) -> None:
    """Copy the sharded model."""
    copy.deepcopy(model)


def reports_while_gathering(use: Callable[[Any, Any], None]) -> list[str]:
    with cuda_model() as machine:
        model, optimizer = stack_on(1, Meshes())
        step(model, optimizer, 0)
        model.start_param_sync()
        use(model, optimizer)
    return [str(report) for report in machine.reports]


@pytest.mark.parametrize("use", [averaged, loaded, copied], ids=lambda use: use.__name__)
def test_main_weights_are_used_after_the_gathers_that_read_them(ranks: Ranks, use: Any) -> None:
    for reports in ranks(2, reports_while_gathering, use):
        assert not reports, "\n".join(reports)
