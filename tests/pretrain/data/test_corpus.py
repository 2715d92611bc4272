# SPDX-License-Identifier: Apache-2.0
"""Corpora of text, written and read."""

import json
from pathlib import Path
from typing import Any

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron.pretrain.data import corpus as corpus_module
from megatron.pretrain.data.corpus import (
    CorpusSummary,
    standard_library_corpus,
    standard_library_files,
    write_corpus,
)
from megatron.pretrain.data.tokenizers import ByteTokenizer, NullTokenizer
from tests.support.checkpoint.strikes import Strike, fail, kill, strike_everywhere
from tests.support.pretrain.tokenizer_arguments import BYTES


def documents_of(prefix: Path | str) -> list[list[int]]:
    # Lists, because the arrays of a dataset lie in mapped files and die with the dataset object.
    dataset = IndexedDataset(str(prefix))
    assert len(dataset.document_indices) == len(dataset) + 1
    return [dataset[i].tolist() for i in range(len(dataset))]


def texts_of(prefix: Path) -> list[str]:
    return [BYTES.detokenize(document) for document in documents_of(prefix)]


def test_files_and_folders_become_documents_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "sub").mkdir(parents=True)
    (folder / "b.txt").write_bytes(b"second \xff\xfe")
    (folder / "a.txt").write_text("first é\n")
    (folder / "sub" / "c.txt").write_text("third")
    (folder / ".hidden").write_text("not this")
    (folder / "empty.txt").touch()
    (tmp_path / "z.txt").write_text("zeroth")

    prefix = tmp_path / "made" / "out"
    summary = write_corpus([tmp_path / "z.txt", folder], prefix, BYTES)

    assert texts_of(prefix) == ["zeroth", "first é\n", "second \ufffd\ufffd", "third"]
    assert summary == CorpusSummary(documents=4, tokens=29 + 4, bytes=29)
    assert [document[-1] for document in documents_of(prefix)] == [BYTES.eod] * 4
    assert Path(f"{prefix}.bin").stat().st_size == 2 * summary.tokens


def test_json_lines_become_documents(tmp_path: Path) -> None:
    lines = tmp_path / "corpus.jsonl"
    lines.write_text('{"text": "one", "title": "1"}\n\n{"text": "two\\nlines", "title": "2"}\n')
    write_corpus([lines], tmp_path / "text", BYTES, append_eod=False)
    write_corpus([lines], tmp_path / "title", BYTES, json_key="title")
    assert texts_of(tmp_path / "text") == ["one", "two\nlines"]
    assert texts_of(tmp_path / "title") == ["1", "2"]
    assert [len(document) for document in documents_of(tmp_path / "text")] == [3, 9]


def test_large_vocabularies_are_stored_in_four_bytes(tmp_path: Path) -> None:
    (tmp_path / "ids.txt").write_text("1 99999")
    write_corpus([tmp_path / "ids.txt"], tmp_path / "out", NullTokenizer(100_000))
    assert documents_of(tmp_path / "out") == [[1, 99999, 100_000]]


BAD_INPUT = {
    "bad_json": (b'{"text": "a"}\n{"text": \n', BYTES, r"in\.jsonl, line 2: not a JSON value"),
    "no_key": (
        b'{"text": "a"}\n{"body": "b"}\n',
        BYTES,
        "line 2: .* with the key 'text', but got the keys 'body'",
    ),
    "no_object": (b'["a"]\n', BYTES, "line 1: .* with the key 'text', but got a list"),
    "no_string": (b'{"text": 3}\n', BYTES, "line 1: expects a string under 'text', but got a int"),
    "bad_utf8": (b'{"text": "\xff"}\n', BYTES, "line 1: not a JSON value"),
    "surrogate": (b'{"text": "\\ud800"}\n', BYTES, "line 1: .*surrogates not allowed"),
    "bad_token": (
        b'{"text": "1"}\n{"text": "x"}\n',
        NullTokenizer(9),
        "line 2: NullTokenizer reads numbers",
    ),
    "empty": (b'{"text": ""}\n', BYTES, "there is no text in"),
}


@pytest.mark.parametrize(("content", "tokenizer", "message"), BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input_is_named_and_leaves_nothing_behind(
    tmp_path: Path, content: bytes, tokenizer: Any, message: str
) -> None:
    (tmp_path / "in.jsonl").write_bytes(content)
    output = tmp_path / "out"
    with pytest.raises(ValueError, match=message):
        write_corpus([tmp_path / "in.jsonl"], output / "corpus", tokenizer)
    assert list(output.iterdir()) == []


def test_text_that_is_not_utf8_is_refused_by_a_tokenizer_of_text(tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_bytes(b"1 \xff")
    with pytest.raises(
        ValueError, match=r"bad\.txt: 'utf-8' codec can't decode byte 0xff in position 2"
    ):
        write_corpus([tmp_path / "bad.txt"], tmp_path / "out", NullTokenizer(9))


def test_all_missing_inputs_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file or folder: nowhere, neither"):
        write_corpus(["nowhere", "neither"], tmp_path / "out", BYTES)


def test_an_interrupted_rewrite_keeps_the_old_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "old.txt").write_text("old")
    (tmp_path / "new.txt").write_text("new")
    folder = tmp_path / "out"
    write_corpus([tmp_path / "old.txt"], folder / "corpus", BYTES)

    def interrupt(self: Any, text: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ByteTokenizer, "tokenize", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_corpus([tmp_path / "new.txt"], folder / "corpus", BYTES)
    monkeypatch.undo()
    assert texts_of(folder / "corpus") == ["old"]
    assert sorted(path.name for path in folder.iterdir()) == ["corpus.bin", "corpus.idx"]

    stale = folder / "corpus" / "cache" / "GPTDataset_indices"
    stale.mkdir(parents=True)
    write_corpus([tmp_path / "new.txt"], folder / "corpus", BYTES)
    assert texts_of(folder / "corpus") == ["new"]
    assert not stale.exists()


@pytest.mark.parametrize("strike", [kill, fail])
def test_a_corpus_whose_writer_is_struck_anywhere_is_written_by_the_next(
    strike: Strike, tmp_path: Path
) -> None:
    (tmp_path / "old.txt").write_text("old")
    (tmp_path / "new.txt").write_text("new")

    def prepare(folder: Path) -> None:
        write_corpus([tmp_path / "old.txt"], folder / "corpus", BYTES, record="{}")
        (folder / "corpus" / "cache" / "GPTDataset_indices").mkdir(parents=True)

    def rewrite(folder: Path) -> str:
        try:
            write_corpus([tmp_path / "new.txt"], folder / "corpus", BYTES, record="{}")
        except OSError as error:
            return str(error)
        return ""

    assert strike_everywhere(rewrite, tmp_path, strike, prepare) > 10


@pytest.fixture
def library(tmp_path: Path) -> Path:
    root = tmp_path / "lib"
    for name in [*(f"module{i}.py" for i in range(20)), "package/inner.py"]:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"# {name}\n")
    for skipped in [
        "test/t.py",
        "package/tests/t.py",
        "site-packages/p.py",
        "data.txt",
        "__pycache__/c.py",
    ]:
        (root / skipped).parent.mkdir(parents=True, exist_ok=True)
        (root / skipped).write_text("skipped")
    return root


def test_standard_library_corpus_holds_its_modules_in_a_fixed_shuffled_order(
    tmp_path: Path, library: Path
) -> None:
    prefix = standard_library_corpus(tmp_path / "data", BYTES, library=library)
    texts = texts_of(prefix)
    expected = [f"# {file.relative_to(library)}\n" for file in standard_library_files(library)]
    assert texts == expected
    assert sorted(texts) == sorted(
        ["# package/inner.py\n", *(f"# module{i}.py\n" for i in range(20))]
    )
    assert texts != sorted(texts)
    assert Path(prefix).name.startswith("python_stdlib_bytes_")


def test_standard_library_corpus_is_written_once_and_again_when_something_changed(
    tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []
    original = corpus_module.write_corpus
    monkeypatch.setattr(
        corpus_module, "write_corpus", lambda *a, **k: written.append(a[1]) or original(*a, **k)
    )
    first = standard_library_corpus(tmp_path / "data", BYTES, library=library)
    assert standard_library_corpus(tmp_path / "data", BYTES, library=library) == first
    assert len(written) == 1
    assert json.loads(Path(first + ".json").read_text())["tokenizer"]["class"] == "ByteTokenizer"

    Path(first + ".bin").unlink()
    assert standard_library_corpus(tmp_path / "data", BYTES, library=library) == first
    assert len(written) == 2

    (library / "module0.py").write_text("# changed\n")
    second = standard_library_corpus(tmp_path / "data", BYTES, library=library)
    assert second != first
    assert "# changed\n" in texts_of(second)


@pytest.mark.exhaustive
def test_the_running_python_has_a_library_of_megabytes() -> None:
    files = standard_library_files()
    names = {file.name for file in files}
    assert {"argparse.py", "ast.py"} <= names
    assert sum(file.stat().st_size for file in files) > 4_000_000


def test_a_library_without_python_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no Python files"):
        standard_library_corpus(tmp_path, BYTES, library=tmp_path)
