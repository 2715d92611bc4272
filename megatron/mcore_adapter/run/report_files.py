# SPDX-License-Identifier: Apache-2.0
"""Names of the files that a run writes into its directory of checkpoints."""

HISTORY = "losses.jsonl"
PICTURE = "loss_curves.png"
PROGRESS = "progress.txt"
