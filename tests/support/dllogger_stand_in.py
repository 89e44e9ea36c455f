"""The interface and the lines of NVIDIA's package dllogger 1.1.0, for tests where it is not
installed.
"""

import json
from collections import defaultdict


class Verbosity:
    OFF, DEFAULT, VERBOSE = -1, 0, 1


class Backend:
    def __init__(self, verbosity):
        self.verbosity = verbosity

    def flush(self):
        pass


class StdOutBackend(Backend):
    def __init__(self, verbosity, step_format=str):
        super().__init__(verbosity)
        self.step_format, self.units = step_format, defaultdict(str)

    def log(self, timestamp, elapsedtime, step, data):
        metrics = [f"{metric} : {value} {self.units[metric]}" for metric, value in data.items()]
        print(f"DLL {timestamp} - {self.step_format(step)} {' '.join(metrics)}")


class JSONStreamBackend(Backend):
    def __init__(self, verbosity, filename, append=False):
        super().__init__(verbosity)
        self.file = open(filename, "a" if append else "w")  # noqa: PTH123, SIM115

    def log(self, timestamp, elapsedtime, step, data):
        entry = {"timestamp": str(timestamp.timestamp()), "datetime": str(timestamp.astimezone())}
        entry |= {"elapsedtime": str(elapsedtime), "type": "LOG", "step": step, "data": data}
        self.file.write(f"DLLL {json.dumps(entry)}\n")

    def flush(self):
        self.file.flush()


class Logger:
    def __init__(self, backends):
        self.backends = backends


class NotInitialized:
    def __getattribute__(self, name):
        raise RuntimeError("not initialized")


GLOBAL_LOGGER = NotInitialized()


def init(backends):
    global GLOBAL_LOGGER
    GLOBAL_LOGGER = Logger(backends)


def log(step, data, verbosity=Verbosity.DEFAULT):
    for backend in GLOBAL_LOGGER.backends:
        backend.log(None, 0.0, step, data)
