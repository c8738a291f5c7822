"""The check that `auto` runs on GPUs without recorded evidence: on a GPU with evidence the kernels pass it."""

import time

import pytest
import torch

from softless.kernels.common import self_check
from softless.kernels.common.self_check import OperatorKind
from tests.kernels.test_self_check import FORMS, SPECS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("name", "is_causal"), FORMS)
def test_the_kernels_pass_their_check(name, is_causal, dtype, record_property):
    start = time.perf_counter()
    assert self_check.failure(torch.device("cuda", 0), OperatorKind.of(SPECS[name], is_causal, dtype)) is None
    record_property("seconds", time.perf_counter() - start)
