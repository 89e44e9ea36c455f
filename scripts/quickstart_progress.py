#!/usr/bin/env python3
"""Shortens the output of training for scripts/quickstart.sh: phase, step, loss and time left."""

import re
import signal
import sys

STEP = re.compile(r"(\w+)  step (\d+)/(\d+)  loss ([\d.]+) .*?([\d:]+) left$")
EVALUATION = re.compile(r"(\w+)  step (\d+)/(\d+)  evaluation: loss ([\d.]+)  mlm [\d.]+ \(([\d.]+%)\)")
TITLES = {"phase1": "phase 1", "phase2": "phase 2", "squad": "SQuAD"}


def shorten(line: str) -> str:
    if match := STEP.match(line):
        phase, step, last, loss, left = match.groups()
        return f"{place(phase, step, last)}   loss {float(loss):5.2f}   {left} left"
    if match := EVALUATION.match(line):
        phase, step, last, loss, accuracy = match.groups()
        return f"{place(phase, step, last)}   on held-out text: loss {float(loss):.2f}, {accuracy} of the words right"
    return line


def place(phase: str, step: str, last: str) -> str:
    return f"{TITLES.get(phase, phase):<8} step {step:>{len(last)}} of {last}"


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C, training still has something to say
    clear_bar = "\r\033[K" if sys.stdout.isatty() else ""
    for line in sys.stdin:
        print(clear_bar + shorten(line.rstrip("\n")), flush=True)
