# SPDX-License-Identifier: Apache-2.0
"""Published training runs, and how far the plan of each is from what was measured."""
