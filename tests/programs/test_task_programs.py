"""The flags of the fine-tuning programs: each has only those of its task."""

import pytest

import run_embeddings
import run_glue
import run_ner

TRAIN = ("--output-dir", "o", "--do-train", "--train-file", "t.csv")
COLUMNS = {
    run_glue: ("--text-column", "a", "--label-column", "b"),
    run_ner: (),
    run_embeddings: ("--text-column", "a", "--pair-column", "b"),
}


def error_of(program, words: str, capsys) -> str:
    with pytest.raises(SystemExit):
        program.parse_arguments([*TRAIN, *COLUMNS[program], *words.split()])
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("program", "words"),
    [
        *((run_ner, words) for words in ("--pair-column p", "--decimal ,", "--data-dir d")),
        (run_ner, "--class-weights balanced"),
        *((run_embeddings, words) for words in ("--do-predict", "--label-smoothing 0.1")),
        *((run_embeddings, words) for words in ("--predict-file f", "--num-folds 3")),
    ],
)
def test_a_flag_of_another_task_is_unknown(program, words, capsys):
    assert f"unrecognized arguments: {words.split()[0]}" in error_of(program, words, capsys)


def test_a_flag_of_another_program_is_neither_needed_nor_in_the_way(capsys):
    """--eval-fraction goes without --data-dir, and --predict-batch-size with --do-predict."""
    args = run_ner.parse_arguments([*TRAIN, "--do-eval", "--eval-fraction", "0.1"])
    assert args.eval_fraction == 0.1
    line = error_of(run_embeddings, "--predict-batch-size 8", capsys)
    assert "--predict-batch-size has no effect without --do-eval" in line
