"""Twice the tokens take at most 2.2 times the memory, wherever the cost is less than N^2: R19.

benchmarks/scaling.py measures the time, which a test cannot hold.
"""

from itertools import pairwise

import pytest
import torch

from softless import attention, mechanism
from softless.mechanisms import MECHANISMS, Mechanism, restricted
from softless.stopwatch import peak_bytes

PATTERNS = ("local", "strided", "local+strided", "fixed")

TOKENS = (2048, 4096, 8192, 16384)


def summary(pattern: str, columns: int) -> dict[str, int]:
    """The option that pattern `fixed` alone reads."""
    return {"summary": columns} if pattern == "fixed" else {}


OPTIONS = {
    **{f"sparse {each}": {"pattern": each, "stride": 4} | summary(each, 1) for each in PATTERNS},  # many columns: N^2/4
    "longformer": {"window": 16},
    "reformer": {"buckets": 8, "rounds": 2, "window": 8},
    "linformer": {"rank": 16, "length": TOKENS[-1]},
    "nystrom": {"landmarks": 16},
    "agent": {"agents": 16},
    "soft": {"landmarks": 16},
    "asymmetric_nonlocal": {"pyramid": (1, 9)},
    "emanet": {"bases": 16, "detach": False},
}
COLUMNS = [f"sparse {each}" for each in PATTERNS if each != "local"]
THIN = [name for name, each in MECHANISMS.items() if "N^2" not in each.cost and name != "sparse"]
THIN += ["sparse local"]


def peak(name: str, tokens: int, *, backward: bool) -> int:
    made = mechanism(name.split(maxsplit=1)[0], **OPTIONS.get(name, {}))
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
@pytest.mark.parametrize("name", THIN + COLUMNS)
def test_memory_grows_no_faster_than_tokens(name: str, lengths: tuple[int, ...]):
    peaks = [peak(name, tokens, backward=False) for tokens in lengths]
    assert max(large / small for small, large in pairwise(peaks)) <= 2.2


@pytest.mark.slow
@pytest.mark.parametrize("name", THIN)
def test_memory_of_a_training_step_grows_no_faster_than_tokens(name: str):
    peaks = [peak(name, tokens, backward=True) for tokens in TOKENS]
    assert max(large / small for small, large in pairwise(peaks)) <= 2.2


def test_the_memory_test_would_notice_a_matrix_of_all_pairs():
    assert peak("topk", 2048, backward=False) / peak("topk", 1024, backward=False) > 3


@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("made", [mechanism("longformer", window=64), mechanism("sparse", pattern="local", stride=64)])
def test_the_scores_of_a_window_are_never_all_there(made: Mechanism, is_causal: bool):
    q, k, v = torch.randn(3, 1, 4, 16384, 8, dtype=torch.float64).unbind()
    peak = peak_bytes(lambda: attention(q, k, v, made, is_causal=is_causal), q.device)
    assert peak < 4 * 16384 * (128 if is_causal else 256) * q.element_size()


IN_RUNS = [mechanism("sparse", pattern=each, stride=6, **summary(each, 2)) for each in PATTERNS]
IN_RUNS += [mechanism("longformer", window=4, global_tokens=2)]


@pytest.mark.parametrize("most", [1, 100, 1000])
@pytest.mark.parametrize("made", IN_RUNS, ids=str)
def test_scores_in_runs_are_the_same_scores(made: Mechanism, most: int, monkeypatch: pytest.MonkeyPatch):
    """A row at a time, some rows of a block, and some blocks."""
    monkeypatch.setattr(restricted, "at_once", lambda q: most * q.shape[0] * q.shape[1])
    q, k, v = torch.randn(3, 2, 2, 47, 3, dtype=torch.float64).unbind()
    key_mask = torch.rand(2, 47) > 0.2
    for asked, is_causal in ((q, False), (q, True), (q[:, :, :20], True)):
        call = {"is_causal": is_causal, "key_mask": key_mask}
        given, true = (attention(asked, k, v, made, **call, backend=how) for how in ("torch", "reference"))
        torch.testing.assert_close(given, true, rtol=0, atol=1e-12)


@pytest.mark.parametrize("pattern", [name.split()[1] for name in COLUMNS])
def test_gradients_at_the_best_stride_take_a_power_of_three_halves(pattern: str):
    """Each of N tokens sees sqrt(N) keys in its column, and their weights are kept."""

    def bytes_at(tokens: int) -> int:
        made = mechanism("sparse", pattern=pattern, stride=round(tokens**0.5))
        q, k, v = (torch.randn(1, 1, tokens, 8, requires_grad=True) for _ in "qkv")
        return peak_bytes(lambda: attention(q, k, v, made).sum().backward(), q.device)

    assert bytes_at(8192) / bytes_at(2048) <= 8 * 1.1
