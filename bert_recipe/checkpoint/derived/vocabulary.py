"""A model with another vocabulary.

A token that the old vocabulary has keeps its rows of the word embeddings and of the decoder's bias.
Another token starts from the mean of the rows of its pieces by the old tokenizer.

Legend: V tokens of the new vocabulary, E hidden size.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from bert_recipe.checkpoint.folder import CONFIG_FILE, MODEL_FILE, OPTIMIZER_SUFFIX, PROGRESS_SUFFIX
from bert_recipe.checkpoint.model_folder import ModelFolder
from bert_recipe.checkpoint.sentence_folders import sentence_files
from bert_recipe.checkpoint.weights import canonical_names, checkpoint_shapes
from bert_recipe.model.encoders.base import PreTrainedModel
from bert_recipe.model.encoders.config import ModelConfig
from bert_recipe.model.encoders.modules import VocabularyEmbedding
from bert_recipe.model.encoders.registry import make_model
from bert_recipe.tokenization.files import trained_length
from bert_recipe.tokenization.tokenizer import Tokenizer, model_files
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.files import write_atomically
from bert_recipe.utils.json_files import write_json

POSITIONS = "position_embeddings.weight"


def model_inputs(folder: Path) -> list[str]:
    """The files of a model folder that decide the result."""
    files = {path for path in folder.iterdir() if path.is_file()}.union(sentence_files(folder))
    state = (OPTIMIZER_SUFFIX, PROGRESS_SUFFIX)
    return [str(path) for path in sorted(files) if not path.name.endswith(state)]


def row_sources(old: Tokenizer, new: Tokenizer) -> tuple[list[list[int]], int]:
    """For each new id the old ids whose rows it starts from: that of the same token, those of its
    pieces, or none; and the number of those that are the same.
    """
    old_texts, new_texts = old.texts(), new.texts()
    ids_by_text = {
        text: token_id for token_id, text in enumerate(old_texts) if text and "\ufffd" not in text
    }
    sources: list[list[int]] = [[] for _ in new_texts]
    kept = {new.vocab[token] for token in new.special_tokens.values()}
    for token, token_id in new.vocab.items():
        text = new_texts[token_id]
        same = old.vocab.get(token)
        if same is None or old_texts[same] != text:
            same = ids_by_text.get(text)  # the other kind of tokenizer spells it in another way
        if same is None:
            sources[token_id] = old.encode(text)
        else:
            sources[token_id] = [same]
            kept.add(token_id)
    for role, token in new.special_tokens.items():
        sources[new.vocab[token]] = [old.vocab[old.special_tokens[role]]]
    return sources, len(kept)


def carry_rows(rows: Tensor, sources: Sequence[Sequence[int]], std: float) -> Tensor:
    """A new row for each of `sources`: the mean of the rows of `rows` with these numbers, or random
    values of the standard deviation `std` if there are none.
    """
    generator = torch.Generator().manual_seed(0)
    new_rows = torch.empty(len(sources), *rows.shape[1:]).normal_(std=std, generator=generator)
    has_source = torch.tensor([len(ids) > 0 for ids in sources])
    all_ids = torch.tensor([token_id for ids in sources for token_id in ids])
    starts = torch.tensor([0, *map(len, sources)]).cumsum(0)[:-1]  # of each one's ids in `all_ids`
    means = F.embedding_bag(all_ids, rows.float().reshape(len(rows), -1), starts, mode="mean")
    new_rows[has_source] = means.reshape(new_rows.shape)[has_source]
    return new_rows.to(rows.dtype)


def write_with_vocabulary(
    folder: Path, source: ModelFolder, new: Tokenizer, *, extends: bool
) -> int:
    """Writes the model in `source` with the tokenizer `new` to `folder`. Returns the number of
    tokens that keep their rows.

    extends: `new` is the old tokenizer with further tokens, so that rows beyond its vocabulary
    stay.
    """
    old = source.config.with_vocabulary(source.tokenizer)
    sources, kept = row_sources(source.tokenizer, new)
    if extends:
        sources += [[token_id] for token_id in range(len(sources), old.vocab_size)]
    config = dataclasses.replace(old, vocab_size=len(sources)).with_padding(new.pad_token_id)
    config = config.with_vocabulary(new)
    folder.mkdir(exist_ok=True)
    tensors = carried_tensors(source, old, config, sources)
    save_file(tensors, folder / MODEL_FILE, metadata={"format": "pt"})
    (folder / MODEL_FILE).chmod(folder.stat().st_mode & 0o666)  # safetensors' files are private
    architectures = source.config_values.get("architectures")
    write_json(folder / CONFIG_FILE, {"architectures": architectures, **config.to_dict()})
    length = trained_length(source.tokenizer_settings, config.max_length)
    files = model_files(new, length, config.needs_tokenizer_json, config.takes_token_types)
    for path in sentence_files(source.path):
        files[str(path.relative_to(source.path))] = path.read_bytes()
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / name, content)
    return kept


def carried_tensors(
    source: ModelFolder,
    old: ModelConfig,
    new: ModelConfig,
    sources: Sequence[Sequence[int]],
) -> dict[str, Tensor]:
    """The tensors of `source` with rows for the vocabulary of `new`; sources: see `carry_rows`."""
    with torch.device("meta"):
        model = make_model("masked_lm", old)
    shapes = checkpoint_shapes(model)
    vocabulary = vocabulary_tensors(model, shapes)
    first_position = old.max_position_embeddings - new.max_position_embeddings
    tensors = {}
    for name, tensor in canonical_names(source.tensors, model).items():
        if name in shapes and tensor.shape != shapes[name]:
            raise UserError(
                f"{source}: {name} is {list(tensor.shape)}, not {list(shapes[name])}: use a whole "
                f"model"
            )
        values = tensor.read()
        if name.endswith(POSITIONS):
            values = values[first_position:]
        if name in vocabulary:
            std = new.initializer_range if values.dim() > 1 else 0.0
            values = carry_rows(values, sources, std)
        tensors[name] = values.contiguous()
    return tensors


def vocabulary_tensors(model: PreTrainedModel, shapes: dict[str, tuple[int, ...]]) -> set[str]:
    """The names of the tensors with one row per token: word embeddings and the decoder's bias."""
    embeddings = {
        f"{name}.weight"
        for name, part in model.named_modules()
        if isinstance(part, VocabularyEmbedding)
    }
    return embeddings | {
        name for name, shape in shapes.items() if shape == (model.config.vocab_size,)
    }
