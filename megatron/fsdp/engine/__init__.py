# SPDX-License-Identifier: Apache-2.0
"""The algorithm of fully sharded data parallelism: layout, communication, schedule."""
