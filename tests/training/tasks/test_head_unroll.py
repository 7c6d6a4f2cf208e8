"""What heads are trained on is what they draft: guesses along a text are those of the drafting code, root by root."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.engine.checkpoints.checkpoint import read_config
from outrider.engine.heads.checkpoint_io import Network, make_network
from outrider.engine.heads.config import KINDS, HeadsConfig, Kind, make_heads_config
from outrider.engine.heads.eagle import Eagle, Eagle3
from outrider.engine.heads.eagle_drafts import EagleDrafts
from outrider.engine.heads.embeddings import TargetEmbeddings, read_target_embeddings
from outrider.engine.heads.last_row import MedusaDrafts, MlpDrafts
from outrider.engine.heads.medusa import Medusa
from outrider.engine.heads.speculator import HeadNodes, HeadRoot, KeptFeatures, Speculator
from outrider.training.tasks.head_unroll import UnrolledHeads

TARGET = Path("models/target")
TEXT, DEPTH = 12, 3


def drafts(network: Network, shape: HeadsConfig, ends: TargetEmbeddings) -> Speculator:
    if isinstance(network, Eagle | Eagle3):
        return EagleDrafts(network, shape, ends, slots=1, context=64)
    return MedusaDrafts(network, ends) if isinstance(network, Medusa) else MlpDrafts(network, ends)


@pytest.mark.parametrize("kind", KINDS)
def test_guesses_along_a_text_equal_the_drafts_of_the_heads(kind: Kind) -> None:
    torch.manual_seed(3)
    shape = make_heads_config(kind, read_config(TARGET), depth=DEPTH)
    network, ends = make_network(shape), read_target_embeddings(TARGET, torch.float32)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    tokens = torch.randint(0, shape.vocabulary, (2, TEXT))
    features = torch.randn(2, TEXT, shape.width * shape.features.parts)
    with torch.no_grad():
        guesses = UnrolledHeads(network, shape, ends)(tokens, features)
    assert [guess.logits.shape for guess in guesses] == [(2, TEXT - 1 - d, shape.vocabulary) for d in range(DEPTH)]
    for text in range(2):
        for root in range(TEXT - DEPTH):
            speculator = drafts(network, shape, ends)
            speculator.open_slot(0, None, 0)
            whole = tokens[text, : root + 2].tolist()
            speculator.add_features(features[text], [KeptFeatures(0, 0, range(root + 1), whole)])
            (row,), _ = speculator.begin([HeadRoot(0, whole)])
            for depth in range(DEPTH):
                assert row is not None
                np.testing.assert_allclose(guesses[depth].logits[text, root], row.logits, atol=2e-4)
                if depth + 1 < DEPTH:
                    (row,) = speculator.expand([HeadNodes(depth, int(tokens[text, root + 2 + depth]))])
