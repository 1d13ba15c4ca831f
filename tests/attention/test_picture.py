"""The picture shows the mask, each pair in the hop that computes it."""

import numpy as np
import pytest
import torch
from matplotlib import pyplot

from cpmoe.attention.layout import LAYOUTS, token_indices
from cpmoe.attention.mask import Mask
from cpmoe.attention.picture import draw, hop_matrix
from cpmoe.attention.plan import build_plan
from tests.attention.dense import dense_mask


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_pair_has_the_colour_of_its_hop(layout):
    documents_BS = torch.cat((torch.zeros(21), torch.ones(40), -torch.ones(3)))[None].long()
    mask = Mask(window=(9, None), num_sinks=2)
    plans = [build_plan(documents_BS, 4, rank, layout, mask=mask) for rank in range(4)]
    owner_S = np.empty(64, dtype=np.int64)
    for rank, own in enumerate(plans[0].segments):
        owner_S[token_indices(own)] = rank
    hop_SS = (owner_S[:, None] - owner_S) % 4
    expected = np.where(dense_mask(documents_BS, mask)[0].numpy(), hop_SS, -1)
    assert np.array_equal(hop_matrix(plans), expected)


def test_the_file_is_a_picture(tmp_path):
    plans = [build_plan(torch.zeros(1, 4096, dtype=torch.long), 8, rank) for rank in range(8)]
    path = draw(plans, tmp_path / "plan.png", "zigzag, one document")
    image = pyplot.imread(path)
    assert image.shape[0] > 400 and image.std() > 0.1
