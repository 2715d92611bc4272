# SPDX-License-Identifier: Apache-2.0
"""Traces: every collective, allocation and range of a part of a run, on every rank."""

from megatron.fsdp.trace.recording import check_directory, record

__all__ = ["check_directory", "record"]
