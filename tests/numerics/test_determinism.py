"""The same call gives the same bits: again in this process, and in another one. R10 on the CPU."""

import subprocess
import sys
from pathlib import Path

import torch

from tests.annotations import same_shapes
from tests.numerics.cases import attend, draw, gradients, one_form

ROOT = Path(__file__).parents[2]


def call(case: str, is_causal: bool, dtype: torch.dtype) -> list[torch.Tensor]:
    """Output and gradients of a call that spans several chunks."""
    torch.manual_seed(10)
    given = draw(case, 150, 5, batch=2).to(dtype)
    leaves = [x.requires_grad_() for x in given.leaves()]
    out = attend(case, given, is_causal=is_causal)
    return [out, *gradients(out, torch.randn(out.shape), leaves)]


@one_form
def test_twenty_repeats_give_the_same_bits(case, is_causal):
    first = call(case, is_causal, torch.float32)
    with same_shapes():
        for _ in range(19):
            assert all(map(torch.equal, first, call(case, is_causal, torch.float32)))


DIGEST = """
import hashlib, torch
from tests.numerics.cases import CASES, FORMS
from tests.numerics.test_determinism import call

digest = hashlib.sha256()
for case in CASES:
    for is_causal in FORMS[case]:
        for dtype in (torch.float32, torch.bfloat16):
            for x in call(case, is_causal, dtype):
                digest.update(x.detach().contiguous().view(torch.uint8).numpy().tobytes())
print(digest.hexdigest())
"""


def test_two_fresh_processes_give_the_same_digest():
    runs = [
        subprocess.run([sys.executable, "-c", DIGEST], cwd=ROOT, capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert len(runs[0].stdout.strip()) == 64
    assert runs[0].stdout == runs[1].stdout
