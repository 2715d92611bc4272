# SPDX-License-Identifier: Apache-2.0
"""Start the ranks of a program as torchrun does, with its flags; a failure is one line.

For example:

    python tools/launch.py --nproc_per_node 2 --log-dir logs --tee 3 pretrain_gpt.py ...

torchrun adds forty lines of its own to the message of a rank that has failed. Here one line says
which rank it was and how it ended. The exit codes are those of torchrun; after a signal it is 128
and the number of the signal.
"""

import logging
import signal
import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run


def main(words: Sequence[str]) -> int:
    """Run the ranks to their end and return the exit code.

    Args:
        words: the command line of torchrun.
    """
    logging.disable(logging.ERROR)  # torchrun tells of a failure there too
    try:
        run(parse_args(list(words)))
    except ChildFailedError as error:
        print(one_line(error), file=sys.stderr, flush=True)
        return 1
    except SignalException as error:
        return 128 + error.sigval
    return 0


def one_line(error: ChildFailedError) -> str:
    """Return which rank has failed first, and how."""
    rank, failure = error.get_first_failure()
    code = failure.exitcode
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    others = len(error.failures) - 1
    more = f", and {others} more" if others else ""
    return f"{error.name}: rank {rank} (process {failure.pid}) ended {how}{more}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
