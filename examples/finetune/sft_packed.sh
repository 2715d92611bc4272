#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Supervised fine-tuning on two CPU ranks, in two minutes: from a line of Python to the next one.
#
#   bash examples/finetune/sft_packed.sh [more flags of pretrain_gpt.py, for the fine-tuning]
#
# CONVERSATIONS names JSON lines of your own, whose "text" is a prompt, a line feed and an answer. sft_packed.py puts whole
# conversations into each sample, and the loss counts answers only. The result is in checkpoints/sft.
source "$(dirname "${BASH_SOURCE[0]}")/base_run.sh"

BASE="${BASE:-checkpoints/sft_base}"
CONVERSATIONS="${CONVERSATIONS:-data/lines.jsonl}"
MODEL+=(--seq-length 128)
TRAINING+=(--micro-batch-size 4 --global-batch-size 16)

pretrain_base
if [[ ! -e "$CONVERSATIONS" ]]; then
    mkdir -p "$(dirname "$CONVERSATIONS")"
    python -c 'if True:
        import argparse, ast, inspect, json, tarfile, typing
        for module in argparse, ast, inspect, tarfile, typing:
            lines = inspect.getsource(module).splitlines()
            for prompt, answer in zip(lines, lines[1:]):
                if prompt and answer:
                    print(json.dumps({"text": f"{prompt}\n{answer}"}))' >"$CONVERSATIONS"
fi
python tools/preprocess_data.py --input "$CONVERSATIONS" --output-prefix "${CONVERSATIONS%.jsonl}"

# Plain layers take any mask of attention. The program imports pretrain_gpt.py from here.
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
fine_tune examples/finetune/sft_packed.py --transformer-impl local \
    --train-data-path "${CONVERSATIONS%.jsonl}_text_document" --dataloader-type cyclic \
    --save checkpoints/sft --overwrite "$@"
