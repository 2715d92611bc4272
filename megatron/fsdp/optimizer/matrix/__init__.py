# SPDX-License-Identifier: Apache-2.0
"""Owners of matrices: ranks that update whole matrices for all others."""
