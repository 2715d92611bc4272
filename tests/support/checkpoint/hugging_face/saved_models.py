# SPDX-License-Identifier: Apache-2.0
"""Hugging Face models written by our exporter, and changes of their configs."""

import json
from pathlib import Path
from typing import Any

from megatron.checkpoint.core.training_state import TrainingState
from megatron.checkpoint.hugging_face.model_writer import HuggingFaceTarget
from tests.support.checkpoint.hugging_face_models import write


def saved(state: TrainingState, directory: Path, **options: Any) -> Path:
    write(HuggingFaceTarget(state, **options), directory)
    return directory


def edited_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
