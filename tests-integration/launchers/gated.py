"""Runs the example, and lets it wait before a step until a file is there, or SIGTERM has come.

``GATES=2:5,1:8 GATES_IN=/folder`` waits on two ranks before step 5 for ``/folder/2-5``, and on one before step 8.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "docs/examples"

told: list[int] = []


def main() -> None:
    sys.path.insert(0, str(EXAMPLES))
    import many_machines  # type: ignore[import-not-found]

    signal.signal(signal.SIGTERM, lambda signum, frame: told.append(signum))  # the strategy calls it too
    gates = {tuple(map(int, one.split(":"))) for one in os.environ["GATES"].split(",")}
    training_step = many_machines.Net.training_step

    def gated(self: Any, batch: Any, batch_idx: int) -> Any:
        gate = self.trainer.world_size, self.global_step
        file = Path(os.environ["GATES_IN"]) / "{}-{}".format(*gate)
        if gate in gates and not file.exists():
            print(f"waits at {gate[0]}:{gate[1]}", flush=True)
            while not file.exists() and not told:
                time.sleep(0.02)
        return training_step(self, batch, batch_idx)

    many_machines.Net.training_step = gated
    many_machines.main()


if __name__ == "__main__":
    main()
