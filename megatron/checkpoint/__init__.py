# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of all formats, read, written and converted without a GPU, a model or Megatron-Core.

Every format is read into a :class:`~megatron.checkpoint.core.training_state.TrainingState` and
written from one, with tensors that are read when they are written. The rooms are

- ``core``: what formats share. Read first ``spelling`` and ``key_rules`` (names of parameters),
  ``lazy_tensor`` and ``training_state``, then ``stored_checkpoint`` (reading) and ``dcp_target``
  (writing);
- ``torch_dist``, ``fsdp_dtensor``, ``hugging_face``: one format each, read and written by
  ``checkpoint`` in the first, by ``reader`` and ``writer`` in the others;
- ``commands``: conversions, comparisons and checks, and their command line.

The core imports no format, formats do not import each other, and commands import all of them.
"""
