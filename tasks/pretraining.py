"""BERT's pre-training: masked language modelling and next-sentence prediction (Devlin et al., 2018,
section 3.1).
"""

from torch import Tensor, nn

from tasks import SeparableTask
from token_stream import MicroBatch, TokenStream


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
