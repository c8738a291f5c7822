"""A pytest plugin under which timm lists our models and no others.

To timm's filters an InLine model is what it is made of: those that name deit take inline_deit too.
"""

from fnmatch import fnmatch

import pytest
import timm

import softless.timm  # noqa: F401, registers our models
from softless import list_models


def ours(
    filter: str | list[str] = "",  # noqa: A002, timm's name
    module: str | list[str] = "",
    pretrained: bool = False,
    exclude_filters: str | list[str] = "",
    **_: object,
) -> list[str]:
    """timm.list_models, of our names; they all have forward_intermediates, which is what timm asks of a module."""
    if pretrained:
        return []
    return [
        name for name in list_models() if (not filter or matches(name, filter)) and not matches(name, exclude_filters)
    ]


def matches(name: str, filters: str | list[str]) -> bool:
    patterns = [filters] if isinstance(filters, str) else filters
    return any(fnmatch(name.removeprefix("inline_"), pattern) for pattern in patterns if pattern)


timm.list_models, timm.list_pretrained = ours, lambda *_, **__: []


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    names = set(list_models())
    kept = [item for item in items if hasattr(item, "callspec") and item.callspec.params.get("model_name") in names]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    for item in kept:
        if "torchscript" in item.name:
            item.add_marker(pytest.mark.skip(reason="TorchScript is not supported"))
    items[:] = kept
