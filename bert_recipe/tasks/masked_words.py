"""The words that fit [MASK] in texts.

Legend: M masks, V vocabulary, K results.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from bert_recipe.model.token_stream import TokenStream
from bert_recipe.tasks.predicted_rows import PredictedRows, Prediction
from bert_recipe.tasks.text_sequences import SequenceDataset, encode
from bert_recipe.tokenization.files import MASK
from bert_recipe.utils.errors import UserError

if TYPE_CHECKING:
    from bert_recipe.tokenization.tokenizer import Tokenizer

Words = list[tuple[float, str]]  # probabilities and words, best first


def masked_rows(
    tokenizer: "Tokenizer", places: Sequence[str], texts: Sequence[str]
) -> PredictedRows:
    """Texts whose masks are to be filled, by what `best_words` finds. places: of texts, in errors.
    Raises UserError for a text without a mask that is not empty.
    """
    mask = re.compile("|".join(map(re.escape, {MASK, tokenizer.special_tokens["mask_token"]})))
    parts_of_texts = [mask.split(text) for text in texts]
    # A token may include the space before it, so the space before a mask belongs to it.
    all_parts = [part.rstrip() for parts in parts_of_texts for part in parts]
    ids_of_all_parts, _ = encode(tokenizer, all_parts, "texts")
    remaining = iter(ids_of_all_parts)
    sequences = []
    for place, parts in zip(places, parts_of_texts, strict=True):
        if len(parts) == 1 and parts[0]:  # an empty row of a table stays empty
            raise UserError(f"{place}: the text has no {MASK}: write it where a word is missing")
        ids = [*next(remaining)]
        for _ in parts[1:]:
            ids += [tokenizer.mask_token_id, *next(remaining)]
        sequences.append([np.array(ids)])
    dataset = SequenceDataset(tokenizer, sequences, {})
    return PredictedRows(dataset, partial(filled_texts, parts_of_texts))


@torch.inference_mode()
def best_words(
    model: nn.Module,
    tokenizer: "Tokenizer",
    dataset: SequenceDataset,
    batch_size: int,
    num_results: int,
    autocast: Callable[[], AbstractContextManager[object]],
) -> list[list[Words]]:
    """The best words of each mask of each sequence. autocast: the context of a forward pass."""
    model.eval()
    device = next(model.parameters()).device
    by_length = np.argsort(-dataset.lengths, kind="stable")
    words_of: dict[int, list[Words]] = {index: [] for index in range(len(dataset))}
    for batch in np.split(by_length, range(batch_size, len(dataset), batch_size)):
        stream = {
            name: torch.from_numpy(array).to(device)
            for name, array in dataset.stream(batch).items()
        }
        positions_M = (stream["input_ids"] == tokenizer.mask_token_id).nonzero().squeeze(1)
        tokens = TokenStream.from_batch(stream, int(dataset.lengths[batch].max()))
        with autocast():
            output = model(tokens, mlm_positions=positions_M)
        logits_MV = output.prediction_logits[:, : tokenizer.vocab_size]
        if not logits_MV.isfinite().all():
            raise UserError(
                "the model's logits are not finite: its weights are damaged, use another checkpoint"
            )
        probs_MK, ids_MK = logits_MV.float().softmax(1).topk(min(num_results, logits_MV.shape[1]))
        row_M = torch.bucketize(positions_M, stream["cu_seqlens"], right=True) - 1
        for row, probs_K, ids_K in zip(
            row_M.tolist(), probs_MK.tolist(), ids_MK.tolist(), strict=True
        ):
            words_K = map(tokenizer.text_of, ids_K)
            words_of[int(batch[row])].append(list(zip(probs_K, words_K, strict=True)))
    return list(words_of.values())


def filled_texts(
    parts_of_texts: Sequence[Sequence[str]], words_of_texts: Sequence[Sequence[Words]]
) -> list[Prediction]:
    """The texts with the best word in each mask, and all words with their probabilities. parts:
    before the first mask, between masks, and after the last one.
    """
    predictions = []
    for parts, words_of_masks in zip(parts_of_texts, words_of_texts, strict=True):
        filled = parts[0]
        for words, part in zip(words_of_masks, parts[1:], strict=True):
            _, word = words[0]
            if word.startswith(" "):
                filled = (filled.rstrip() + word).lstrip()
            else:
                filled += word
            filled += part
        shares: list[Any] = [{word: share for share, word in words} for words in words_of_masks]
        predictions.append(Prediction({"filled": filled, "words": shares}, words_of_masks))
    return predictions
