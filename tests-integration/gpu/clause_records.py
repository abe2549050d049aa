"""A pytest plugin: runs chosen tests in their order, and records each as it ends.

So a session that is ended early leaves what it has found.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from records import Records

#: The environment variables that name the file of records, the group of tests that this session runs, the node ids of
#: its tests as a JSON list, and how many of them run; that all exist is checked for those that don't, too.
FILE, GROUP, TESTS, AT_MOST = "FSDP_GPU_RECORDS", "FSDP_GPU_GROUP", "FSDP_GPU_TESTS", "FSDP_GPU_AT_MOST"


def group_records() -> Records:
    """The records of the part that has started this session."""
    return Records(Path(os.environ[FILE]), "several_ranks")


def check_name(node_id: str) -> str:
    """What a test is called in records."""
    return f"{os.environ[GROUP]}: {node_id.split('::', 1)[1]}"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose and order the tests, and record those that there are not."""
    wanted: list[str] = json.loads(os.environ[TESTS])
    by_name = {item.nodeid: item for item in items}
    if not items:
        group_records().outcome(
            f"{os.environ[GROUP]}: tests are collected", "failed", reason="there was none: see the log"
        )
    for node_id in wanted:
        if items and node_id not in by_name:
            group_records().outcome(check_name(node_id), "failed", reason="there is no such test: mend the list")
    chosen = [by_name[node_id] for node_id in wanted if node_id in by_name][: int(os.environ[AT_MOST])]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record a test when its call has ended, or what failed before or after it."""
    if report.when != "call" and report.outcome == "passed":
        return
    name = check_name(report.nodeid)
    if report.skipped:
        group_records().outcome(name, "left out", reason=str(report.longrepr))
    elif report.passed:
        group_records().outcome(name, "passed", seconds=report.duration)
    else:
        group_records().outcome(name, "failed", seconds=report.duration, traceback=report.longreprtext)
