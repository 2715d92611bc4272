# SPDX-License-Identifier: Apache-2.0
"""The format `torch_dist`: runs without FSDP."""
