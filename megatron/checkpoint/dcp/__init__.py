# SPDX-License-Identifier: Apache-2.0
"""Directories of torch.distributed.checkpoint (DCP), read safely and written with less work."""
