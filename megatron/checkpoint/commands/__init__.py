# SPDX-License-Identifier: Apache-2.0
"""Commands of the checkpoint tools.

``command_line`` lists them, in files named ``*_commands``. What they do is in ``formats``,
``conversion``, ``editing``, ``comparison`` and ``verification``.
"""
