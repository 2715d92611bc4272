# SPDX-License-Identifier: Apache-2.0
"""Parts of a training run, whatever its loop: ranks, progress, messages."""
