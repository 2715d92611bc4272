# SPDX-License-Identifier: Apache-2.0
"""Graphs of the model are captured under CUDA's rules, and replays compute what was captured."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.support.fsdp.reference import Ranks
from tools.cuda_model import cuda_model
from tools.cuda_model.graphs import CaptureError
from tools.cuda_model.reports import CAPTURE, RELEASED


def kinds_of(program: Callable[[], object]) -> list[str]:
    with cuda_model() as model:
        program()
    return [report.kind for report in model.reports]


def test_a_replay_computes_on_the_memory_of_the_capture() -> None:
    def program() -> None:
        x, total = torch.ones(4), torch.zeros(4)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            assert torch.cuda.is_current_stream_capturing()
            double = x * 2
            total.add_(double)
        assert not torch.cuda.is_current_stream_capturing()
        assert total.tolist() == [0.0] * 4  # nothing runs in a capture
        x.fill_(3)
        graph.replay()
        graph.replay()
        assert double.tolist() == [6.0] * 4 and total.tolist() == [12.0] * 4

    assert kinds_of(program) == []


def test_replays_draw_the_random_numbers_that_calls_would_draw() -> None:
    def drawn(with_graph: bool) -> list[list[float]]:
        torch.manual_seed(7)
        x, graph = torch.zeros(3), torch.cuda.CUDAGraph()
        if with_graph:
            with torch.cuda.graph(graph):
                x.uniform_()
        values = []
        for _ in range(2):
            graph.replay() if with_graph else x.uniform_()
            values.append(x.tolist())
        return values

    with cuda_model():
        assert drawn(True) == drawn(False)


def test_graphed_callables_of_torch_have_the_bits_of_calls() -> None:
    def program() -> None:
        plain, graphed = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        graphed.load_state_dict(plain.state_dict())
        torch.cuda.make_graphed_callables(graphed, (torch.randn(2, 3, requires_grad=True),))
        for _ in range(2):
            x = torch.randn(2, 3)
            gradients = []
            for module in (plain, graphed):
                given = x.clone().requires_grad_()
                module.zero_grad()
                module(given).tanh().sum().backward()
                gradients.append([given.grad, module.weight.grad.clone(), module.bias.grad.clone()])
            for ours, theirs in zip(*gradients, strict=True):
                assert torch.equal(ours, theirs)

    assert kinds_of(program) == []


def side_stream(joins: bool, returns: bool) -> None:
    x, side = torch.ones(4), torch.cuda.Stream()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        if joins:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.add_(1)
        if returns:
            torch.cuda.current_stream().wait_stream(side)


def test_side_streams_that_join_and_return_are_captured() -> None:
    assert kinds_of(lambda: side_stream(True, True)) == []


def waits_for_work_outside() -> None:
    side = torch.cuda.Stream()
    before = side.record_event()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.cuda.current_stream().wait_event(before)


def captured(act: Callable[[torch.Tensor], object]) -> Callable[[], None]:
    def program() -> None:
        x = torch.ones(1)
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            act(x)

    return program


BROKEN = {
    "item": (captured(lambda x: x.item()), "host wait"),
    "tolist": (captured(lambda x: x.tolist()), "host wait"),
    "numpy": (captured(lambda x: x.numpy()), "host wait"),
    "synchronize": (captured(lambda x: torch.cuda.synchronize()), "host wait"),
    "event": (captured(lambda x: torch.cuda.Event().synchronize()), "host wait"),
    "outside": (waits_for_work_outside, "waits during the capture of a graph for work outside"),
    "not joined": (lambda: side_stream(False, True), "has not joined the capture"),
    "not returned": (lambda: side_stream(True, False), "has not joined at the end"),
    "default stream": (lambda: torch.cuda.CUDAGraph().capture_begin(), "on the default stream"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_breaks_a_rule_is_reported_and_raised(name: str) -> None:
    program, message = BROKEN[name]

    def broken() -> None:
        with pytest.raises(CaptureError, match=message):
            program()

    assert CAPTURE in kinds_of(broken)


@pytest.mark.parametrize("how", ["deleted", "resized"])
def test_memory_that_was_released_since_the_capture_is_reported(how: str) -> None:
    def program() -> None:
        x, total, graph = torch.ones(4), torch.zeros(4), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            total.add_(x)
        if how == "resized":
            x.untyped_storage().resize_(0)
            x.untyped_storage().resize_(16)
        else:
            del x
        with pytest.raises(CaptureError, match="memory that was released since the capture"):
            graph.replay()

    assert kinds_of(program) == [RELEASED]


def kinds_at_the_end_of_groups(is_reset: bool) -> list[str]:
    """Job: capture a collective, and destroy its group while there is the graph, or after it."""

    def program() -> None:
        x, graph = torch.ones(4), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            dist.all_reduce(x)
        graph.replay()
        if is_reset:
            graph.reset()
        dist.destroy_process_group()

    return kinds_of(program)


def test_groups_are_destroyed_after_the_graphs_of_their_collectives(ranks: Ranks) -> None:
    assert ranks(2, kinds_at_the_end_of_groups, True) == [[], []]
    assert ranks(2, kinds_at_the_end_of_groups, False) == [[CAPTURE], [CAPTURE]]
