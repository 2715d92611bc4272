# SPDX-License-Identifier: Apache-2.0
"""Turn text into the indexed datasets that pretrain_gpt.py reads.

For example:

    python tools/preprocess_data.py --input books/ --input news.jsonl --output-prefix data/mine
    torchrun pretrain_gpt.py --data-path data/mine_text_document ...
"""

import warnings

import click

with warnings.catch_warnings():
    # Megatron-Core warns of every GPU library that is absent; writing data needs none of them.
    warnings.simplefilter("ignore", UserWarning)
    from megatron.pretrain.corpus import standard_library_files, write_corpus
    from megatron.pretrain.tokenizer import build_tokenizer


@click.command()
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
    type=click.Choice(["ByteTokenizer", "HuggingFaceTokenizer", "NullTokenizer"]),
)
@click.option("--tokenizer-model", metavar="DIR", help="Local folder of a Hugging Face tokenizer.")
@click.option("--vocab-size", type=int, help="Number of ids of a NullTokenizer.")
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
    tokenizer_type: str,
    tokenizer_model: str | None,
    vocab_size: int | None,
    json_keys: tuple[str, ...],
    append_eod: bool,
) -> None:
    """Turn text into an indexed dataset for pretrain_gpt.py.

    Files named .jsonl, .ndjson or .json hold one JSON object per line, each a document; any other
    file is one document.
    """
    if bool(inputs) == standard_library:
        raise click.UsageError("give either --input or --standard-library")
    try:
        tokenizer = build_tokenizer(tokenizer_type, tokenizer_model, vocab_size)
        files = standard_library_files() if standard_library else inputs
        for key in json_keys:
            prefix = f"{output_prefix}_{key}_document"
            summary = write_corpus(files, prefix, tokenizer, json_key=key, append_eod=append_eod)
            click.echo(
                f"{prefix}: {summary.documents} documents, {summary.tokens} tokens from"
                f" {summary.bytes} bytes"
            )
    except (ValueError, OSError, ImportError) as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    preprocess_data()
