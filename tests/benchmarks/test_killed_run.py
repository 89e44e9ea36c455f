"""The drawing of a run that was killed beside one that was not."""

from xml.etree import ElementTree

from benchmarks.killed_run import KILLED_AFTER, UPDATES, draw

SVG = "{http://www.w3.org/2000/svg}"


def test_each_process_is_a_curve_over_that_of_the_run_that_was_not_killed():
    uninterrupted = [(update, 10 - update / UPDATES) for update in range(1, UPDATES + 1)]
    first, second = KILLED_AFTER
    processes = [uninterrupted[:first], uninterrupted[20:second], uninterrupted[60:]]
    svg = draw(uninterrupted, processes, "caption")
    drawing = ElementTree.fromstring(svg)  # noqa: S314
    curves = [line.attrib["points"].split() for line in drawing.iter(f"{SVG}polyline")]
    assert curves[1:] == [curves[0][:first], curves[0][20:second], curves[0][60:]]
    words = [text.text for text in drawing.iter(f"{SVG}text")]
    assert [f"killed after {update}" for update in KILLED_AFTER] == [
        word for word in words if word.startswith("killed")
    ]
