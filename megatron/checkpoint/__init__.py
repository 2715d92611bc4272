# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of all formats, read, written and converted without a GPU, a model or Megatron-Core.

Every format is read into a :class:`~megatron.checkpoint.core.training_state.TrainingState` and
written from one, with tensors that are read when they are written. The rooms are

- ``core``: names, shapes and states that formats share. Read first ``spelling`` and ``key_rules``
  (names of parameters), then ``lazy_tensor`` and ``training_state``;
- ``store``, ``integrity``, ``dcp``: where checkpoints lie, what vouches for their files, and DCP
  directories, read by ``stored_checkpoint`` and written by ``dcp_target``;
- ``torch_dist``, ``fsdp_dtensor``, ``hugging_face``: one format each;
- ``commands``: conversions, comparisons and checks, and their command line.

Each room imports those above it, but formats do not import each other.
"""
