# SPDX-License-Identifier: Apache-2.0
"""The core that all checkpoint formats share; it imports none of them."""
