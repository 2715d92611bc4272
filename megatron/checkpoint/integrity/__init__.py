# SPDX-License-Identifier: Apache-2.0
"""The integrity of checkpoints: digests of files, manifests, and their comparison."""
