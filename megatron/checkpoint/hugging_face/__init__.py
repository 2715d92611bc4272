# SPDX-License-Identifier: Apache-2.0
"""Hugging Face models, without transformers.

``families`` is the table of models: rows of ``tensors``, and rules of ``settings``,
``expert_settings`` and ``rotary_settings``. ``reader`` and ``writer`` apply a family to the
directory of a model.
"""
