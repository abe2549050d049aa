"""Every model on every mesh, of which test_real_models.py runs a part.

``nox -s integration -- tests-integration/slow_real_models.py`` runs it.
"""

from __future__ import annotations

import pytest

from fsdp_core.testing import RankPool
from real_models import MESHES, MODELS
from test_real_models import assert_equals_plain


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", [*MODELS, "llama lora"])
def test_training_equals_one_process(transformers_ranks: RankPool, name: str, mesh: str) -> None:
    assert_equals_plain(transformers_ranks, mesh, [name])
