"""torchrun without its traceback: exits with the code of the process that failed first, which has
printed its error.
"""

import logging
import signal
import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
try:
    main()
except ChildFailedError as error:
    rank, failure = error.get_first_failure()
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        print(f"error: process {rank} of this machine was killed by {name}", file=sys.stderr)
    sys.exit(failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode)
