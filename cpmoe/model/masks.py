"""What the layers of a model see, by their kind."""

from __future__ import annotations

from cpmoe.attention.mask import Mask
from cpmoe.config.recipe import ModelConfig


def attention_masks(config: ModelConfig) -> dict[str, Mask]:
    """The mask of each kind in `config.layer_types`, in the order in which the kinds first occur."""
    window = None if config.sliding_window is None else config.sliding_window - 1
    masks = {
        "full_attention": Mask(),
        "sliding_attention": Mask(window=(window, None), num_sinks=config.num_sink_tokens),
    }
    return {kind: masks[kind] for kind in dict.fromkeys(config.layer_types)}
