"""Metrics, numbers and durations as text for the terminal."""

import datetime
import math
from collections.abc import Mapping

# Terminal format of each metric; {n} is the value formatted by `format_number`.
FORMATS = {
    "loss": "loss {:.4f}",
    "mlm_loss": "mlm {:.4f}",
    "mlm_accuracy": "({:.1%})",
    "nsp_loss": "nsp {:.4f}",
    "nsp_accuracy": "({:.1%})",
    "mask_rate": "masked {:.1%}",
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

STEP_METRICS = (
    "loss",
    "mlm_loss",
    "mlm_accuracy",
    "accuracy",
    "learning_rate",
    "loss_scale",
    "tokens_per_second",
    "utilization",
)


def format_metrics(metrics: Mapping[str, float]) -> str:
    """`metrics` on one line. A score that is NaN is not defined."""
    shown = []
    for name, value in metrics.items():
        form = FORMATS.get(name, name + " {n}")
        if name not in FORMATS and math.isnan(value):
            form = f"{name} not defined"
        shown.append(form.format(value, n=format_number(value)))
    return "  ".join(shown).replace("  (", " (")


def step_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Those that fit on a line of a terminal; the report file has all of them. The wait for data is
    among them if it is a tenth of the time or more.
    """
    shown = {name: metrics[name] for name in STEP_METRICS if name in metrics}
    if metrics.get("data_wait", 0) >= 0.1:
        shown["data_wait"] = metrics["data_wait"]
    return shown


def format_number(value: float) -> str:
    """No decimals from 100 on, three significant digits below."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def format_duration(seconds: float) -> str:
    """Hours, minutes and seconds: 1:02:03."""
    return str(datetime.timedelta(seconds=round(seconds)))
