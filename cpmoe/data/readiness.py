"""Whether a recipe's data is there, and whether the model fits its vocabulary."""

from __future__ import annotations

from pathlib import Path

from cpmoe.config.errors import ConfigError, Problem
from cpmoe.config.recipe import DataConfig, ModelConfig, Recipe
from cpmoe.data.documents import DocumentSource
from cpmoe.data.prepare import find_prepared
from cpmoe.data.tokenizer import bpe_vocab_size, load_tokenizer


def fit_vocabulary(model: ModelConfig, vocab_size: int, tokenizer: str) -> ModelConfig:
    """`model` with the `vocab_size` of its data filled in where it is auto; `tokenizer` says whose it is.

    Raises ConfigError where the model has fewer rows than the data has ids.
    """
    if model.vocab_size == 0:
        return model.model_copy(update={"vocab_size": vocab_size})
    if model.vocab_size < vocab_size:
        constraint = f"must be at least the {vocab_size} ids of {tokenizer}"
        legal = f"{vocab_size} or more, or auto"
        raise ConfigError([Problem("model.vocab_size", constraint, model.vocab_size, legal)])
    return model


def data_report(recipe: Recipe) -> tuple[str, list[str]]:
    """What is known of the recipe's data, without preparing any: its state, and what is missing for a start.

    Missing is what another machine may have, such as a local source. Raises ValueError where the data that
    is there was prepared in another way, or has more ids than the model has rows.
    """
    data = recipe.data
    prepared = find_prepared(data)
    if prepared is not None:
        meta = prepared.meta
        fit_vocabulary(recipe.model, meta.vocab_size, f"the tokenizer in {data.path}")
        counts = (
            f"{meta.documents[split]:,} documents with {meta.tokens[split]:,} tokens ({split})"
            for split in meta.documents
        )
        return f"{data.path} is prepared: vocabulary {meta.vocab_size:,}, {', '.join(counts)}", []
    missing = []
    try:
        DocumentSource(data)
    except ValueError as error:
        missing.append(str(error))
    vocab_size = _vocabulary(data)
    if vocab_size is not None:
        fit_vocabulary(recipe.model, vocab_size, f"data.tokenizer {data.tokenizer!r}")
    elif data.tokenizer.endswith(".json"):
        missing.append(f"data.tokenizer = {data.tokenizer!r}: no such file here")
    return f"{data.path} is not prepared yet: `python -m cpmoe prepare` does it, or the first start", missing


def _vocabulary(data: DataConfig) -> int | None:
    """The number of ids, where it is known before the data is prepared (a BPE may end with fewer)."""
    if bpe_vocab_size(data.tokenizer) is not None:
        return None
    if data.tokenizer != "bytes" and not Path(data.tokenizer).expanduser().is_file():
        return None
    return load_tokenizer(data.tokenizer).vocab_size
