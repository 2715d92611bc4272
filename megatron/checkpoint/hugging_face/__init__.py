# SPDX-License-Identifier: Apache-2.0
"""Hugging Face models, without transformers.

``families`` is the table of models: rows of ``family``, and rules of ``setting_rules``,
``expert_settings`` and ``rotary_settings``. ``model_reader`` and ``model_writer`` apply a family to
the directory of a model.
"""
