# SPDX-License-Identifier: Apache-2.0
"""The model counts kernels that may overlap, and storages that are alive."""

import torch

from tools.cuda_model import cuda_model


def test_kernels_before_the_first_wait_for_an_event_count_as_overlap() -> None:
    with cuda_model() as model:
        one, other, side = torch.ones(4), torch.ones(4), torch.cuda.Stream()
        current = torch.cuda.current_stream()
        side.wait_stream(current)  # it has launched nothing since
        with torch.cuda.stream(side):
            one.add_(1)
        done = side.record_event()
        other.add_(1)
        other.mul_(2)
        side.wait_event(done)  # its own
        current.wait_event(done)
        other.add_(1)
        current.wait_event(done)  # a second time
    assert model.detector.num_beside == 2


def test_storages_are_counted_until_they_die_also_without_memory() -> None:
    with cuda_model() as model:
        before = model.detector.blocks.num_storages
        tensor = torch.ones(4)
        view = tensor[:2]
        tensor.untyped_storage().resize_(0)
        del tensor
        assert model.detector.blocks.num_storages == before + 1
        del view
        assert model.detector.blocks.num_storages == before
