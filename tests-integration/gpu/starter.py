"""Runs a part, whose path comes first among the words, without looking for garbage among what it imports.

That takes a quarter of the time of its imports. :func:`card.arguments` ends it.
"""

from __future__ import annotations

import gc
import os
import runpy
import sys

if __name__ == "__main__":
    gc.disable()
    sys.argv[:] = sys.argv[1:]
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")
