"""Exact match and F1 of SQuAD predictions, computed as in the official evaluation scripts of v1.1
and v2.0.
"""

import json

from bert_recipe.utils.errors import UserError, handle_uncaught_errors, run_main

if __name__ == "__main__":
    handle_uncaught_errors()  # also of the imports below

from bert_recipe.tasks.squad.files import read_squad
from bert_recipe.tasks.squad.scores import evaluate
from bert_recipe.utils.command_line import ArgumentParser, Arguments, finite_float
from bert_recipe.utils.json_files import read_json


def parse_arguments(argv: list[str] | None = None) -> Arguments:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("dataset", metavar="DATASET", help="SQuAD JSON with answers, v1.1 or v2.0")
    parser.add_argument(
        "predictions", metavar="PREDICTIONS", help="JSON {question id: answer text}"
    )
    parser.add_argument(
        "--na-prob-file",
        help="v2.0: JSON {question id: score of having no answer}, such as null_odds.json",
    )
    parser.add_argument(
        "--na-prob-thresh",
        type=finite_float,
        default=1.0,
        help="a score above this predicts that there is no answer",
    )
    args = parser.parse_args(argv)
    parser.refuse_without_effect(args, [(("na_prob_thresh",), args.na_prob_file, "--na-prob-file")])
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
