# SPDX-License-Identifier: Apache-2.0
"""Parity with Megatron-Core's DDP: tables that programs measure, of which tests run a part."""
