#!/usr/bin/env python3
"""Fine-tunes and evaluates BERT on named entities, or on other tags of words, and predicts.

    python3 run_ner.py --train-file train.conll --eval-file dev.conll --predict-file new.conll \\
        --do-train --do-eval --do-predict --init-checkpoint MODEL_FOLDER --output-dir results

Files are CoNLL's columns, or JSON lines with words and tags, or with spans. Checkpoints,
scores.json and predictions go to <output-dir>/<model>/ner. Under torchrun it runs on several GPUs.
"""

from bert_recipe.utils.errors import handle_uncaught_errors, run_main

if __name__ == "__main__":
    handle_uncaught_errors()  # also of the imports below

from bert_recipe.config.arguments import check_weights, make_run_config, parse_fine_tuning
from bert_recipe.tasks.ner.options import SentenceFileOptions, TokenClassificationOptions
from bert_recipe.tasks.own_files import DEFAULTS, SplitOptions, check_own_files
from bert_recipe.tasks.reading import ReadingOptions
from bert_recipe.tasks.task import TaskOptions
from bert_recipe.utils.command_line import ArgumentParser, Arguments, flags_of, from_flags

# Functions import what needs torch, so that --help and errors of the command line do not wait for
# it.


def parse_arguments(argv: list[str] | None = None) -> Arguments:
    parser = ArgumentParser(description=__doc__)
    groups = {
        "files": flags_of(SentenceFileOptions),
        "reading files": flags_of(ReadingOptions),
        "without --eval-file": flags_of(SplitOptions),
    }
    args = parse_fine_tuning(parser, argv, groups, **DEFAULTS)
    check_own_files(args, parser)
    return args


def task_options(args: Arguments) -> TaskOptions:
    return from_flags(TokenClassificationOptions, args)


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    check_weights(args.from_pretrained_params)
    config, options = make_run_config(args), task_options(args)
    from bert_recipe.training.workflow import run_task

    return run_task(config, options, "NER")


if __name__ == "__main__":
    run_main(main)
