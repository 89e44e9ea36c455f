"""BERT's pre-training: masked language modelling and next-sentence prediction (Devlin et al., 2018,
section 3.1).
"""

from torch import Tensor, nn

from checkpoint.folder import PROGRESS_SUFFIX, verify_checkpoint
from checkpoint.model_folder import ModelFolder
from checkpoint.start import Progress
from run_config import StartConfig
from tasks import SeparableTask
from token_stream import MicroBatch, TokenStream
from utils.errors import UserError
from utils.files import read_json


class PretrainingTask(SeparableTask):
    """Both losses and their metrics. `next_sentence`: the data has sentence pairs."""

    def __init__(self, next_sentence: bool, max_seq_length: int):
        self.next_sentence = next_sentence
        self.max_seq_length = self.max_sample_length = max_seq_length

    def sums(self, model: nn.Module, micro_batch: MicroBatch) -> dict[str, Tensor]:
        stream = TokenStream.from_batch(micro_batch, self.max_seq_length)
        labels = micro_batch["mlm_labels"], micro_batch["nsp_labels"]
        return model(stream, mlm_positions=micro_batch["mlm_positions"], labels=labels)._asdict()

    def loss(self, sums: dict[str, Tensor], num_sequences: float, num_labelled: float) -> Tensor:
        # Without masked tokens, only the next-sentence loss is used.
        return sums["mlm_loss"] / max(num_labelled, 1) + sums["nsp_loss"] / num_sequences

    def metrics(
        self, sums: dict[str, float], num_sequences: float, num_labelled: float
    ) -> dict[str, float]:
        num_labelled = max(num_labelled, 1)
        mlm_loss, nsp_loss = sums["mlm_loss"] / num_labelled, sums["nsp_loss"] / num_sequences
        metrics = {
            "loss": mlm_loss + nsp_loss,
            "mlm_loss": mlm_loss,
            "mlm_accuracy": sums["mlm_correct"] / num_labelled,
        }
        if self.next_sentence:
            metrics |= {"nsp_loss": nsp_loss, "nsp_accuracy": sums["nsp_correct"] / num_sequences}
        return metrics


def check_phase1(config: StartConfig, weights: ModelFolder) -> None:
    """Raises UserError if phase 2 would start from `weights` of an unfinished phase 1, or with
    --lr-rewarmup from a folder that is no checkpoint.
    """
    if config.from_phase1_final_params is None:
        return
    # Model folders of other programs have no progress.
    for path in weights.path.glob(f"*{PROGRESS_SUFFIX}"):
        progress = read_json(path, "the progress of a run", Progress)
        last = progress.arguments.get("max_steps")
        if isinstance(last, int) and progress.step < last:
            raise UserError(
                f"phase 1 is unfinished: {weights} is step {progress.step} of {last}: rerun phase "
                f"1 to its end, or start from it as it is with --from-pretrained-params"
            )
    if config.lr_rewarmup:
        verify_checkpoint(weights.path)
