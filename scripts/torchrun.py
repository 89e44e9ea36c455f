"""torchrun without its traceback: exits with the code of the process that failed first, which has
printed its error, or with 128 plus the number of the signal that ended this process.
"""

import logging
import signal
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

for name in ("multiprocessing.api", "agent.server.api"):
    logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
try:
    main()
except ChildFailedError as error:
    rank, failure = error.get_first_failure()
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        print(f"error: process {rank} of this machine was killed by {name}", file=sys.stderr)
    sys.exit(failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode)
except SignalException as stop:  # torch has passed it to the processes, and they have ended
    print(f"{stop.sigval.name}: all processes of this machine have ended", file=sys.stderr)
    sys.exit(128 + stop.sigval)
