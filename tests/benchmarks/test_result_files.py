"""Every row of a table of results names its file and has its figures; every link of a page leads
somewhere.
"""

import argparse
import re
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT, read_json
from program_flags import first_parser, load
from scipy import stats

from benchmarks import speed_picture, speed_rows
from benchmarks.fine_tuning_defaults import shown_difference
from benchmarks.speed_picture import TITLES, read_rows
from bert_recipe.reporting.paired_scores import holm

PERFORMANCE = "docs/performance.md"
HEADING = re.compile(r"^## ", re.MULTILINE)
# Of performance.md all tables are results, of other pages those of a section.
TABLES = [
    (PERFORMANCE, ""),
    ("README.md", "Results"),
    ("docs/continue_pretraining.md", "What was measured?"),
    ("docs/after_training.md", "What do 8 bits cost?"),
    ("docs/defaults.md", ""),
]
CONTESTANTS = {
    "here": "default",
    "trainer": "trainer",
    "tf-idf": "tf-idf",
    "untrained": "untrained",
    "frozen": "frozen",
}


def text_of(page: str, section: str = "") -> str:
    """The text of a page, or of it below the heading that begins with `section`."""
    text = (ROOT / page).read_text(encoding="utf-8")
    if not section:
        return text
    (part,) = (part for part in HEADING.split(text) if part.startswith(section))
    return part


def words_of(page: str, section: str = "") -> str:
    """The same, as one line."""
    return " ".join(text_of(page, section).split())


def result_rows(page: str, section: str) -> list[str]:
    lines = [line for line in text_of(page, section).split("\n") if line.startswith("|")]
    separators = {number for number, line in enumerate(lines) if set(line) <= set("|- ")}
    headers = {number - 1 for number in separators}
    return [line for number, line in enumerate(lines) if number not in separators | headers]


@pytest.mark.parametrize(("page", "section"), TABLES)
def test_every_row_of_results_has_a_file(page, section):
    rows = result_rows(page, section)
    assert rows
    for row in rows:
        links = re.findall(r"\]\(([^)]*benchmarks/results/[^)]+)\)", row)
        assert links, f"no file in benchmarks/results: {row}"
        for link in links:
            assert ((ROOT / page).parent / link).is_file(), link


def anchor_of(heading: str) -> str:
    """As GitHub makes it."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {anchor_of(heading) for heading in headings}


@pytest.mark.parametrize("folder", [".", "docs", "benchmarks"])
def test_links_between_pages_lead_to_a_file_and_a_heading(folder):
    pages = sorted((ROOT / folder).glob("*.md"))
    assert pages
    for page in pages:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            if "://" in link:
                continue
            name, _, anchor = link.partition("#")
            target = page.parent / name if name else page
            assert target.exists(), f"{page.name}: {link}"
            if anchor:
                assert anchor in anchors(target), f"{page.name}: {link}"


@pytest.mark.parametrize("folder", [".", "docs", "benchmarks"])
def test_an_item_of_a_list_begins_a_line(folder):
    """A reflow of the text may join two of them."""
    for page in sorted((ROOT / folder).glob("*.md")):
        text = re.sub(
            r"^ *```.*?^ *```|^\|.*?$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S
        )
        joined = re.findall(r"[^\n]*[.:;] (?:\d\.$|- [A-Z*`])[^\n]*", text, re.MULTILINE)
        assert not joined, f"{page.name}: {joined}"


def test_result_files_name_no_folder_of_a_machine():
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        assert not re.findall(r'"/\w[^"]*"', path.read_text(encoding="utf-8")), path.name


def rounds_to(value: float, figure: str) -> bool:
    digits = len(figure.partition(".")[2])
    return abs(value - float(figure)) <= 0.5000001 * 10**-digits


def test_rates_and_ratios_of_performance_md_are_those_of_their_files():
    rows = read_rows(text_of(PERFORMANCE))
    assert {row.section for row in rows} == set(TITLES)
    for row in rows:
        numbers = [cell.replace(",", "") for cell in row.cells if re.fullmatch(r"[\d,.]+", cell)]
        rates = row.rates
        assert rounds_to(rates.here, numbers[0]) and rounds_to(rates.peer, numbers[1]), row
        if row.printed == "equal":
            assert rates.ratio["low"] < 1 < rates.ratio["high"], row
        else:
            assert rounds_to(rates.ratio["median"], row.printed), row


def test_the_picture_of_speed_has_the_rows_of_performance_md(tmp_path):
    speed_picture.main(["--drawing", str(tmp_path / "speed.svg")])
    drawn = (tmp_path / "speed.svg").read_text(encoding="utf-8")
    page = text_of(PERFORMANCE)
    assert drawn == (ROOT / "docs/speed.svg").read_text(encoding="utf-8")
    assert drawn.count("<circle") == len(read_rows(page)) + len(speed_picture.MACHINES)
    assert "](speed.svg)" in page


def test_one_command_makes_the_rows_of_ratios_again(capsys):
    words = ["--machine", "avx512", "--model-folder", "model", "--data", "data", "--list"]
    speed_rows.main(words)
    speed_rows.main([*words, "--bf16"])
    listed = set(re.findall(r"([^/]+)\.json", capsys.readouterr().out))
    page = text_of(PERFORMANCE)
    linked = set(re.findall(r"/results/(\w+-avx512-[^)]+)-\d{4}-\d\d-\d\d\.json", page))
    assert len(linked) >= 15 and linked <= listed


def rows_and_results(section: str) -> list[tuple[str, dict]]:
    """Each row of a section of performance.md, and what its file holds."""
    rows = []
    for row in result_rows(PERFORMANCE, section):
        (name,) = re.findall(r"benchmarks/results/([^)]+)\)", row)
        rows.append((row, read_result(name)))
    return rows


def read_result(name: str) -> dict:
    return read_json(ROOT / "benchmarks" / "results" / name)


def figures_of(text: str) -> list[str]:
    """Decimal numbers, without those of links."""
    text = re.sub(r"\]\([^)]*\)", "]", text).replace(",", "")
    return re.findall(r"(?<![\w.-])[-+]?\d+(?:\.\d+)?(?:e-\d+)?(?![\w.])", text)


# What a row of scores begins with: keys in its file, the score, and its factor.
SCORES = {
    "SQuAD, F1": ((), "f1", 1),
    "MRPC": (("mrpc",), "accuracy", 100),
    "CoLA": (("cola",), "matthews_correlation", 100),
    "STS-B": (("sts-b",), "pearson", 100),
    "SST-2, accuracy, one epoch": ((), "accuracy", 100),
    "SST-2, accuracy, two epochs": (("sst-2",), "accuracy", 100),
    "embeddings, STS-B": (("all-MiniLM-L6-v2, STS-B, one epoch",), "spearman", 100),
    "embeddings, SQuAD": (("all-MiniLM-L6-v2, SQuAD, half an epoch",), "ndcg@10", 100),
}


def scores_of(result: dict, side: str, keys: tuple[str, ...], score: str) -> list[float]:
    """Of each seed. side: the first word of a contestant."""
    if side in result:
        runs = result[side]
        for key in keys:
            runs = runs[key]
        return [run[score] for run in runs.values()]
    for key in keys:
        result = result[key]
    return [run[score] for run in result["runs"] if run["contestant"].startswith(side)]


def check_bold(rows: list[str], p_values: list[float]) -> None:
    """Only differences that survive Holm's correction over the rows are bold."""
    bold = [bool(re.search(r"\*\*\[?[-+]\d", row)) for row in rows]
    assert bold == [p_value < 0.05 for p_value in holm(p_values)]


def test_scores_and_intervals_of_performance_md_are_those_of_their_files():
    rows, p_values = [], []
    for row, result in rows_and_results("Are the scores the same?"):
        task, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        ((keys, score, factor),) = (SCORES[name] for name in SCORES if task.startswith(name))
        ours, theirs = (
            [factor * value for value in scores_of(result, side, keys, score)]
            for side in ("this project", "transformers")
        )
        test = stats.ttest_ind(ours, theirs, equal_var=False)
        interval = test.confidence_interval()
        rows.append(row)
        p_values.append(test.pvalue)
        values = [statistics.mean(ours), statistics.stdev(ours)]
        values += [statistics.mean(theirs), statistics.stdev(theirs)]
        values += [values[0] - values[2], interval.low, interval.high]
        for value, figure in zip(values, figures_of(" ".join(cells)), strict=True):
            assert rounds_to(value, figure), row
    check_bold(rows, p_values)


def test_cpu_seconds_until_a_loss_are_those_of_their_files():
    names = {
        "here, NorMuon": "ModernBERT, NorMuon, batches of 32",
        "transformers, compiled, `torch.optim.Muon`": (
            "transformers ModernBERT, Muon, batches of 32"
        ),
        "transformers, compiled, AdamW": "transformers ModernBERT, AdamW, batches of 32",
    }
    first: list[float] = []
    for row, result in rows_and_results("How soon is a good loss reached?"):
        title, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        loss, updates, seconds, *ratio = figures_of(" ".join(cells))
        runs = [run for run in result["runs"] if run["contestant"] == names[title]]
        runs = [run for run in runs if run["updates"] == int(updates)]
        rates = [run["learning_rate"] for run in runs]
        (rate,) = (rate for rate in set(rates) if rates.count(rate) == 3)  # that has three seeds
        runs = [run for run in runs if run["learning_rate"] == rate]
        measured = [run["cpu_seconds"] for run in runs]
        first = first or measured
        assert rounds_to(statistics.mean(run["loss"] for run in runs), loss), row
        assert rounds_to(statistics.mean(measured), seconds), row
        ratios = [there / here for there, here in zip(measured, first, strict=True)]
        assert not ratio or rounds_to(statistics.median(ratios), ratio[0]), row


def test_what_updates_of_a_quiet_machine_would_take_is_that_of_their_file():
    times = read_result("update_time-4-fp32-2026-11-28.json")["implementations"]
    words = words_of(PERFORMANCE, "How soon")
    updates = {
        "ModernBERT, NorMuon, batches of 32": 258,
        "transformers ModernBERT, Muon, batches of 32, compiled": 250,
        "transformers ModernBERT, AdamW, batches of 32, compiled": 400,
    }
    here, muon, adamw = (
        count * times[name]["cpu_milliseconds_per_update"]["median"]
        for name, count in updates.items()
    )
    (figures,) = re.findall(r"would be ([\d.]+) and ([\d.]+)\.", words)
    assert rounds_to(muon / here, figures[0]) and rounds_to(adamw / here, figures[1])
    tokens = [times[name]["tokens_per_update"] for name in list(updates)[:2]]
    assert f"{tokens[0]:,.0f} tokens here and {tokens[1]:,.0f} there" in words


def test_figures_of_an_h100_are_those_of_their_file():
    names = ["large-128-amp-eager", "large-128-amp-model", "large-128-pure-model"]
    rows = rows_and_results("How fast is BERT-large on an H100?")
    for name, (row, result) in zip(names, rows, strict=True):
        run = result["this project"][name]
        _, *cells = row.strip("|").split("|")
        rate, step, peak = figures_of(" ".join(cells))
        assert abs(run["tokens_per_second_micro"] - int(rate)) <= 50, row
        assert rounds_to(run["step_ms"], step) and rounds_to(run["peak_gib"], peak), row


def test_figures_of_data_preparation_are_those_of_their_file():
    section = text_of(PERFORMANCE, "How fast is data")
    result = read_result("text_to_samples-2026-11-28.json")
    here, theirs = (
        side["megabytes_per_cpu_second"]["median"] for side in result["implementations"].values()
    )
    values = [128, here, theirs, result["ratio"]["median"]]
    for value, figure in zip(values, figures_of(section), strict=True):
        assert rounds_to(value, figure)


def test_differences_from_transformers_are_those_of_their_file():
    result = read_result("exactness-2026-11-29.json")
    errors = result["relative errors"]
    of_bert, of_modernbert = (errors.pop(name) for name in list(errors)[-2:])
    names = ["largest difference of a state", "states", "gradients"]
    values = [max(error[name] for error in errors.values()) for name in names]
    values += [error[names[0]] for error in (of_bert, of_modernbert)]
    values += result["largest difference from float64"].values()
    rows = [row for row in result_rows("docs/what_works.md", "How exact") if "exactness" in row]
    figures = re.findall(r"\d\.\de-\d", " ".join(row.split("|")[3] for row in rows))
    assert [f"{value:.1e}".replace("e-0", "e-") for value in values] == figures


def ratios_of(machine: str, section: str) -> list[float]:
    """Of the rows of a machine (or `any`), medians; those of onnxruntime are told apart."""
    rows = read_rows(text_of(PERFORMANCE))
    return [
        row.rates.ratio["median"]
        for row in rows
        if machine in ("any", row.cells[1]) and TITLES[row.section] == section
        if "onnxruntime" not in row.work()
    ]


def assert_is_range(text: str, ratios: list[float]) -> None:
    """text: such as `1.2 to 2.0`, or one figure for both ends."""
    figures = re.findall(r"\d\.\d", text)
    assert rounds_to(min(ratios), figures[0]) and rounds_to(max(ratios), figures[-1]), text


def test_ranges_of_ratios_in_words_are_those_of_the_rows():
    page = text_of(PERFORMANCE)
    ranges = re.findall(r"^- (A[^:\n]*)(?:, float32)?: (.*)$", page, re.MULTILINE)
    told = [
        (text, ratios_of(machine.removesuffix(", float32"), section))
        for machine, line in ranges
        for text, section in re.findall(r"(\d[\d. to]*) in ([\w-]+)", line)
    ]
    assert len(told) == 14
    for text in (page, text_of("README.md")):
        (first,) = re.findall(r"([\d.]+ to [\d.]+) times as fast as transformers in pre-tr", text)
        told.append((first, ratios_of("any", "pre-training")))
    (second,) = re.findall(r", ([\d.]+ to [\d.]+) in fine-tuning", text)
    told.append((second, ratios_of("any", "fine-tuning")))
    for text, ratios in told:
        assert_is_range(text, ratios)


def test_the_peaks_of_memory_in_words_are_those_of_their_file():
    text = words_of(PERFORMANCE)
    (peaks,) = re.findall(r"AVX2 needs ([\d.]+) GiB at the peak here and ([\d.]+) there", text)
    name = "pretraining_step-cpu-base-128-fp32-2026-11-27.json"
    measured = read_result(name)["implementations"]
    for side, peak in zip(("this project", "transformers, masked tokens only"), peaks, strict=True):
        assert rounds_to(measured[side]["peak_memory_gib"], peak)


def test_numbers_and_lengths_of_texts_in_words_are_those_of_the_files():
    section = words_of(PERFORMANCE, "How fast is inference?")
    (words,) = re.findall(
        r"values: (\d+) .*? (\d+) char.*? (\d+) with.*? (\d+) para.*?\((\d+)\)", section
    )
    told = {(int(words[0]), int(words[1])), (int(words[0]), int(words[2]))}
    told.add((int(words[3]), int(words[4])))
    files = [result["arguments"] for _, result in rows_and_results("How fast is inference?")]
    assert {(file["texts"], file["characters_of_a_text"]["median"]) for file in files} == told


def test_tokens_per_cpu_second_of_updates_in_words_are_those_of_their_file():
    text = words_of(PERFORMANCE)
    (figures,) = re.findall(r"with NorMuon has ([\d.]+) times .*?, and ([\d.]+) times those", text)
    ratios = read_result("update_time-4-avx512-fp32-2026-11-29.json")["tokens_per_cpu_second_ratio"]
    for peer, figure in zip(("Muon", "AdamW"), figures, strict=True):
        ratio = ratios[f"ModernBERT, NorMuon / transformers ModernBERT, {peer}, compiled"]
        assert rounds_to(ratio["median"], figure)


def test_every_result_file_is_shown_on_a_page():
    """Others are in git."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    names = subprocess.run(
        ["git", "ls-files", "benchmarks/results"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert names
    assert [name for name in names if name not in text and (ROOT / name).exists()] == []


def test_figures_of_readme_are_those_of_the_pages():
    pages = [ROOT / "docs" / name for name in ("performance.md", "what_works.md")]
    lines = "".join(page.read_text(encoding="utf-8") for page in pages).split("\n")
    for row in result_rows("README.md", "Results"):
        (name,) = re.findall(r"benchmarks/results/([^)]+)\)", row)
        figures_of_lines = [set(figures_of(line)) for line in lines if name in line]
        _, *cells = row.strip("|").split("|")
        assert any(set(figures_of(" ".join(cells))) <= told for told in figures_of_lines), row


def test_what_adaptation_did_to_vectors_is_that_of_its_file():
    rows, p_values = result_rows("docs/continue_pretraining.md", "What was measured?"), []
    rows = [row for row in rows if " labels" in row]
    assert len(rows) == 6
    for row in rows:
        (name,) = re.findall(r"results/([^)]+)\)", row)
        lines = " ".join(read_result(name)["lines"])
        (labels,) = re.findall(r" (\d+) labels", row)
        measure = "fine-tuning" if "fine-tuning" in row else f"regression .{labels} labels,"
        (line,) = re.findall(rf"{measure}[^)]*\): accuracy (.*?\)): ", lines)
        values = re.findall(r"[-+]?\d+\.\d\d", line)[:5]
        figures = re.findall(r"[-+]?\d+\.\d\b", row)
        for value, figure in zip(values, figures, strict=True):
            assert rounds_to(float(value), figure), row
        p_values.append(float(re.findall(r"p <? ?([\d.]+)", line)[0]))
    check_bold(rows, p_values)


def runs_by_table(names: list[str], num_rows: int) -> list[list[list[dict]]]:
    """Of each table and model the runs of each contestant in each of some files, by its flags."""
    tables: dict[tuple, dict[tuple, list[dict]]] = {}
    for name in names:
        for run in read_result(name)["runs"]:
            if run["num_rows"] == num_rows:
                groups = tables.setdefault((run["table"], run["model"]), {})
                groups.setdefault((name, run["contestant"], run["flags"]), []).append(run)
    return [list(groups.values()) for groups in tables.values()]


def are_of(runs: list[dict], contestant: str, cell: str) -> bool:
    """Whether a cell such as `84.7 (0.003)` has the mean score and, in brackets, the mean loss."""
    score, *loss = re.findall(r"-?[\d.]+", cell)
    return (
        runs[0]["contestant"] == contestant
        and rounds_to(100 * statistics.mean(run["score"] for run in runs), score)
        and all(rounds_to(statistics.mean(run["loss"] for run in runs), text) for text in loss)
    )


PUBLISHED = ("Published tables in five languages", "Ten more published tables")


def cells_of(section: str) -> list[dict[str, str]]:
    """The cells of each row of a table on the page of defaults, by the names of their columns."""
    lines = [line for line in text_of("docs/defaults.md", section).split("\n") if line[:1] == "|"]
    names, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return [dict(zip(names, row, strict=True)) for row in rows]


@pytest.mark.parametrize("section", ["Classes", *PUBLISHED, "Numbers and several", "Embeddings"])
def test_scores_of_the_defaults_are_those_of_their_files(section):
    page = text_of("docs/defaults.md").split(f"## {section}")[1]
    columns = [name.strip().lower() for name in page[page.index("| model") :].split("|")]
    rows = result_rows("docs/defaults.md", section)
    assert len(rows) >= 5
    for row in rows:
        cells = dict(zip(columns, row.split("|"), strict=False))
        num_rows = int(cells["rows, seeds"].split(", ")[0].replace(",", ""))
        tables = runs_by_table(re.findall(r"benchmarks/results/([^)]+)\)", row), num_rows)
        shown = [name for name in CONTESTANTS if cells.get(name, "").strip()]
        assert any(
            all(
                any(are_of(runs, CONTESTANTS[name], cells[name]) for runs in groups)
                for name in shown
            )
            for groups in tables
        ), row


@pytest.mark.parametrize("section", PUBLISHED)
def test_differences_on_published_tables_are_those_of_their_file(section):
    """And bold where they are below zero by more than their interval."""
    shown = []
    for cells in cells_of(section):
        (name,) = re.findall(r"results/([^)]+)\)", cells["runs"])
        shown.append((cells["rows, seeds"], cells["here - Trainer"], cells["here - tf-idf"]))
    groups: dict[str, dict[str, list[dict]]] = {}
    for run in read_result(name)["runs"]:
        groups.setdefault(run["table"], {}).setdefault(run["contestant"], []).append(run)
    measured = set()
    for runs in groups.values():
        here = runs["default"]
        texts = [shown_difference(here, runs.get(peer, [])) for peer in ("trainer", "tf-idf")]
        differences = [in_bold_if_below(text.removesuffix(" (one seed)")) for text in texts]
        measured.add((f"{here[0]['num_rows']:,}, {len(here)}", *differences))
    assert set(shown) == measured
    assert len(shown) == len(groups)


MANY_CLASSES = ("six", "traits", "entities", "questions to", "Swedish", "German entities")
MANY_CLASSES += ("requests", "Somali", "Indonesian", "Italian entities")
TWO_CLASSES = ("sentiment", "acceptability", "paraphrases", "pairs alike", "German tweets")
TWO_CLASSES += ("English tweets, irony", "pairs, copied", "Portuguese")


def test_ranges_of_differences_in_words_are_those_of_the_rows():
    """Of two classes those of all-MiniLM-L6-v2 and of e5."""
    sections = ("Classes, numbers and tags", *PUBLISHED)
    rows = [cells for section in sections for cells in cells_of(section)]
    text = words_of("docs/defaults.md")
    many = re.findall(r"(\d+) to (\d+) points above the Trainer", text)
    two = re.findall(r"from ([\d.]+) points below to ([\d.]+) above", text)
    for tables, models, sign, [ends] in (
        (MANY_CLASSES, ("MiniLM", "tiny", "e5"), 1, many),
        (TWO_CLASSES, ("MiniLM", "e5"), -1, two),
    ):
        differences = [
            float(row["here - Trainer"].strip("*").split()[0])
            for row in rows
            if row["model"] in models and row["table, score"].startswith(tables)
        ]
        assert len(differences) > 8
        assert rounds_to(sign * min(differences), ends[0])
        assert rounds_to(max(differences), ends[1])


def in_bold_if_below(difference: str) -> str:
    value, _, half = difference.partition(" ± ")
    return f"**{difference}**" if difference and float(value) < -float(half or 0) else difference


def test_rows_of_fine_tuning_md_are_those_of_the_page_of_defaults():
    page = text_of("docs/fine_tuning.md")
    table = re.split(r"\n\n", page.split("| all-MiniLM-L6-v2 | here | Trainer | tf-idf |")[1])[0]
    rows = table.split("\n")[2:]
    assert len(rows) >= 5
    known = result_rows("docs/defaults.md", "")
    for row in rows:
        figures = set(figures_of(" ".join(row.replace("*", "").split("|")[2:])))
        assert any(figures <= set(figures_of(line.replace("*", ""))) for line in known), row


def test_scores_of_frozen_encoders_are_those_of_their_file():
    scores: dict[tuple, list[float]] = {}
    for run in read_result("frozen_encoder-2026-11-29.json")["runs"]:
        kind = run["contestant"] if run["contestant"] in ("frozen", "tf-idf") else "fine-tuning"
        key = (run["table"], run["num_rows"], kind)
        scores.setdefault(key, []).append(100 * run["score"])
    tables = {"SST-2": "sentiment", "novels": "authors"}
    rows = result_rows("docs/fine_tuning.md", "What if there are few labels?")
    assert len(rows) == 4
    for row in rows:
        task, labels, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        for kind, cell in zip(("frozen", "fine-tuning", "tf-idf"), cells, strict=True):
            key = (tables[task.split(",")[0]], int(labels.replace(",", "")), kind)
            figures = re.findall(r"\d\d\.\d", cell)
            assert len(figures) == len(scores[key]), row
            assert all(map(rounds_to, scores[key], figures)), row


def test_losses_of_first_models_are_those_of_their_files():
    page = text_of("docs/pretraining.md")
    rows = [row for row in page.split("\n") if row.startswith("|") and "/first_model-" in row]
    assert len(rows) > 2
    for row in rows:
        (name,) = re.findall(r"results/([^)]+)\)", row)
        recipes: dict[str, list[dict]] = {}
        for run in read_result(name)["runs"]:
            if "loss" in run:
                recipes.setdefault(run["recipe"], []).append(run)
        figures = [figure for figure in figures_of(row) if "." in figure]
        assert any(
            all(any(rounds_to(value, figure) for figure in figures) for value in first_scores(runs))
            for runs in recipes.values()
        ), row


def first_scores(runs: list[dict]) -> list[float]:
    """Means of loss and words right in percent; of several runs the deviation of the loss, too."""
    losses = [run["loss"] for run in runs]
    deviation = [statistics.stdev(losses)] if len(losses) > 1 else []
    percent = 100 * statistics.mean(run["accuracy"] for run in runs)
    return [statistics.mean(losses), percent, *deviation]


def commands_in(value: object) -> Iterator[str]:
    """The commands of all runs in a result file."""
    if isinstance(value, dict):
        if isinstance(command := value.get("command"), str):
            yield command
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from commands_in(part)


def commands_of_older_files() -> dict[str, list[str]]:
    """The commands of benchmarks/README.md that make a file again, by its name."""
    page = text_of("benchmarks/README.md")
    rows = re.findall(r"^\| \[.*?\]\(results/(.*?)\) \| (.*) \|$", page, re.MULTILINE)
    return {name: re.findall(r"`(?:python3 benchmarks/)?(.*?)`", cell) for name, cell in rows}


def test_every_result_file_says_which_program_here_makes_it_and_with_which_flags():
    """In the file, or, if the program was another one, in a table of benchmarks/README.md."""
    older = commands_of_older_files()
    parsers: dict[str, argparse.ArgumentParser] = {}
    for path in sorted((ROOT / "benchmarks" / "results").iterdir()):
        commands = older.pop(path.name, None)
        if commands is None:
            commands = set(commands_in(read_json(path)))
        assert commands, f"{path.name} names no command"
        for command in commands:
            program, *words = command.partition(";")[0].split()
            if program not in parsers:
                parsers[program] = first_parser(load(ROOT / "benchmarks" / program))
            flags = {word.partition("=")[0] for word in words if word.startswith("--")}
            unknown = flags - parsers[program]._option_string_actions.keys()
            assert not unknown, f"{path.name}: {program} has no {unknown}"
    assert not older, f"benchmarks/README.md has commands of {older.keys()}, which are not there"
