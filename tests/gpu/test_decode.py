"""Decode steps of transformers' models on a CUDA device, compiled: one CUDA graph, and the tokens of plain calls."""

import pytest
import torch
from torch._dynamo.utils import counters

transformers = pytest.importorskip("transformers")

from softless.transformers import set_mechanism  # noqa: E402 - transformers may be missing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning"),  # torch's compiler imports it
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores for float32:UserWarning"),  # which we leave off
]


@pytest.mark.parametrize("attention", ["softmax", "linear", "inline", "delta", "mixed"])
def test_a_compiled_step_is_captured_and_gives_the_logits_of_plain_calls(attention: str) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config).eval()
    if attention != "softmax":
        mechanism, layers = ("linear", [0, 2]) if attention == "mixed" else (attention, None)
        set_mechanism(model, mechanism, layers=layers)
    ids = torch.randint(3, 256, (2, 30), device="cuda")
    cache = transformers.StaticCache(config=model.config, max_cache_len=40)
    torch.compiler.reset()
    counters.clear()
    step = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    with torch.no_grad():
        right = model(ids, use_cache=False).logits
        model(ids[:, :20], past_key_values=cache)
        for at in range(20, 30):
            places = torch.full((2, 1), at, device="cuda")
            logits = step(ids[:, at : at + 1], position_ids=places, past_key_values=cache).logits[:, 0].clone()
            assert (logits - right[:, at]).abs().max() <= 1e-4 * right.abs().max()
    assert counters["inductor"]["cudagraph_skips"] == 0
