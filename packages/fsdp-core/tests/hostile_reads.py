"""Opens folders in every way there is, and tells what was opened, imported, run or changed meanwhile; a script."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsdp_core
from fsdp_core.checkpoint import fill_all, is_checkpoint, load, read_manifest, verify
from fsdp_core.errors import CheckpointError
from nests import read_all

#: Events of CPython that touch files by a path, the first argument.
PATHS = {"open", "os.listdir", "os.scandir", "os.truncate", "os.mkdir", "os.remove", "os.rmdir", "os.rename", "os.link",
         "os.symlink", "os.chmod", "os.utime"}  # fmt: skip
#: Events that a load has no reason for; of families, the first part.
FORBIDDEN = {"import", "exec", "compile", "pickle", "marshal", "subprocess", "socket", "code", "ctypes.dlopen"}
FORBIDDEN |= {"os.system", "os.exec", "os.spawn", "os.posix_spawn", "os.fork", "os.forkpty", "os.kill", "os.putenv"}


READS: dict[str, Callable[[str], object]] = {
    "load": load,
    "load without verification": lambda path: read_all(load(path, verify=False)),
    "load_state_dict": fsdp_core.load_state_dict,
    "verify": verify,
    "read_manifest": read_manifest,
    "is_checkpoint": is_checkpoint,
}


def main(good: str, paths: list[str]) -> None:
    """Print, for each path, how each way of reading it ended and what happened meanwhile; and a control."""
    for path in (good, str(Path(good).parent / "nothing there")):  # what is imported late has been imported then
        for read in READS.values():
            with contextlib.suppress(Exception):
                read(path)
    nest = load(good)
    fill_all({"w": nest["model"]["w"].full()}, {"w": nest["model"]["w"]})
    events: list[tuple[str, str]] = []

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in PATHS or event in FORBIDDEN or event.partition(".")[0] in FORBIDDEN:
            events.append((event, str(arguments[0]) if arguments else ""))

    sys.addaudithook(hook)
    told: dict[str, Any] = {}
    for path in paths:
        ended: dict[str, str] = {}
        events.clear()
        began = time.process_time()
        for name, read in READS.items():
            try:
                read(path)
                ended[name] = "read"
            except CheckpointError as error:
                ended[name] = f"refused: {error}"
            except BaseException as error:
                ended[name] = f"{type(error).__name__}: {error}"
        told[path] = {"ended": ended, "events": list(events), "seconds": time.process_time() - began}
    events.clear()
    with contextlib.suppress(ImportError), open(os.devnull):
        __import__("there_is_no_such_module")
    told["control"] = {"events": list(events)}
    print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
