# SPDX-License-Identifier: Apache-2.0
"""Commands of the checkpoint tools.

``command_line`` lists them; they are in files named ``*_commands``. Their work is done in
``formats``, ``conversion``, ``editing``, ``comparison`` and ``verification``.
"""
