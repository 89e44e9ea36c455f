#!/usr/bin/env python3
"""Fine-tunes BERT on questions about passages, predicts answers, and evaluates them.

    python3 run_squad.py --train-file questions.csv --predict-file held_out.csv \\
        --do-train --do-eval --init-checkpoint MODEL_FOLDER --output-dir results

    python3 run_squad.py --do-train --do-eval \\
        --train-file data/download/squad/v1.1/train-v1.1.json \\
        --predict-file data/download/squad/v1.1/dev-v1.1.json --bert-model bert-base-uncased \\
        --init-checkpoint results/bert-base-uncased/phase2 --output-dir results \\
        --epochs 2 --learning-rate 3e-5

Files are SQuAD's v1.1 or v2.0, or tables with the columns id, question, context, answer and
answer_start (in characters). Checkpoints, predictions.json and scores.json go to
<output-dir>/<model>/squad. Under torchrun it runs on several GPUs.
"""

from bert_recipe.utils.errors import handle_uncaught_errors, run_main

if __name__ == "__main__":
    handle_uncaught_errors()  # also of the imports below

from bert_recipe.config.arguments import check_weights, make_run_config, parse_fine_tuning
from bert_recipe.tasks.squad.options import SquadOptions, SquadTaskOptions
from bert_recipe.tasks.task import TaskOptions
from bert_recipe.utils.command_line import ArgumentParser, Arguments, flags_of, from_flags

# Functions import what needs torch, so that --help and errors of the command line do not wait for
# it.


def parse_arguments(argv: list[str] | None = None) -> Arguments:
    parser = ArgumentParser(description=__doc__)
    defaults = {
        "max_seq_length": SquadOptions.max_seq_length,
        "predict_batch_size": 8,
    }
    groups = {"features and decoding": flags_of(SquadOptions)}
    args = parse_fine_tuning(parser, argv, groups, ("baseline",), **defaults)
    complaints = []
    if args.do_train and args.train_file is None:
        complaints.append("--do-train needs --train-file")
    if (args.do_predict or args.do_eval) and args.predict_file is None:
        complaints.append("--do-predict and --do-eval need --predict-file")
    parser.refuse(complaints)
    return args


def task_options(args: Arguments) -> TaskOptions:
    return from_flags(SquadTaskOptions, args)


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    check_weights(args.from_pretrained_params)
    config, options = make_run_config(args), task_options(args)
    from bert_recipe.training.workflow import run_task

    return run_task(config, options, "SQuAD")


if __name__ == "__main__":
    run_main(main)
