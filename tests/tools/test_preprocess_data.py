# SPDX-License-Identifier: Apache-2.0
"""The command line of tools/preprocess_data.py."""

import importlib.util
import subprocess
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from megatron.pretrain.data.corpus import standard_library_files
from megatron.pretrain.data.tokenizer_choice import PACKAGES, TokenizerChoice
from megatron.pretrain.data.tokenizers import build_tokenizer
from tests.pretrain.data.test_corpus import documents_of
from tests.pretrain.data.test_tokenizers import settings_of
from tests.support.pretrain.vocabularies import TEXT

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "tools" / "preprocess_data.py"


@pytest.fixture(scope="module")
def command() -> click.Command:
    spec = importlib.util.spec_from_file_location("preprocess_data", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.preprocess_data


def run(command: click.Command, *words: object) -> Result:
    """Run the program, which must not fail."""
    result = CliRunner().invoke(command, list(map(str, words)))
    assert result.exit_code == 0, result.output
    return result


def test_one_dataset_per_key_and_a_summary(command: click.Command, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(
        '{"text": "hello", "title": "hi"}\n{"text": "world!", "title": "x"}\n'
    )
    output = tmp_path / "out"
    words = ["--input", tmp_path / "in.jsonl", "--output-prefix", output]
    result = run(command, *words, "--json-keys", "text", "--json-keys", "title")
    assert result.output.splitlines() == [
        f"{output}_text_document: 2 documents, 13 tokens from 66 bytes",
        f"{output}_title_document: 2 documents, 5 tokens from 66 bytes",
    ]
    assert documents_of(f"{output}_text_document") == [[*b"hello", 256], [*b"world!", 256]]


def test_several_inputs_without_end_of_document(command: click.Command, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("1 2")
    (tmp_path / "b.txt").write_text("3")
    words = ["--tokenizer-type", "NullTokenizer", "--vocab-size", 9, "--no-append-eod"]
    words += ["--input", tmp_path / "a.txt", "--input", tmp_path / "b.txt"]
    run(command, *words, "--output-prefix", tmp_path / "out")
    assert documents_of(f"{tmp_path / 'out'}_text_document") == [[1, 2], [3]]


@pytest.mark.exhaustive
def test_the_standard_library_as_input(command: click.Command, tmp_path: Path) -> None:
    run(command, "--standard-library", "--output-prefix", tmp_path / "std")
    num_files = sum(1 for file in standard_library_files() if file.stat().st_size)
    assert len(documents_of(f"{tmp_path / 'std'}_text_document")) == num_files


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", "missing.txt"], "Error: no such file or folder: missing.txt"),
        ([], "Error: give either --input or --standard-library"),
        (
            ["--input", "x", "--standard-library"],
            "Error: give either --input or --standard-library",
        ),
        (
            ["--input", "x", "--tokenizer-type", "NullTokenizer"],
            "Error: NullTokenizer needs --vocab-size, the number of ids before the end-of-document"
            " token",
        ),
    ],
    ids=["missing_input", "no_input", "two_inputs", "bad_tokenizer"],
)
def test_bad_arguments_give_one_message(
    command: click.Command, tmp_path: Path, arguments: list[str], message: str
) -> None:
    result = CliRunner().invoke(command, [*arguments, "--output-prefix", str(tmp_path / "out")])
    assert result.exit_code != 0
    assert result.output.splitlines()[-1] == message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.exhaustive
def test_it_runs_as_a_script_from_a_checkout(tmp_path: Path, commands: dict[str, str]) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "fine"}\nbroken\n')
    command_line = ["bash", "-c", f"python {SCRIPT} --input in.jsonl --output-prefix out"]
    result = subprocess.run(
        command_line, cwd=tmp_path, env=commands, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("Error: in.jsonl, line 2: not a JSON value")
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize("kind", PACKAGES)
def test_every_type_of_tokenizer_writes_its_ids(
    kind: str, command: click.Command, tmp_path: Path
) -> None:
    settings = settings_of(kind, tmp_path)
    (tmp_path / "in.txt").write_text(TEXT)
    words = ["--input", tmp_path / "in.txt", "--output-prefix", tmp_path / "out"]
    words += ["--tokenizer-type", kind]
    for name, value in settings.items():
        words += [f"--{name.replace('_', '-')}", value]
    run(command, *words)
    tokenizer = build_tokenizer(TokenizerChoice(kind, **settings))
    expected = [*tokenizer.tokenize(TEXT).tolist(), tokenizer.eod]
    assert documents_of(f"{tmp_path / 'out'}_text_document") == [expected]
