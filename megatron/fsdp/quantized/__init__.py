# SPDX-License-Identifier: Apache-2.0
"""Stored forms of weights other than plain tensors: those that tensor subclasses define."""
