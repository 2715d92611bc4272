# SPDX-License-Identifier: Apache-2.0
"""Every deliberate defect in the handling of streams is reported, on all ranks."""

import pytest

from tests.support.cuda_model.defects import Defect, findings_with
from tests.support.cuda_model.defects_of_streams import DEFECTS
from tests.support.cuda_model.scenarios import SCENARIOS
from tests.support.fsdp.reference import Ranks


def test_there_are_at_least_forty_defects_that_change_the_code() -> None:
    names = [defect.name for defect in DEFECTS]
    assert len(names) >= 40 and len(set(names)) == len(names)
    for defect in DEFECTS:
        for edit in defect.edits:
            *_, source = edit.made()
            compile(source, defect.name, "exec")


@pytest.mark.always(
    "gathers_overtake_the_step*",
    "a_unit_that_is_unused_is_freed*",
    "gradients_are_allocated_on_the_wrong_stream",
    "views_become_stale*",
    "a_gather_of_several_groups*",
)
@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name.replace(" ", "_"))
def test_a_defect_is_reported(ranks: Ranks, defect: Defect) -> None:
    for findings in ranks(SCENARIOS[defect.scenario].num_ranks, findings_with, defect):
        kinds = {kind for kind, _ in findings}
        assert kinds.issuperset(defect.kinds), "\n".join(text for _, text in findings)
