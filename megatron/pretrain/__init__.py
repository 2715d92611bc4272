# SPDX-License-Identifier: Apache-2.0
"""What pretrain_gpt.py is made of: arguments, data, model, training loop, checkpointing, logging."""
