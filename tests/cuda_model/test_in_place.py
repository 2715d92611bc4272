# SPDX-License-Identifier: Apache-2.0
"""Independent roots of one context, on the model of a CUDA device: nothing is reported."""

import pytest

from tests.support.cuda_model.roots_in_place import train_roots
from tests.support.fsdp.reference import Ranks


@pytest.mark.parametrize("has_one_stream", [False, True], ids=["two_streams", "one_stream"])
@pytest.mark.parametrize("level", [1, 3])
def test_roots_that_share_streams_read_nothing_early(
    ranks: Ranks, level: int, has_one_stream: bool
) -> None:
    for reports in ranks(2, train_roots, level, has_one_stream):
        assert not reports, "\n\n".join(reports)
