# SPDX-License-Identifier: Apache-2.0
"""Turn text into the indexed datasets that pretrain_gpt.py reads.

For example:

    python tools/preprocess_data.py --input books/ --input news.jsonl --output-prefix data/mine
    torchrun pretrain_gpt.py --data-path data/mine_text_document ...
"""

import warnings
from typing import Any

import click

from megatron.checkpoint.commands.command import Program
from megatron.checkpoint.store import durable

with warnings.catch_warnings():
    # Megatron-Core warns of every GPU library that is absent; writing data needs none of them.
    warnings.simplefilter("ignore", UserWarning)
    from megatron.pretrain.data.corpus import standard_library_files, write_corpus
    from megatron.pretrain.data.tokenizer_choice import TOKENIZER_TYPES, TokenizerChoice
    from megatron.pretrain.data.tokenizer_record import record_text
    from megatron.pretrain.data.tokenizers import build_tokenizer


@click.command(cls=Program)
@click.option(
    "--input",
    "inputs",
    multiple=True,
    metavar="FILE_OR_DIR",
    help="Text, JSON lines, or a folder of them; repeatable.",
)
@click.option(
    "--standard-library",
    is_flag=True,
    help="Take the Python standard library, about 10 MB, as input.",
)
@click.option(
    "--output-prefix",
    required=True,
    help="Writes PREFIX_KEY_document.bin and .idx.",
    metavar="PREFIX",
)
@click.option(
    "--tokenizer-type",
    default="ByteTokenizer",
    show_default=True,
    type=click.Choice(TOKENIZER_TYPES),
)
@click.option(
    "--tokenizer-model",
    metavar="PATH",
    help="Folder of a HuggingFaceTokenizer, file of a SentencePiece type or a TikTokenizer.",
)
@click.option("--vocab-size", type=int, help="Number of ids of a NullTokenizer or TikTokenizer.")
@click.option("--vocab-file", metavar="FILE", help="vocab.json of a GPT2BPETokenizer.")
@click.option("--merge-file", metavar="FILE", help="merges.txt of a GPT2BPETokenizer.")
@click.option("--tiktoken-pattern", type=click.Choice(["v1", "v2"]), help="How text is cut.")
@click.option(
    "--tiktoken-num-special-tokens",
    type=int,
    default=1000,
    show_default=True,
    help="Special ids of a TikTokenizer.",
)
@click.option(
    "--tokenizer-special-tokens",
    "--tiktoken-special-tokens",
    multiple=True,
    metavar="TOKEN",
    help="Special token of a TikTokenizer or SentencePiece type; repeatable.",
)
@click.option(
    "--tokenizer-sentencepiece-legacy",
    is_flag=True,
    help="Let special tokens be added to a model file of sentencepiece.",
)
@click.option(
    "--tokenizer-hf-include-special-tokens",
    is_flag=True,
    help="Put the special tokens of a HuggingFaceTokenizer around each document.",
)
@click.option(
    "--trust-remote-code", is_flag=True, help="Run code in the folder of a HuggingFaceTokenizer."
)
@click.option(
    "--json-keys",
    multiple=True,
    default=["text"],
    show_default=True,
    metavar="KEY",
    help="Member of a JSON line with the text; repeatable, one dataset each.",
)
@click.option(
    "--append-eod/--no-append-eod",
    default=True,
    show_default=True,
    help="End every document with the end-of-document token.",
)
def preprocess_data(
    inputs: tuple[str, ...],
    standard_library: bool,
    output_prefix: str,
    json_keys: tuple[str, ...],
    append_eod: bool,
    **settings: Any,
) -> None:
    """Turn text into an indexed dataset for pretrain_gpt.py.

    Files named .jsonl, .ndjson or .json hold one JSON object per line, each a document; any other
    file is one document. PREFIX_KEY_document.tokenizer.json records the tokenizer, which
    pretrain_gpt.py then uses.
    """
    if bool(inputs) == standard_library:
        raise click.UsageError("give either --input or --standard-library")
    try:
        settings["tokenizer_special_tokens"] = list(settings["tokenizer_special_tokens"]) or None
        choice = TokenizerChoice(**settings)
        tokenizer = build_tokenizer(choice)
        files = standard_library_files() if standard_library else inputs
        for key in json_keys:
            prefix = f"{output_prefix}_{key}_document"
            summary = write_corpus(
                files,
                prefix,
                tokenizer,
                json_key=key,
                append_eod=append_eod,
                record=record_text(prefix, choice, tokenizer),
            )
            with durable.standard_output():
                click.echo(
                    f"{prefix}: {summary.documents} documents, {summary.tokens} tokens from"
                    f" {summary.bytes} bytes"
                )
    except (ValueError, OSError, ImportError) as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    preprocess_data()
