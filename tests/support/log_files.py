"""Logs as the programs write them, and what is read from them."""

import json
from pathlib import Path

from bert_recipe.reporting.records import Run, RunPhase, read_runs

SETTINGS = {
    "output_dir": "out",
    "phase1": True,
    "phase2": False,
    "log_freq": 10,
    "max_steps": 100,
    "seed": 1,
}
SQUAD_SETTINGS = {
    "output_dir": "out",
    "doc_stride": 128,
    "log_freq": 10,
    "max_steps": -1,
    "steps": 14,
    "seed": 1,
}


class Log:
    """Writes a log file as a program would, one second per record."""

    def __init__(self, path: Path, clock: float = 1e9):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.clock, self.elapsed = path, clock, 0

    def write(self, step, data: dict) -> "Log":
        times = {"timestamp": str(self.clock), "datetime": "", "elapsedtime": str(self.elapsed)}
        with self.path.open("a") as file:
            file.write(f"DLLL {json.dumps({**times, 'type': 'LOG', 'step': step, 'data': data})}\n")
        self.clock += 1
        self.elapsed += 1
        return self

    def restarted(self, pause: float) -> "Log":
        self.clock += pause
        self.elapsed = 0
        return self

    def start(self, settings: dict, pause: float = 0) -> "Log":
        return self.restarted(pause).write("PARAMETER", settings)

    def train(self, steps, loss: float = 1.0, **metrics) -> "Log":
        for step in steps:
            self.write([step], {"loss": loss, **metrics})
        return self

    def raw(self, line: str) -> "Log":
        with self.path.open("a") as file:
            file.write(line)
        return self


def only_run(path: Path) -> Run:
    (run,) = read_runs([path])
    return run


def only_phase(path: Path) -> RunPhase:
    (phase,) = only_run(path).phases
    return phase


def losses(phase: RunPhase) -> list[tuple[int, float]]:
    return [(point.step, point.metrics["loss"]) for point in phase.points]


def three_phases(
    folder: Path, output_dir: str = "out", learning_rate: float = 0.01, f1: float = 81.25
) -> Path:
    settings = {**SETTINGS, "output_dir": output_dir, "learning_rate": learning_rate}
    phase1 = Log(folder / "dllogger_p1.json").start(settings)
    phase1.train(range(10, 101, 10), 7.0, tokens_per_second=1000.0, learning_rate=0.01)
    phase1.write([100], {"eval_loss": 6.5}).write(
        [], {"step": 100, "checkpoint": f"{output_dir}/phase1/100"}
    )
    phase2 = Log(folder / "dllogger_p2.json", 1.1e9)
    phase2.start(
        {**settings, "phase1": False, "phase2": True, "init": f"{output_dir}/phase1"}
    ).train([10, 20], 6.0)
    squad = Log(folder / "dllogger_1_fp32.json", 1.2e9)
    squad.start({**SQUAD_SETTINGS, "output_dir": output_dir}).train([10, 14], 4.0)
    squad.write([], {"exact_match": 72.5, "f1": f1})
    return folder
