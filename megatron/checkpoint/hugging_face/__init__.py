# SPDX-License-Identifier: Apache-2.0
"""Hugging Face models."""
