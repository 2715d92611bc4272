# SPDX-License-Identifier: Apache-2.0
"""Pictures of losses."""

import sys
from pathlib import Path

import pytest

from megatron.pretrain.report.loss_curve import draw_loss_curves


def test_loss_curves_become_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    target = tmp_path / "made" / "loss.png"
    train = [(i, 5.0 / i + 1) for i in range(1, 200)]
    assert draw_loss_curves(target, train, [(50, 1.3), (100, float("nan")), (150, 1.2)])
    assert target.read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in target.parent.iterdir()] == ["loss.png"]
    assert draw_loss_curves(tmp_path / "one.png", [(1, 2.0)], [])


def test_no_picture_without_points_or_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not draw_loss_curves(tmp_path / "loss.png", [], [])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not draw_loss_curves(tmp_path / "loss.png", [(1, 2.0)], [])
    assert list(tmp_path.iterdir()) == []
