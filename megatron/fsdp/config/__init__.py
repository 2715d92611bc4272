# SPDX-License-Identifier: Apache-2.0
"""The settings of a sharded model, and the errors and warnings of those who set them."""
