"""Twice the tokens take at most 2.2 times the memory, wherever the cost is less than N^2: R19.

benchmarks/scaling.py measures the time, which a test cannot hold.
"""

from itertools import pairwise

import pytest
import torch

from softless import attention, mechanism
from softless.mechanisms import MECHANISMS, Mechanism
from softless.probes.memory import peak_bytes

TOKENS = (2048, 4096, 8192, 16384)
OPTIONS = {
    "sparse": {"pattern": "local", "stride": 16},
    "longformer": {"window": 16},
    "reformer": {"buckets": 8, "rounds": 2, "window": 8},
    "linformer": {"rank": 16, "length": TOKENS[-1]},
    "nystrom": {"landmarks": 16},
    "agent": {"agents": 16},
    "soft": {"landmarks": 16},
    "asymmetric_nonlocal": {"pyramid": (1, 9)},
    "emanet": {"bases": 16, "detach": False},
}
THIN = [name for name, each in MECHANISMS.items() if "N^2" not in each.cost]


def peak(name: str, tokens: int, *, backward: bool) -> int:
    made = mechanism(name, **OPTIONS.get(name, {}))
    q, k, v = (torch.randn(1, 1, tokens, 8, requires_grad=backward) for _ in "qkv")
    call = {
        "inputs": {each: torch.rand(shape) for each, shape in made.needed(q, k).items()},
        "is_causal": made.lacks(False) is not None,
        "grid": (tokens // 32, 32) if made.needs_grid else None,
    }

    def step() -> None:
        out = attention(q, k, v, made, **call)
        if backward:
            out.sum().backward()

    return peak_bytes(step, q.device)


LENGTHS = [TOKENS[:2], pytest.param(TOKENS, marks=pytest.mark.slow)]


@pytest.mark.parametrize("lengths", LENGTHS, ids=["4k", "16k"])
@pytest.mark.parametrize("name", THIN)
def test_memory_grows_no_faster_than_tokens(name: str, lengths: tuple[int, ...]):
    peaks = [peak(name, tokens, backward=False) for tokens in lengths]
    assert max(large / small for small, large in pairwise(peaks)) <= 2.2


@pytest.mark.slow
@pytest.mark.parametrize("name", THIN)
def test_nor_does_the_memory_of_a_training_step(name: str):
    peaks = [peak(name, tokens, backward=True) for tokens in TOKENS]
    assert max(large / small for small, large in pairwise(peaks)) <= 2.2


def test_all_pairs_would_be_noticed():
    assert peak("topk", 2048, backward=False) / peak("topk", 1024, backward=False) > 3


@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("made", [mechanism("longformer", window=64), mechanism("sparse", pattern="local", stride=64)])
def test_a_window_is_read_in_runs_and_its_scores_are_never_all_there(made: Mechanism, is_causal: bool):
    q, k, v = torch.randn(3, 1, 4, 16384, 8, dtype=torch.float64).unbind()
    peak = peak_bytes(lambda: attention(q, k, v, made, is_causal=is_causal), q.device)
    assert peak < 4 * 16384 * (128 if is_causal else 256) * q.element_size()
    q, k, v = (x[:, :, :2048] for x in (q, k, v))
    given, true = (attention(q, k, v, made, is_causal=is_causal, backend=how) for how in ("torch", "reference"))
    torch.testing.assert_close(given, true, rtol=0, atol=1e-12)


def test_strided_columns_of_the_best_stride_take_a_power_of_three_halves():
    """Each of N tokens has sqrt(N) near keys and sqrt(N) in its column."""

    def bytes_at(tokens: int) -> int:
        made = mechanism("sparse", pattern="local+strided", stride=round(tokens**0.5))
        q, k, v = torch.randn(3, 1, 1, tokens, 8).unbind()
        return peak_bytes(lambda: attention(q, k, v, made), q.device)

    assert bytes_at(16384) / bytes_at(4096) <= 8 * 1.1
