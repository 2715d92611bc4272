# SPDX-License-Identifier: Apache-2.0
"""The format `fsdp_dtensor`: runs with FSDP."""
