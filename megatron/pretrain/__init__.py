# SPDX-License-Identifier: Apache-2.0
"""The parts of pretrain_gpt.py: arguments, data, model, training loop, checkpointing, report."""
