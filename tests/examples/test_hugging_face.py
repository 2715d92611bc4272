# SPDX-License-Identifier: Apache-2.0
"""docs/hugging_face.md and its examples: commands run, figures fall, whole models load."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.warm_programs import ROOT

transformers = pytest.importorskip("transformers", reason="needs the package transformers")
pytest.importorskip("accelerate", reason="needs the package accelerate")

DOCUMENT = (ROOT / "docs" / "hugging_face.md").read_text()


def run_example(name: str, folder: Path, *more: str) -> str:
    """Run an example on two ranks; return what it prints."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [sys.executable, *launcher, str(ROOT / "examples" / name), "--output-dir"]
    run = subprocess.run(
        [*command, str(folder), *more],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr[-6000:]
    return run.stdout


def numbers(pattern: str, output: str) -> list[float]:
    return list(map(float, re.findall(pattern, output)))


def test_every_example_of_the_document_exists_and_is_short() -> None:
    names = set(re.findall(r"examples/(hugging_face\w*\.py)", DOCUMENT))
    assert names == {path.name for path in (ROOT / "examples").glob("hugging_face*.py")}
    for name in names:
        lines = (ROOT / "examples" / name).read_text().splitlines()
        assert len(lines) <= 120 and f"examples/{name} --output-dir" in DOCUMENT


def test_what_the_document_says_is_refused_has_a_test() -> None:
    from megatron.huggingface import refusals

    for name in (*refusals.OPTIMIZERS, "fp16", "parallelism_config", "even_batches=False"):
        assert f"`{name}`" in DOCUMENT, name


@pytest.mark.exhaustive
def test_the_loop_learns_and_saves_a_model(tmp_path: Path) -> None:
    output = run_example("hugging_face_loop.py", tmp_path)
    losses = numbers(r"loss (\d+\.\d+)", output)
    assert len(losses) == 7 and losses[-1] < losses[0] / 2, output
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")


@pytest.mark.exhaustive
def test_the_trainer_learns_generates_and_goes_on(tmp_path: Path) -> None:
    output = run_example("hugging_face_trainer.py", tmp_path)
    losses = numbers(r"'eval_loss': '?(\d+\.\d+)", output)
    assert len(losses) == 3 and losses[-1] < losses[0] / 2, output
    assert re.search(r"rank 0: \[2, 5, 8, 11\] goes on \[14, 17, ", output), output
    assert re.search(r"rank 1: \[3, 4, 5, 6\] goes on \[7, 8, ", output), output
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    load_as_documented(tmp_path)
    more = run_example("hugging_face_trainer.py", tmp_path, "--max-steps", "80")
    again = numbers(r"'eval_loss': '?(\d+\.\d+)", more)
    assert len(again) == 1 and again[0] < losses[0] / 2, more


def load_as_documented(folder: Path) -> None:
    """Run the document's code for the weights of a checkpoint; compare with the saved model."""
    expected = transformers.AutoModelForCausalLM.from_pretrained(folder)
    snippets = re.findall(r"^```python\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)
    code = next(each for each in snippets if "load_weights_of_shards" in each)
    for name in ("out/", "final"):
        code = code.replace(f'"{name}', f'"{folder}/{name.removeprefix("out/")}')
    names = {
        "AutoModelForCausalLM": transformers.AutoModelForCausalLM,
        "config": expected.config,
    }
    exec(code, names)
    for name, value in names["model"].state_dict().items():
        torch.testing.assert_close(value, expected.state_dict()[name], rtol=0, atol=0)
    assert (folder / "final" / "model.safetensors").exists()


@pytest.mark.exhaustive
def test_lora_learns_and_its_adapters_load(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="needs the package peft")
    output = run_example("hugging_face_lora.py", tmp_path)
    losses = numbers(r"'loss': '?(\d+\.\d+)", output)
    found = re.search(r"evaluation (\S+), with the adapters loaded by PEFT (\S+)", output)
    assert found is not None and losses[-1] < losses[0] / 2, output
    assert float(found[1]) == pytest.approx(float(found[2]), abs=2e-4)
