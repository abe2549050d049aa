"""A full disk leaves the checkpoint that was there."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_core.testing.launching.forking import start_script
from fsdp_core.testing.launching.processes import fresh_environment
from full_disk import NO_DISK


def test_a_file_that_has_no_room_leaves_the_one_before(tmp_path: Path) -> None:
    """Lightning copies what it has written elsewhere onto the target, of which half would be there then."""
    disk, output = tmp_path / "disk", tmp_path / "told.txt"
    disk.mkdir()
    process = start_script(
        Path(__file__).with_name("full_disk.py"),
        str(disk),
        folder=tmp_path,
        output=output,
        environment=fresh_environment(),
    )
    process.join(timeout=90)
    told = output.read_text()
    if process.exitcode == NO_DISK:
        pytest.skip("only root can mount a file system, here of four megabytes")
    assert process.exitcode == 0, told
    assert f"refused: writing {disk / 'full.ckpt'} failed: OSError: [Errno 28] No space left on device" in told
    assert "There is no space left: free some, or use another path." in told
    assert "step 1 ['full.ckpt']" in told
