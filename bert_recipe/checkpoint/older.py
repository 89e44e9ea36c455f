"""Folders of runs that a version before 1.0.0 has begun. The record of such a run is in OLD_RECORD,
its scores in OLD_EVALUATIONS, and its best model is a copy. Checkpoints of FORMAT_VERSION have all.
"""

from pathlib import Path

from bert_recipe.checkpoint.folder import (
    BEST_FOLDER,
    has_weights,
    model_digest,
)
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.json_files import JsonObject, list_of, read_json

# In the folder of steps.
OLD_RECORD, OLD_EVALUATIONS = "run.json", "evaluations.json"
OLD_FILES = (OLD_RECORD, OLD_EVALUATIONS)
# What is read of the progress file of a checkpoint.
OLD_PROGRESS = {"step": int, "seed": int, "data": str | None, "evaluated_step": int | None}
NO_SCORES = ("model", "development_data")  # of an evaluation


def old_values(step: Path, progress: JsonObject) -> JsonObject:
    """The identity and the evaluations of the checkpoint `step`, whose progress file has
    `progress`. Raises UserError if an evaluation that was made before it is not there.
    """
    identity = {"seed": progress["seed"], "data": progress["data"]}
    record = step.parent / OLD_RECORD
    if record.is_file():
        identity = read_json(record, "the record of a run", {"identity": JsonObject})["identity"]
    evaluations = evaluations_until(progress["step"], step.parent)
    last = progress["evaluated_step"]
    if last is not None and last not in [evaluation["step"] for evaluation in evaluations]:
        raise UserError(
            f"{step.parent / OLD_EVALUATIONS} lacks the evaluation of step {last}, which was made "
            f"before step {step.name} was saved: restore it and {BEST_FOLDER}/, or start again "
            "with --overwrite"
        )
    # An evaluation names its model if it was the best one until then.
    best_steps = [evaluation["step"] for evaluation in evaluations if evaluation["model"]]
    scores = [
        {name: value for name, value in evaluation.items() if name not in NO_SCORES}
        for evaluation in evaluations
    ]
    return {
        "identity": identity,
        "evaluations": scores,
        "best_step": best_steps[-1] if best_steps else None,
    }


def evaluations_until(step: int, parent: Path) -> list[JsonObject]:
    path = parent / OLD_EVALUATIONS
    if not path.is_file():
        return []
    evaluations = read_json(path, "the evaluations", list_of({"step": int, "model": str | None}))
    return [evaluation for evaluation in evaluations if evaluation["step"] <= step]


def old_best(parent: Path, step: int) -> Path | None:
    """The copy of the best model in the folder of steps `parent`, if it is that of the step."""
    best = parent / BEST_FOLDER
    if not has_weights(best):
        return None
    models = {
        evaluation["model"]
        for evaluation in evaluations_until(step, parent)
        if evaluation["step"] == step
    }
    return best if model_digest(best) in models else None
