#!/usr/bin/env python3
"""Pre-trains BERT on HDF5 shards with masked language modelling and next-sentence prediction, in
two phases.

    python3 run_pretraining.py --input-dir data/hdf5/seq_128_pred_20/training --output-dir results \\
        --bert-model bert-base-uncased --max-steps 7038 --phase1 --max-seq-length 128 --max-predictions-per-seq 20 \\
        --from-checkpoint results/bert-base-uncased/phase1 --last-step-of-checkpoint auto

After an interruption, rerun the same command to resume. Use torchrun for several GPUs.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # which python3 -P leaves out

import dataclasses
import math
from functools import partial
from typing import TYPE_CHECKING, Any

from arguments import check_weights, make_run_config, parse_pretraining
from utils.command_line import ArgumentParser, Arguments
from utils.errors import UserError, run_main
from utils.files import from_json, read_json, write_json

if TYPE_CHECKING:  # functions import what needs torch, so that --help and errors of the command line do not wait for it
    from checkpoint.model_folder import ModelFolder
    from data_loading.pretraining_dataset import PretrainingDataset
    from parallel.runtime import Runtime
    from run_config import RunConfig
    from run_setup import TrainingPlan


def parse_arguments(argv: list[str] | None = None) -> Arguments:
    parser = ArgumentParser(description=(__doc__ or " ").splitlines()[0])
    return parse_pretraining(parser, argv)


def plan_training(config: RunConfig, runtime: Runtime, seed_name: str = "") -> TrainingPlan:
    """seed_name: subfolder of the seed, if there are several."""
    from checkpoint.model_choice import choose_model
    from checkpoint.start import find_start
    from data_loading.pretraining_dataset import files_digest, open_dataset, verify_checksums
    from modeling import MODELS
    from run_setup import plan_run
    from tasks.pretraining import PretrainingTask, check_phase1
    from tokenizer import load_tokenizer

    options = config.pretraining
    start_config = config.start.of_seed(seed_name)
    start = find_start(
        start_config, runtime.distributed.on_main, partial(check_phase1, start_config)
    )
    choice = choose_model(config.model, start.folder)
    bert_config, tokenizer = choice.config, choice.tokenizer
    dataset = open_dataset(options.input_dir, tokenizer, bert_config, config.loader)
    datasets, eval_dataset = [dataset], None
    if options.eval_dir:
        eval_dataset = open_dataset(
            options.eval_dir, tokenizer, bert_config, config.loader, is_held_out=True
        )
        datasets.append(eval_dataset)
    if eval_dataset is not None and len(eval_dataset) < runtime.distributed.world_size:
        raise UserError(
            f"{options.eval_dir} has fewer samples than there are processes: make a larger "
            f"held-out set"
        )
    runtime.distributed.on_main(lambda: dataset.check_shards(eval_dataset))
    if options.verify_data:
        verify_checksums(datasets, runtime.distributed, "--verify-data")
    data_files = runtime.distributed.on_main(lambda: files_digest(datasets))
    next_sentence = (
        dataset.has_next_sentence and MODELS[type(bert_config)]["pretraining"].next_sentence
    )
    check_casing(datasets, start.folder)
    made_lower_case = bool(dataset.attributes.get("do_lower_case", tokenizer.do_lower_case))
    if made_lower_case != tokenizer.do_lower_case:
        choice = dataclasses.replace(
            choice, tokenizer=load_tokenizer(tokenizer.vocab_file, made_lower_case)
        )
    return plan_run(
        config.with_values(
            trainer={"logs_start": start.weights is not None}, metadata={"data_files": data_files}
        ),
        start,
        choice,
        "pretraining" if next_sentence else "masked_lm",
        PretrainingTask(next_sentence, config.loader.max_seq_length),
        dataset,
        str(Path("phase2" if options.phase2 else "phase1", seed_name)),
        runtime,
        result_files=("scores.json",) if seed_name else (),
        initial_loss=math.log(bert_config.vocab_size) + (math.log(2) if next_sentence else 0),
        eval_dataset=eval_dataset,
    )


def check_casing(datasets: list[PretrainingDataset], model: ModelFolder | None) -> None:
    """Raises UserError unless all shards, and the model folder that the run starts from, have the
    same casing.
    """
    name = "do_lower_case"
    casings = {
        each.folder: bool(each.attributes[name]) for each in datasets if name in each.attributes
    }
    if model is not None and (casing := model.tokenizer_settings[name]) is not None:
        casings[model.path] = casing
    lower, cased = (
        [folder for folder, casing in casings.items() if casing == value] for value in (True, False)
    )
    if lower and cased:
        raise UserError(
            f"{lower[0]} is lower-cased, and {cased[0]} is not: make the samples with one casing, "
            f"the model's"
        )


def keep_results(path: Path, results: dict[str, float], held_out: str | None) -> dict[str, Any]:
    """Writes the results of a seed to `path`, or returns those in it if this start had nothing left
    to train. held_out: the digest of the held-out data, which must be that of the results.
    """
    if "loss" in results or not path.exists():  # killed before it was written
        write_json(path, {"held_out_data": held_out, **results})
        return results
    found = read_json(path, "the results of a seed")
    if found.pop("held_out_data", held_out) != held_out:
        raise UserError(
            f"{path} has the results of other held-out data: give --eval-dir that, or add "
            f"--overwrite"
        )
    return from_json(dict[str, float], found, f"the results of a seed {path}")


def pretrain(config: RunConfig, runtime: Runtime) -> int:
    from data_loading.pretraining_dataset import verify_checksums
    from run_setup import check_seeds, open_report, report_seeds, seed_logs, seeds_of
    from utils.progress import print_line

    runs: list[dict[str, float]] = []
    plans = {name: plan_training(each, runtime, name) for name, each in seeds_of(config).items()}
    check_seeds(plans, runtime)
    for name, plan in plans.items():
        folder = plan.config.trainer.checkpoint_folder
        with seed_logs(config, name, runtime) as seed_runtime:
            open_report(plan.config, folder, seed_runtime)
            trainer = plan.build_trainer(seed_runtime)
            if trainer.state.data_may_differ and not config.pretraining.verify_data:
                datasets = list(filter(None, (plan.dataset, plan.eval_dataset)))
                verify_checksums(
                    datasets, runtime.distributed, "data copied or changed since the checkpoint"
                )
            is_new = trainer.state.step == 0 and plan.start.weights is None
            if config.pretraining.phase2 and is_new and runtime.distributed.is_main:
                print_line(
                    "warning: phase 2 starts from random weights: give --from-phase1-final-params"
                )
            trainer.settings["batch_size_per_gpu"] = config.loader.batch_size
            if trainer.is_evaluation_due:
                trainer.log_evaluation()
            exit_code = trainer.train(plan.make_loader(trainer))
        if exit_code or trainer.state.step < plan.config.trainer.max_steps:
            return exit_code
        if name:
            held_out = plan.eval_dataset and plan.eval_dataset.digest()
            keep = partial(keep_results, folder / "scores.json", trainer.results, held_out)
            runs.append(runtime.distributed.on_main(keep))
    if name:
        report_seeds(runs, f"{folder.parent.name}, {len(runs)} seeds", runtime)
    return 0


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    check_weights(args.from_pretrained_params)
    config = make_run_config(args)
    if config.estimate_memory is not None:
        from data_loading.masking import DEFAULT_RATE, max_masked_at
        from diagnostics.estimates import print_estimate

        loader = config.loader
        masked = max_masked_at(loader.masked_lm_prob or DEFAULT_RATE, loader.max_seq_length)
        config = config.with_values(loader={"max_masked": loader.max_masked or masked})
        return print_estimate("pretraining", config)
    from run_setup import start_runtime

    with start_runtime(config, "pre-training") as runtime:
        return pretrain(config, runtime)


if __name__ == "__main__":
    run_main(main)
