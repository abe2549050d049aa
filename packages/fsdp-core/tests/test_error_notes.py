"""What is written under errors of torch that are about shards, where a library's function has led to them."""

from __future__ import annotations

import pytest

from fsdp_core.lightning.outside_steps.error_notes import explain_shards


def resize_token_embeddings() -> None:
    """As that of transformers fails over DTensors, at the first operation on the old weights."""
    raise NotImplementedError("Operator aten.linalg_cholesky_ex.default does not have a sharding strategy registered.")


def writes_back() -> None:
    """As FSDP fails in the next forward pass."""
    raise RuntimeError(
        "Cannot writeback when the parameter shape changes\nExpects torch.Size([8]) but got torch.Size([9])"
    )


@pytest.mark.parametrize("fail", [resize_token_embeddings, writes_back])
def test_a_parameter_that_is_resized_after_sharding_is_to_be_resized_before(fail: object) -> None:
    assert callable(fail)
    with pytest.raises((NotImplementedError, RuntimeError)) as raised:
        fail()
    explain_shards(raised.value)
    (note,) = raised.value.__notes__
    assert "resize_token_embeddings() of transformers" in note
    assert "Do it before sharding: where the model is made, in __init__ or configure_model" in note
