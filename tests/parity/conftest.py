"""The edge checkpoint and its catalogs, made once for all parity tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashrec_harness.parity.edge_catalogs import edge_ground
from flashrec_harness.parity.ground import Ground
from flashrec_harness.references.hugging_face import TransformersReference
from flashrec_harness.references.logits import Float64Logits
from flashrec_harness.references.oracle import Oracle


@pytest.fixture(scope="session")
def edge(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    return edge_ground(Path(tmp_path_factory.mktemp("edge")), seed=0)


@pytest.fixture(scope="session")
def edge_oracle(edge: Ground) -> Oracle:
    return Oracle(Float64Logits(edge.model_path), edge.grammar_of)


@pytest.fixture(scope="session")
def edge_transformers(edge: Ground) -> TransformersReference:
    return TransformersReference(edge.model_path, edge.grammar_of)
