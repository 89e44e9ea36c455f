"""Exact match and F1 of SQuAD predictions, computed as in the official evaluation scripts of v1.1
and v2.0.
"""

import json

from bert_recipe.utils.errors import UserError, handle_uncaught_errors, run_main

if __name__ == "__main__":
    handle_uncaught_errors()  # also of the imports below

from bert_recipe.tasks.squad.files import read_squad
from bert_recipe.tasks.squad.scores import evaluate
from bert_recipe.utils.command_line import (
    REQUIRED,
    ArgumentParser,
    Arguments,
    Flag,
    finite_float,
)
from bert_recipe.utils.json_files import read_json

FLAGS = (
    Flag(
        "dataset",
        str,
        REQUIRED,
        "SQuAD JSON with answers, v1.1 or v2.0",
    ),
    Flag(
        "predictions",
        str,
        REQUIRED,
        "JSON {question id: answer text}",
    ),
    Flag(
        "--na-prob-file",
        str,
        None,
        "v2.0: JSON {question id: score of having no answer}, such as null_odds.json",
    ),
    Flag(
        "--na-prob-thresh",
        finite_float,
        1.0,
        "a score above this predicts that there is no answer",
        needs=("--na-prob-file",),
    ),
)


def parse_arguments(argv: list[str] | None = None) -> Arguments:
    parser = ArgumentParser(description=__doc__)
    parser.add_flags("flags", FLAGS)
    args = parser.parse_args(argv)
    parser.check_flags(args)
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    squad = read_squad(args.dataset)
    predictions = read_json(args.predictions, "predictions file", dict[str, str])
    na_probs = None
    if args.na_prob_file:
        na_probs = read_json(args.na_prob_file, "no-answer file", dict[str, float])
        if no_number := [key for key, value in na_probs.items() if value != value]:
            raise UserError(
                f"no-answer file {args.na_prob_file}: {no_number[0]} is NaN: predict again"
            )
    scores = evaluate(squad, predictions, na_probs, args.na_prob_thresh)
    print(json.dumps(scores, indent=2 if squad.version_2 else None))


if __name__ == "__main__":
    run_main(main)
