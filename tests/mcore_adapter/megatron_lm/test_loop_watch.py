# SPDX-License-Identifier: Apache-2.0
"""The process groups of Megatron-LM's loop, as the watch lets it make them."""

from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from megatron.fsdp.backends import rendezvous
from megatron.mcore_adapter.megatron_lm.loop_watch import groups_of_this_attempt


@pytest.mark.parametrize("store", [None, "a store"])
@pytest.mark.parametrize("asked, made", [("nccl", "cpu:gloo,cuda:nccl"), ("fake", "fake")])
def test_the_backend_is_that_of_the_run_but_for_groups_that_pretend(
    asked: str, made: str, store: str | None
) -> None:
    calls: list[dict[str, Any]] = []
    settings = {"backend": asked, "store": store, "rank": 1, "world_size": 2}
    with (
        patch.object(dist, "init_process_group", lambda **settings: calls.append(settings)),
        groups_of_this_attempt("cpu:gloo,cuda:nccl"),
    ):
        dist.init_process_group(**settings)
    if store is None:
        settings = {"init_method": rendezvous.INIT_METHOD}
    assert calls == [{**settings, "backend": made}]
