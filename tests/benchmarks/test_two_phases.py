"""The drawing of both phases of a run."""

from xml.etree import ElementTree

import pytest

from benchmarks.two_phases import draw
from bert_recipe.reporting.records import Point, RunPhase
from bert_recipe.utils.errors import UserError

SVG = "{http://www.w3.org/2000/svg}"


def phase(name: str, length: int, losses: dict[int, float]) -> RunPhase:
    points = [Point(step, 0.0, {"loss": loss}) for step, loss in losses.items()]
    return RunPhase(name, None, [], {"max_seq_length": length}, points, points[-1:])


def test_the_updates_of_phase_2_follow_those_of_phase_1():
    first = phase("phase1", 128, {1: 10.0, 300: 8.0})
    second = phase("phase2", 512, {0: 8.0, 150: 7.0})
    drawing = ElementTree.fromstring(draw([first, second]))  # noqa: S314
    curves = [line.attrib["points"].split() for line in drawing.iter(f"{SVG}polyline")]
    assert curves[0][-1] == curves[1][0]
    held_out = [(dot.attrib["cx"], dot.attrib["cy"]) for dot in drawing.iter(f"{SVG}circle")]
    assert [",".join(place) for place in held_out] == [curves[0][-1], curves[1][-1]]
    words = [text.text for text in drawing.iter(f"{SVG}text")]
    assert words[0] == "Loss of both phases: 128, then 512 tokens per sequence"
    assert words[words.index("update") - 1] == "450"


def test_a_folder_without_phase_2_is_an_error():
    with pytest.raises(UserError, match="phase 2"):
        draw([phase("phase1", 128, {1: 10.0, 300: 8.0})])
