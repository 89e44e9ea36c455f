"""Logging in DLLogger's format: `DLLL {...}` JSON lines in the report file and readable lines on the terminal. The
dllogger package is used where it is installed; otherwise the writer below makes the same lines."""

import datetime
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from utils.errors import UserError
from utils.progress import print_line

try:
    import dllogger
except ImportError:
    dllogger = None


class Reporter:
    """Writes what a run did. `step` is what DLLogger calls it: () for the whole run, (global step,) for a step, or the
    word PARAMETER. Only the main process writes. The report file is opened, to append to it, with the first record."""

    def __init__(self, report_file: str | Path | None, enabled: bool = True):
        self.enabled = enabled
        self.report_file = Path(report_file) if report_file is not None else None
        self.started = time.monotonic()
        self.file = None
        self.has_dllogger = False

    def _open(self) -> None:
        try:
            self.report_file.parent.mkdir(parents=True, exist_ok=True)
            if dllogger is not None:
                backend = dllogger.JSONStreamBackend(dllogger.Verbosity.VERBOSE, str(self.report_file), append=True)
                dllogger.init(backends=[backend])
                self.has_dllogger = True
            else:
                self.file = self.report_file.open("a", encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"cannot write the report {self.report_file} ({error.strerror}): choose another --report-file"
            ) from error

    def log(self, step: tuple | str, data: dict[str, Any], text: str | None = None) -> None:
        """Records `data` and, where there is one, shows the line `text`."""
        if not self.enabled:
            return
        if text:
            print_line(text)
        if self.report_file is None:
            return
        if not (self.file or self.has_dllogger):
            self._open()
        if self.has_dllogger:
            dllogger.log(step=step, data=data)
            dllogger.flush()
        else:
            now = datetime.datetime.now()
            entry = {
                "timestamp": str(now.timestamp()),
                "datetime": str(now),
                "elapsedtime": str(round(time.monotonic() - self.started, 6)),
                "type": "LOG",
                "step": step if isinstance(step, str) else list(step),
                "data": data,
            }
            try:
                self.file.write(f"DLLL {json.dumps(entry, default=str)}\n")
                self.file.flush()
            except OSError as error:
                raise UserError(f"cannot write the report {self.report_file} ({error.strerror}): make room") from error

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None


# How each figure is shown on the terminal; `n` is the figure as `number` has it.
SHOWN_AS = {
    "loss": "loss {:.4f}",
    "mlm_loss": "mlm {:.4f}",
    "mlm_accuracy": "({:.1%})",
    "nsp_loss": "nsp {:.4f}",
    "nsp_accuracy": "({:.1%})",
    "learning_rate": "lr {:.3g}",
    "grad_norm": "grad norm {:.3g}",
    "loss_scale": "loss scale {:g}",
    "step_seconds": "{n} s/step",
    "sequences_per_second": "{n} seq/s",
    "tokens_per_second": "{n} tokens/s",
    "model_tflops": "{:.3g} TFLOPS",
    "utilization": "({:.1%} of peak)",
    "data_wait": "data wait {:.0%}",
    "forward_ms": "forward {n} ms",
    "backward_ms": "backward {n} ms",
    "optimizer_ms": "optimizer {n} ms",
    "peak_memory_gib": "{:.1f} GiB",
}


def metrics_text(metrics: Mapping[str, float]) -> str:
    """`metrics` as people read them, on one line."""
    shown = [SHOWN_AS.get(name, name + " {n}").format(value, n=number(value)) for name, value in metrics.items()]
    return "  ".join(shown).replace("  (", " (")


def number(value: float) -> str:
    """Whole numbers from a hundred up, three digits below."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, as 1:02:03."""
    return str(datetime.timedelta(seconds=round(seconds)))
