# SPDX-License-Identifier: Apache-2.0
"""docs/hugging_face.md and its examples: commands run, figures fall, whole models load."""

import re

import pytest

from tests.examples.conftest import Shell, repository_in
from tests.support.examples.documents import DocumentRun, check_block, command_blocks, run_document
from tests.support.warm_programs import ROOT

transformers = pytest.importorskip("transformers", reason="needs the package transformers")
pytest.importorskip("accelerate", reason="needs the package accelerate")

PAGE = ROOT / "docs" / "hugging_face.md"
DOCUMENT = PAGE.read_text()
BLOCKS = [block for block in command_blocks(PAGE) if "torchrun" in block.commands]


@pytest.fixture(scope="module")
def run(commands: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> DocumentRun:
    """Run the commands of the page, in its order: Trainer, loop, LoRA."""
    pytest.importorskip("peft", reason="needs the package peft")
    shell = Shell(repository_in(tmp_path_factory.mktemp("hugging_face")), commands)
    done = run_document(BLOCKS, shell, timeout=300)
    for block, output, code in zip(BLOCKS, done.outputs, done.codes):
        check_block(block, output, code)
    return done


def numbers(pattern: str, output: str) -> list[float]:
    return list(map(float, re.findall(pattern, output)))


def test_every_example_is_in_the_document() -> None:
    names = set(re.findall(r"examples/(hugging_face\w*\.py) --output-dir", DOCUMENT))
    assert names == {path.name for path in (ROOT / "examples").glob("hugging_face*.py")}
    assert len(BLOCKS) == len(names)


def test_what_the_document_says_is_refused_has_a_test() -> None:
    from megatron.huggingface import refusals

    for name in (*refusals.OPTIMIZERS, "fp16", "parallelism_config", "even_batches=False"):
        assert f"`{name}`" in DOCUMENT, name


@pytest.mark.exhaustive
def test_the_trainer_learns_generates_and_goes_on(
    run: DocumentRun, commands: dict[str, str]
) -> None:
    output = run.outputs[0]
    losses = numbers(r"'eval_loss': '?(\d+\.\d+)", output)
    assert len(losses) == 3 and losses[-1] < losses[0] / 2, output
    assert re.search(r"rank 0: \[2, 5, 8, 11\] goes on \[14, 17, ", output), output
    assert re.search(r"rank 1: \[3, 4, 5, 6\] goes on \[7, 8, ", output), output
    transformers.AutoModelForCausalLM.from_pretrained(run.directory / "out")
    again = Shell(run.directory, commands).run(
        "bash", "-c", f"{BLOCKS[0].commands.strip()} --max-steps 80"
    )
    more = numbers(r"'eval_loss': '?(\d+\.\d+)", again.stdout)
    assert len(more) == 1 and more[0] < losses[0] / 2, again.stdout


@pytest.mark.exhaustive
def test_the_loop_learns_and_saves_a_model(run: DocumentRun) -> None:
    losses = numbers(r"loss (\d+\.\d+)", run.outputs[1])
    assert len(losses) == 7 and losses[-1] < losses[0] / 2, run.outputs[1]
    transformers.AutoModelForCausalLM.from_pretrained(run.directory / "loop" / "model")


@pytest.mark.exhaustive
def test_lora_learns_and_its_adapters_load(run: DocumentRun) -> None:
    output = run.outputs[2]
    losses = numbers(r"'loss': '?(\d+\.\d+)", output)
    found = re.search(r"evaluation (\S+), with the adapters loaded by PEFT (\S+)", output)
    assert found is not None and losses[-1] < losses[0] / 2, output
    assert float(found[1]) == pytest.approx(float(found[2]), abs=2e-4)
