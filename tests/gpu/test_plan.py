"""Plans on a GPU: other streams, graphs, threads and addresses repeat the same steps on their own tensors."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

import softless

pytestmark = pytest.mark.gpu


def draw(tokens: int = 49, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(2, 3, tokens, 32, device="cuda", dtype=dtype) for _ in range(3)]


def assert_right(out: Tensor, q: Tensor, k: Tensor, v: Tensor, **options: object) -> None:
    exact = softless.attention(q.double(), k.double(), v.double(), backend="torch", **options)
    torch.testing.assert_close(out.double(), exact, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("tokens", [49, 300, 3000])
def test_calls_on_another_stream_are_ordered_with_it(tokens, is_causal):
    stream = torch.cuda.Stream()
    for _ in range(3):
        q, k, v = draw(tokens)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            q = q + 1  # the kernels must wait for this
            out = softless.attention(q, k, v, backend="triton", is_causal=is_causal)
        torch.cuda.current_stream().wait_stream(stream)
        assert_right(out, q, k, v, is_causal=is_causal)


def test_a_captured_call_replays_on_new_numbers():
    q, k, v = draw()
    softless.attention(q, k, v, backend="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = softless.attention(q, k, v, backend="triton")
    for _ in range(2):
        for x in (q, k, v):
            x.normal_()
        graph.replay()
        assert_right(out, q, k, v)


def test_threads_share_plans():
    def work(tokens: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            q, k, v = (x.requires_grad_() for x in draw(tokens))
            out = softless.attention(q, k, v, "inline", backend="triton")
            out.sum().backward()
            torch.cuda.current_stream().synchronize()
        assert_right(out.detach(), q.detach(), k.detach(), v.detach())
        assert q.grad.isfinite().all()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, [17, 49, 300] * 8))


def test_addresses_that_are_no_multiples_of_16_are_computed_right():
    memory = torch.randn(3, 2, 3, 49, 33, device="cuda")
    for start in (0, 1):
        q, k, v = memory[..., start : start + 32].unbind()
        assert_right(softless.attention(q, k, v, backend="triton"), q, k, v)


def test_decode_steps_repeat_a_plan_on_their_own_states():
    q, k, v = draw(30)
    options = {"mechanism": "linear", "backend": "triton"}
    out, state = softless.attention_with_state(q[:, :, :9], k[:, :, :9], v[:, :, :9], **options)
    outputs = [out]
    for at in range(9, 30):
        token = (x[:, :, at : at + 1] for x in (q, k, v))
        out, state = softless.attention_with_state(*token, state=state, **options)
        outputs.append(out)
    assert_right(torch.cat(outputs, 2), q, k, v, mechanism="linear", is_causal=True)
