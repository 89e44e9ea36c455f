#!/usr/bin/env python3
"""Pre-trains BERT on HDF5 shards with masked language modelling and next-sentence prediction, in
two phases.

    python3 run_pretraining.py --input-dir data/hdf5/seq_128_pred_20/training \\
        --output-dir results --bert-model bert-base-uncased --max-steps 7038 --phase1 \\
        --max-seq-length 128 --max-predictions-per-seq 20 \\
        --from-checkpoint results/bert-base-uncased/phase1 --last-step-of-checkpoint auto

After an interruption, rerun the same command to resume. Use torchrun for several GPUs.
"""

from bert_recipe.utils.errors import handle_uncaught_errors, run_main

if __name__ == "__main__":
    handle_uncaught_errors()  # also of the imports below

from bert_recipe.config.arguments import check_weights, make_run_config, parse_pretraining
from bert_recipe.tasks.task import TaskOptions
from bert_recipe.utils.command_line import ArgumentParser, Arguments, from_flags

# The loop is `Trainer.train` of bert_recipe/training/trainer.py; `run_task` of training/workflow.py
# puts together what goes into it. The loss is in tasks/pretraining.py.
#
# Functions import what needs torch, so that --help and errors of the command line do not wait for
# it.


def parse_arguments(argv: list[str] | None = None) -> Arguments:
    parser = ArgumentParser(description=__doc__)
    return parse_pretraining(parser, argv)


def task_options(args: Arguments) -> TaskOptions:
    from bert_recipe.tasks.pretraining import PretrainingOptions

    return from_flags(PretrainingOptions, args)


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    check_weights(args.from_pretrained_params)
    config, options = make_run_config(args), task_options(args)
    from bert_recipe.training.workflow import run_task

    return run_task(config, options, "pre-training")


if __name__ == "__main__":
    run_main(main)
