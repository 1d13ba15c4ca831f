"""A plan drawn: the attention matrix by hop, and what each rank computes and sends in each hop.

Shape letters: Q drawn queries, K drawn keys, N ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cpmoe.attention.geometry import LocalCounter
from cpmoe.attention.layout import token_indices
from cpmoe.attention.plan import AttentionPlan

UNSEEN = -1
RESOLUTION = 512


def hop_matrix(plans: Sequence[AttentionPlan], row: int = 0, resolution: int = RESOLUTION) -> np.ndarray:
    """In which hop each of some evenly spaced queries meets such keys: int64 [Q, K], -1 where it sees none.

    `plans` are those of every rank of a ring, in order; `row` is the batch row. Hops are named by distance.
    """
    seq_len = plans[0].cp_size * plans[0].num_tokens
    drawn = np.unique(np.linspace(0, seq_len - 1, min(resolution, seq_len)).astype(np.int64))
    matrix_QK = np.full((len(drawn), len(drawn)), UNSEEN)
    owned = [np.isin(drawn, token_indices(own)) for own in plans[0].segments]
    counters = [LocalCounter(own) for own in plans[0].segments]
    for rank, plan in enumerate(plans):
        query_Q = counters[rank](drawn[owned[rank]])
        for hop in plan.hops:
            reach = hop.reach.rows_C[hop.reach.place_B[row]]
            key_K = counters[hop.source](drawn[owned[hop.source]])
            start, stop, sink_start, sink_stop = (x[query_Q, None] for x in reach[1:])
            seen_QK = ((start <= key_K) & (key_K < stop)) | ((sink_start <= key_K) & (key_K < sink_stop))
            block = np.ix_(owned[rank], owned[hop.source])
            matrix_QK[block] = np.where(seen_QK, hop.distance, UNSEEN)
    return matrix_QK


def draw(plans: Sequence[AttentionPlan], path: Path, title: str = "", row: int = 0) -> Path:
    """Writes a picture of the plans of every rank of a ring, in order; the suffix of `path` says which kind.

    Left: the attention matrix of batch row `row`, each pair in the colour of the hop that computes it. Right:
    the share of each rank and hop of the ring's mean work per rank, with the KV tokens received for it.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    hops = [hop.distance for hop in plans[0].hops]
    mean_pairs = sum(plans[0].pairs_N) / len(plans) or 1
    share_NH = np.array([[hop.reach.num_pairs / mean_pairs for hop in plan.hops] for plan in plans])
    received = [["own", *(f"{hop.fetch.receive.num_tokens:,}" for hop in plan.remote)] for plan in plans]

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 5.5), dpi=120)
    matrix_QK = hop_matrix(plans, row)
    colours = pyplot.get_cmap("viridis", max(plans[0].cp_size, 2)).with_extremes(bad="white")
    seq_len = plans[0].cp_size * plans[0].num_tokens
    image = left.imshow(
        np.ma.masked_equal(matrix_QK, UNSEEN),
        cmap=colours,
        vmin=-0.5,
        vmax=max(plans[0].cp_size, 2) - 0.5,
        interpolation="nearest",
        extent=(0, seq_len, seq_len, 0),
    )
    bar = figure.colorbar(image, ax=left, label="ring distance of the hop")
    if len(hops) <= 16:
        bar.set_ticks(hops)
    left.set(xlabel="key", ylabel="query", title=title)

    right.imshow(share_NH, cmap="Blues", vmin=0, vmax=max(share_NH.max(), 1e-9), aspect="auto")
    right.set(
        xlabel="ring distance of the hop",
        ylabel="rank",
        xticks=range(len(hops)),
        xticklabels=hops,
        yticks=range(len(plans)),
        title=f"work of a rank / mean, and KV tokens received; max/mean {plans[0].imbalance:.2f}",
    )
    if share_NH.size <= 128:
        for (rank, hop), share in np.ndenumerate(share_NH):
            ink = "white" if share > share_NH.max() / 2 else "black"
            text = f"{share:.2f}\n{received[rank][hop]}"
            right.text(hop, rank, text, ha="center", va="center", fontsize=7, color=ink)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    return path
