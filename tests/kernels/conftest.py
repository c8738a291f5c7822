"""Tests marked `kernels` run Triton's interpreter, which is chosen when triton is imported: a process of their own."""

import os

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        return
    skip = pytest.mark.skip(reason="kernels run here only in Triton's interpreter: set TRITON_INTERPRET=1")
    for item in items:
        if item.get_closest_marker("kernels"):
            item.add_marker(skip)
