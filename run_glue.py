#!/usr/bin/env python3
"""Fine-tunes and evaluates BERT on GLUE, SuperGLUE or your own files, and predicts.

    python3 run_glue.py --task-name mrpc --data-dir data/download/glue/MRPC --do-train --do-eval \\
        --init-checkpoint results/bert-base-uncased/phase2 --output-dir results

    python3 run_glue.py --train-file reviews.csv --eval-file held_out.csv \\
        --text-column review --label-column stars \\
        --do-train --do-eval --init-checkpoint MODEL_FOLDER --output-dir results

Checkpoints, scores.json and predictions go to <output-dir>/<model>/<task>. Under torchrun it runs
on several GPUs.
"""

from typing import Any

from bert_recipe.utils.errors import handle_uncaught_errors, run_main

if __name__ == "__main__":
    handle_uncaught_errors()  # also of the imports below

from bert_recipe.config import LearningOptions
from bert_recipe.config.arguments import check_weights, make_run_config, parse_fine_tuning
from bert_recipe.tasks.classification.specs import (
    EMBEDDING,
    MAX_SEQ_LENGTH,
    MULTI_LABEL,
    NER,
    TASKS,
    FileOptions,
    SplitOptions,
    TaskOptions,
    TaskSpec,
    custom_spec,
)
from bert_recipe.tasks.embeddings.files import MARGIN_MSE, EmbeddingOptions
from bert_recipe.tasks.reading import ReadingOptions
from bert_recipe.tasks.task import FineTuningTask
from bert_recipe.utils.command_line import ArgumentParser, Arguments, flags_of, from_flags
from bert_recipe.utils.text_files import kind_of

# Functions import what needs torch, so that --help and errors of the command line do not wait for
# it.


def parse_arguments(argv: list[str] | None = None) -> Arguments:
    parser = ArgumentParser(description=(__doc__ or " ").splitlines()[0])
    own_files = (
        "your own files (--task-name custom): .csv, .tsv, .jsonl or .parquet, also compressed"
    )
    groups = {
        "task": flags_of(TaskOptions),
        own_files: flags_of(FileOptions),
        "reading your own files": flags_of(ReadingOptions),
        "without --eval-file": flags_of(SplitOptions),
        "sentence embeddings (--task-name embedding)": flags_of(EmbeddingOptions),
    }
    defaults = {"max_seq_length": MAX_SEQ_LENGTH, "predict_batch_size": 32}
    args = parse_fine_tuning(parser, argv, groups, learning_rate=2.4e-5, **defaults)
    check_files(args, parser)
    numbers = args.regression or args.negative_columns or args.task_name in ("sts-b", EMBEDDING)
    if args.label_smoothing and (numbers or args.task_name == MULTI_LABEL):
        parser.error("--label-smoothing is for tasks with one class per text or word: leave it out")
    return args


def check_files(args: Arguments, parser: ArgumentParser) -> None:
    """Exits with an error if files, columns and task do not fit together."""
    check_column_names(args, parser)
    if args.max_seq_length < 8:
        parser.error(
            f"--max-seq-length {args.max_seq_length} leaves no room for texts: give at least 8"
        )
    if args.task_name in TASKS:
        check_published_task(args, parser)
        return
    check_own_files(args, parser)
    if args.task_name == EMBEDDING:
        check_embedding(args, parser)
    elif args.task_name != NER:
        check_class_columns(args, parser)


def check_column_names(args: Arguments, parser: ArgumentParser) -> None:
    """Each column has one meaning, and several label columns are a multi-label task's."""
    label_columns = args.label_column or []
    negative_columns = args.negative_columns or []
    text_columns = [args.text_column, args.pair_column, args.prompt_column]
    given = [name for name in text_columns if name is not None]
    columns = given + label_columns + negative_columns
    repeated = [name for name in columns if columns.count(name) > 1]
    if repeated:
        parser.error(f"column {repeated[0]!r} is given twice: give each column once")
    is_margin = args.task_name == EMBEDDING and args.embedding_loss == MARGIN_MSE
    if len(label_columns) > 1 and args.task_name != MULTI_LABEL and not is_margin:
        parser.error(
            "several names after --label-column are columns of 0 and 1, one per label: add "
            "--task-name multi-label, or give one name"
        )


def check_published_task(args: Arguments, parser: ArgumentParser) -> None:
    if args.train_file:
        parser.error("--train-file is for --task-name custom: leave it out, or leave out the task")
    if args.data_dir is None:
        parser.error(
            f"--task-name {args.task_name} needs --data-dir, the folder of its files: python3 "
            f"data/prepare.py download glue --tasks {args.task_name} fetches them"
        )


def check_own_files(args: Arguments, parser: ArgumentParser) -> None:
    """There is a file for each thing to do, and no other; parts of the training file are scored."""
    is_split = bool(args.eval_fraction or args.num_folds)
    files = {
        "--do-train": ("--train-file", args.do_train, args.train_file is not None),
        "--do-eval": ("--eval-file", args.do_eval, args.eval_file is not None or is_split),
        "--do-predict": ("--predict-file", args.do_predict, args.predict_file is not None),
    }
    complaints = []
    for do_flag, (file_flag, is_done, is_given) in files.items():
        if is_done != is_given:
            advice = "give both or neither"
            if do_flag == "--do-eval" and args.do_train and args.task_name != EMBEDDING:
                advice += ", or --eval-fraction 0.1 to hold out a part of the training file"
            complaints.append(f"{do_flag} and {file_flag} go together: {advice}")
    parser.refuse(complaints)


def check_class_columns(args: Arguments, parser: ArgumentParser) -> None:
    """Texts have a column and, where they are trained on or scored, labels."""
    complaints = []
    if args.text_column is None:
        complaints.append(
            "your own file needs --text-column (or give --task-name for a task of GLUE)"
        )
    has_labels = args.label_column is not None
    if has_labels and args.negative_columns is not None:
        complaints.append(
            "--negative-columns do not answer --text-column, and --pair-column does: leave out "
            "--label-column"
        )
    if (args.do_train or args.do_eval) and not has_labels and args.negative_columns is None:
        complaints.append(
            "--do-train and --do-eval need --label-column, the column of the classes or numbers"
        )
    parser.refuse(complaints)


def check_embedding(args: Arguments, parser: ArgumentParser) -> None:
    parser.refuse_without_effect(args, [(("negative_columns",), args.do_train, "--do-train")])
    if args.do_predict:
        parser.error(
            "--do-predict has no effect with --task-name embedding: use inference.py --embed"
        )
    files = [file for file in (args.train_file, args.eval_file) if file is not None]
    is_text = all(kind_of(str(file))[0] == ".txt" or file.suffix == ".json" for file in files)
    if {args.text_column is None, args.pair_column is None} != {is_text}:
        parser.error(
            "embedding needs --text-column and --pair-column, or .txt or SQuAD's .json files "
            "without columns"
        )
    has_score = args.label_column is not None
    loss = args.embedding_loss
    if loss is not None and has_score == (loss == "contrastive"):
        parser.error(
            f"--embedding-loss {loss} goes {'without' if has_score else 'together with'} "
            "--label-column"
        )
    if loss == MARGIN_MSE:
        check_teacher_scores(args.label_column, args.negative_columns or [], parser)
    elif has_score:
        for name in ("negative_columns", "corpus_file"):
            if vars(args)[name] is not None:
                flag = f"--{name.replace('_', '-')}"
                parser.error(
                    f"{flag} cannot be combined with --label-column, whose scores are of "
                    f"pairs: leave one of them out, or give --embedding-loss {MARGIN_MSE}"
                )


def check_teacher_scores(scores: list[str], negatives: list[str], parser: ArgumentParser) -> None:
    """There is a score for each text that is compared with the first one, or one margin."""
    if not negatives:
        parser.error(f"--embedding-loss {MARGIN_MSE} needs --negative-columns")
    if len(scores) != 1 + len(negatives) and (len(scores), len(negatives)) != (1, 1):
        parser.error(
            f"--embedding-loss {MARGIN_MSE} needs {1 + len(negatives)} columns in --label-column, "
            f"with the scores of the second text and of each negative, not {len(scores)} (or the "
            f"margin, with one negative)"
        )


def make_task(args: Arguments) -> FineTuningTask:
    if args.task_name == NER:
        return make_token_task(args)
    if args.task_name == EMBEDDING:
        return make_embedding_task(args)
    return make_classification_task(args)


def learning_options(args: Arguments) -> dict[str, Any]:
    """The options of tasks that can hold out a part of the training file."""
    from bert_recipe.tasks.splits import Split

    options = vars(from_flags(LearningOptions, args))
    if args.eval_fraction or args.num_folds:
        options["split"] = Split(args.eval_fraction, args.num_folds, args.seed)
    return options


def make_token_task(args: Arguments) -> FineTuningTask:
    from bert_recipe.tasks.ner.files import SentenceColumns
    from bert_recipe.tasks.ner.task import TokenClassificationTask

    return TokenClassificationTask(
        args.max_seq_length,
        args.train_file,
        args.eval_file,
        args.predict_file,
        reading=from_flags(ReadingOptions, args),
        columns=SentenceColumns(args.text_column, first_label_column(args)),
        **learning_options(args),
    )


def make_embedding_task(args: Arguments) -> FineTuningTask:
    from bert_recipe.tasks.embeddings.task import EmbeddingTask

    columns = (args.text_column, args.pair_column) if args.text_column is not None else ()
    is_margin = args.embedding_loss == MARGIN_MSE
    score = None if is_margin else first_label_column(args)
    teacher = tuple(args.label_column) if is_margin else ()
    task = from_flags(EmbeddingTask, args, columns=columns, score=score, teacher=teacher)
    return task.for_start(None)


def make_classification_task(args: Arguments) -> FineTuningTask:
    from bert_recipe.tasks.classification.task import ClassificationTask

    if args.task_name in TASKS:
        spec, name = TASKS[args.task_name], args.task_name
        train_file = spec.train_file(args.data_dir)
        eval_files = spec.evaluation_files(args.data_dir)
        predict_files = spec.test_files(args.data_dir)
    else:
        spec, name = own_spec(args), own_task_name(args)
        train_file = args.train_file
        eval_files = {"": args.eval_file or args.train_file}
        predict_files = {"": args.predict_file}
    return ClassificationTask(
        spec,
        args.max_seq_length,
        name,
        train_file,
        eval_files=eval_files if args.do_eval else {},
        predict_files=predict_files if args.do_predict else {},
        balanced=args.class_weights == "balanced",
        tune_thresholds=args.tune_thresholds,
        reading=from_flags(ReadingOptions, args),
        **learning_options(args),
    )


def own_spec(args: Arguments) -> TaskSpec:
    """The columns of the user's own files of classes, labels or numbers."""
    is_multi_label = args.task_name == MULTI_LABEL
    label_columns = tuple(args.label_column or ()) if is_multi_label else ()
    return custom_spec(
        args.text_column,
        args.pair_column,
        first_label_column(args) or "",
        regression=args.regression,
        multi_label=is_multi_label,
        label_columns=label_columns if len(label_columns) > 1 else (),
        label_separator=args.label_separator,
        negatives=tuple(args.negative_columns or ()),
    )


def own_task_name(args: Arguments) -> str:
    """The name of the task of the user's own files, which is that of the folder for results."""
    if args.task_name == MULTI_LABEL:
        return MULTI_LABEL
    if args.negative_columns is not None:
        return "reranker"
    return "regression" if args.regression else "classification"


def first_label_column(args: Arguments) -> str | None:
    return None if args.label_column is None else args.label_column[0]


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    check_weights(args, args.from_pretrained_params)
    config, task = make_run_config(args), make_task(args)
    from bert_recipe.training.workflow import run_task

    return run_task(config, task, "GLUE")


if __name__ == "__main__":
    run_main(main)
