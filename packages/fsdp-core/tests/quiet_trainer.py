"""A plain Trainer that shows and logs nothing."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl


def quiet_trainer(**options: Any) -> pl.Trainer:
    """On one CPU."""
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(**{"accelerator": "cpu", "devices": 1, **quiet, **options})
