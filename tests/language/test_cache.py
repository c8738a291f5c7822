"""Decoding from states: every way to feed tokens gives what one call gives, and nothing leaks."""

from copy import deepcopy
from itertools import pairwise, product
from statistics import median
from time import perf_counter

import pytest
import torch
from transformers import DynamicCache, StaticCache

from softless import mechanism
from softless.errors import ArgumentError, UnsupportedError
from softless.transformers import StateLayer, set_mechanism
from softless.transformers.cache import KEPT
from tests.language.models import ATTENTIONS, CAUSAL, causal, tokens

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*past_key_values.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
every_attention = pytest.mark.parametrize("attention", ATTENTIONS)
TIGHT = {torch.float64: 1e-10, torch.float32: 1e-5}


@torch.no_grad()
def fed(model, ids, cuts, cache=None, **more):
    """Return the logits of tokens that come in pieces, and the cache."""
    cache, parts = cache or DynamicCache(config=model.config), []
    for begin, end in pairwise(cuts):
        masks = {name: x[:, :end] for name, x in more.items()}
        parts.append(model(ids[:, begin:end], past_key_values=cache, use_cache=True, **masks).logits)
    return torch.cat(parts, 1), cache


@torch.no_grad()
def whole(model, ids, **more):
    return model(ids, use_cache=False, **more).logits


@pytest.mark.parametrize("dtype", TIGHT)
@every_attention
def test_a_prompt_steps_and_chunks_give_what_one_call_gives(attention, dtype):
    """The prompt is longer than what a layer remembers."""
    model, ids = causal(attention=attention, dtype=dtype), tokens(2, KEPT + 40)
    right = whole(model, ids)
    for cuts in ((0, KEPT + 20, KEPT + 21, KEPT + 22, KEPT + 30, KEPT + 40), (0, 5, 6, 7, 40, KEPT + 40)):
        found, _ = fed(model, ids, cuts)
        assert (found - right).abs().max() <= TIGHT[dtype] * (1 + right.abs().max())


@pytest.mark.parametrize("name", CAUSAL)
def test_every_architecture_decodes_from_states(name):
    for attention in ("linear", "delta", "mixed"):
        model, ids = causal(name, attention), tokens(2, 30)
        found, cache = fed(model, ids, (0, 11, 12, 20, 21, 30))
        right = whole(model, ids)
        assert (found - right).abs().max() <= (1e-10 if name in ("gpt2", "gpt_neox") else 1e-5) * right.abs().max()
        kinds = [isinstance(layer, StateLayer) for layer in cache.layers]
        assert kinds == ([True, False, True] if attention == "mixed" else [True] * 3)


@every_attention
def test_greedy_tokens_are_those_without_a_cache(attention):
    model, ids = causal(attention=attention), tokens(1, 7)
    found = model.generate(ids, max_new_tokens=20, min_new_tokens=20, do_sample=False)
    again = model.generate(ids, max_new_tokens=20, min_new_tokens=20, do_sample=False, use_cache=False)
    assert torch.equal(found, again)
    assert len(set(found[0, 7:].tolist())) > 3  # the tokens differ, so that equal ones say something


@every_attention
def test_sampled_tokens_are_those_without_a_cache(attention):
    model, ids, found = causal(attention=attention), tokens(3, 7), []
    for use_cache in (True, False):
        torch.manual_seed(5)
        found.append(model.generate(ids, max_new_tokens=12, do_sample=True, use_cache=use_cache))
    assert torch.equal(*found)


@every_attention
def test_a_prompt_may_come_in_chunks(attention):
    model, ids = causal(attention=attention), tokens(2, 23)
    plain, chunked = (
        model.generate(ids, max_new_tokens=6, do_sample=False, **how) for how in ({}, {"prefill_chunk_size": 5})
    )
    assert torch.equal(plain, chunked)


@every_attention
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_and_other_rows_change_nothing(attention, side):
    model, ids = causal(attention=attention), tokens(1, 9)
    padding, real = torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 9, dtype=torch.long)
    row = torch.cat([padding, ids] if side == "left" else [ids, padding], 1)
    seen = torch.cat([padding, real] if side == "left" else [real, padding], 1)
    both = torch.cat([row, tokens(1, 13, seed=1)]), torch.cat([seen, torch.ones_like(seen)])
    places = (both[1].cumsum(1) - 1).clamp(min=0)
    right, here = whole(model, ids), slice(4, 13) if side == "left" else slice(0, 9)
    for logits in (
        whole(model, both[0], attention_mask=both[1], position_ids=places),
        fed(model, both[0], (0, 6, 7, 13), attention_mask=both[1])[0] if side == "right" else None,
    ):
        if logits is not None:
            assert (logits[:1, here] - right).abs().max() <= 1e-5 * right.abs().max()
    if side == "left":
        alone = model.generate(ids, max_new_tokens=8, do_sample=False)
        beside = model.generate(both[0], attention_mask=both[1], max_new_tokens=8, do_sample=False)
        count = alone.shape[1] - 9
        assert torch.equal(beside[0, 13 : 13 + count], alone[0, 9:])


@every_attention
def test_beams_find_what_a_search_of_all_sequences_finds(attention):
    """No sequence ends early, so all of them have as many tokens."""
    vocabulary, steps, end = 6, 3, 2
    model, ids = causal(attention=attention, vocab_size=vocabulary), tokens(1, 5) % 3 + 3
    best = model.generate(
        ids, num_beams=vocabulary ** (steps - 1), max_new_tokens=steps, min_new_tokens=steps, do_sample=False
    )
    every = torch.tensor([row for row in product(range(vocabulary), repeat=steps) if end not in row])
    logits = whole(model, torch.cat([ids.expand(len(every), -1), every], 1)).log_softmax(-1)
    scores = logits[:, 4:-1].gather(2, every[..., None]).sum((1, 2))
    assert torch.equal(best[0, 5:], every[scores.argmax()])


@every_attention
@pytest.mark.parametrize("taken", [8, 13, 14, 15])
def test_tokens_that_are_taken_back_leave_no_bit(attention, taken):
    """After a prompt, tokens come in single steps and in chunks."""
    model, ids = causal(attention=attention, dtype=torch.float32), tokens(2, KEPT + 30)
    cuts = [0, KEPT + 15, KEPT + 16, KEPT + 17, KEPT + 22, KEPT + 30]
    _, cache = fed(model, ids, cuts)
    cache.crop(-taken)
    left = KEPT + 30 - taken
    _, never = fed(model, ids, [*(cut for cut in cuts if cut < left), left])
    for mine, right in zip(cache.layers, never.layers, strict=True):
        held = (mine.state, right.state) if isinstance(mine, StateLayer) else ((mine.keys,), (right.keys,))
        assert all(torch.equal(a, b) for a, b in zip(*held, strict=True))
        assert mine.get_seq_length() == right.get_seq_length() == left
    more = tokens(2, 5, seed=3)
    assert torch.equal(fed(model, more, (0, 5), cache)[0], fed(model, more, (0, 5), never)[0])


@pytest.mark.parametrize("name", ["linear", "inline", "delta", "decay", "nearfar"])
@pytest.mark.parametrize("calls", [[1] * 200, [150, 7, 3, 60, 1, 1, 20, 9]], ids=["steps", "chunks"])
def test_a_layer_takes_back_any_of_its_last_tokens(name, calls):
    """The state is that of a layer which came as far and no further, bit for bit."""
    made = mechanism(name)
    q, k, v = torch.randn(3, 2, 4, sum(calls), 8)
    of_tokens = {name: torch.rand(2, 4, sum(calls)) for name in made.token_inputs}
    of_all = {name: torch.randn(shape) for name, shape in made.input_shapes(4, 8).items()}

    def after(count: int) -> StateLayer:
        layer, at = StateLayer(made), 0
        for size in calls:
            here = slice(at, min(at + size, count))
            if here.start < here.stop:
                inputs = of_all | {name: x[:, :, here] for name, x in of_tokens.items()}
                layer.update(k[:, :, here], v[:, :, here])
                layer.attend(q[:, :, here], k[:, :, here], v[:, :, here], None, inputs)
            at += size
        return layer

    total, layer = sum(calls), after(sum(calls))
    for taken in (1, 5, 11, KEPT - 17):
        layer.crop(-taken)
        total -= taken
        never = after(total)
        assert all(torch.equal(a, b) for a, b in zip(layer.state, never.state, strict=True))
        assert layer.get_seq_length() == total


def test_more_tokens_than_remembered_are_refused():
    _, cache = fed(causal(), tokens(1, 200), (0, 200))
    with pytest.raises(ArgumentError, match=r"crop\(-65\) takes back 65 tokens, and the layer remembers the last 64"):
        cache.crop(-65)
    with pytest.raises(ArgumentError, match=r"crop\(3\) is positive: crop\(-3\) takes back the last 3 tokens"):
        cache.crop(3)


@every_attention
@pytest.mark.parametrize("helper", ["prompt lookup", "assistant"])
def test_assisted_generation_gives_the_same_tokens(attention, helper):
    model, ids = causal(attention=attention), tokens(1, 5).repeat(1, 20)
    how = {"prompt_lookup_num_tokens": 4}
    if helper == "assistant":
        how = {"assistant_model": causal("gpt2", "inline")}
    plain = model.generate(ids, max_new_tokens=15, min_new_tokens=15, do_sample=False)
    assert torch.equal(model.generate(ids, max_new_tokens=15, min_new_tokens=15, do_sample=False, **how), plain)


def test_a_prompt_is_reused_for_many_continuations():
    model, ids = causal(attention="mixed"), tokens(1, 30)
    _, prompt = fed(model, ids[:, :20], (0, 20))
    for seed in range(3):
        more = torch.cat([ids[:, :20], tokens(1, 4, seed)], 1)
        with torch.no_grad():
            found = model.generate(more, past_key_values=deepcopy(prompt), max_new_tokens=6, do_sample=False)
        assert torch.equal(found, model.generate(more, max_new_tokens=6, do_sample=False))


@torch.no_grad()
def decoding_layer(name, count):
    """A layer after `count` tokens at once and as many steps as it remembers, and the next step."""
    made = mechanism(name)
    inputs = {name: torch.randn(shape) for name, shape in made.input_shapes(1, 8).items()}
    layer = StateLayer(made)

    def come(tokens):
        q, k, v = (torch.randn(1, 1, tokens, 8) for _ in range(3))
        layer.attend(q, *layer.update(k, v), None, inputs | dict.fromkeys(made.token_inputs, torch.rand(1, 1, tokens)))

    come(count)
    for _ in range(2 * KEPT):
        come(1)
    return layer, lambda: come(1)


@pytest.mark.parametrize("name", ["linear", "inline", "delta", "nearfar"])
def test_the_bytes_of_a_layer_do_not_depend_on_the_tokens_seen(name):
    assert decoding_layer(name, KEPT)[0].nbytes == decoding_layer(name, 65_536)[0].nbytes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linear", "inline", "delta", "nearfar"])
def test_the_time_of_a_step_does_not_depend_on_the_tokens_seen(name):
    """The two layers take turns, so that a busy machine slows both down."""
    steps = [decoding_layer(name, count)[1] for count in (KEPT, 65_536)]
    seconds = [[], []]
    for turn in range(1200):
        began = perf_counter()
        steps[turn % 2]()
        seconds[turn % 2].append(perf_counter() - began)
    assert median(seconds[1]) <= 1.1 * median(seconds[0])


@every_attention
def test_a_static_cache_gives_the_same_tokens(attention):
    """With padding on the left too."""
    model, ids = causal(attention=attention), tokens(2, 9)
    ids[0, :3] = 0
    plain, static = (
        model.generate(ids, max_new_tokens=8, do_sample=False, **how)
        for how in ({}, {"cache_implementation": "static"})
    )
    assert torch.equal(plain, static)


def test_a_static_cache_of_a_sliding_window_may_be_shorter_than_the_prompt():
    """Masks are as long as the window, and the padding is outside of it later."""
    model, ids = causal("mistral"), tokens(2, 12)
    ids[0, :8] = 0
    how = {"attention_mask": (ids > 0).long(), "max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    assert torch.equal(
        model.generate(ids, use_cache=False, **how), model.generate(ids, cache_implementation="static", **how)
    )


@pytest.mark.compile
@pytest.mark.parametrize("attention", ["linear", "mixed"])
def test_a_compiled_step_gives_the_same_logits_and_compiles_once(attention):
    model, ids = causal(attention=attention, dtype=torch.float32), tokens(2, 14)
    right = whole(model, ids)
    cache = StaticCache(config=model.config, max_cache_len=20)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        model(ids[:, :6], past_key_values=cache)
        held = [part.data_ptr() for part in cache.layers[0].state]
        for at in range(6, 14):
            places = torch.full((2, 1), at)
            with torch._dynamo.config.patch(error_on_recompile=at > 7):
                found = compiled(ids[:, at : at + 1], past_key_values=cache, position_ids=places).logits
            assert (found[:, 0] - right[:, at]).abs().max() <= 1e-5 * right.abs().max()
    assert held == [part.data_ptr() for part in cache.layers[0].state]


def test_a_cache_belongs_to_one_model_and_one_batch():
    model, ids = causal(), tokens(2, 6)
    _, cache = fed(model, ids, (0, 6))
    with pytest.raises(ArgumentError, match="the cache holds 2 sequences, and this call has 3"):
        model(tokens(3, 1), past_key_values=cache)
    other = causal(attention="inline")
    with pytest.raises(
        ArgumentError, match="layer 0 of the cache holds a state of 'linear', and the model has 'inline'"
    ):
        other(ids[:, :1], past_key_values=cache)
    set_mechanism(model, "softmax")
    _, keys = fed(model, ids, (0, 6))
    with pytest.raises(ArgumentError, match="layer 0 of the cache holds keys and values, and the model has 'inline'"):
        other(ids[:, :1], past_key_values=keys)


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((2, 1, 6, 6), r"has shape \[2, 1, 6, 6\], and linear layers need one of \[batch, tokens\]"),
        ((2, 6, 6), r"has shape \[2, 6, 6\], and linear layers need one of \[batch, tokens\]"),
        ((6,), r"has shape \[6\], and linear layers need one of \[batch, tokens\]"),
        ((2, 5), r"has shape \[2, 5\] and must be \[batch, tokens\] = \[2, 6\], the tokens in the cache included"),
        ((3, 6), r"has shape \[3, 6\] and must be \[batch, tokens\] = \[2, 6\]"),
    ],
)
def test_a_mask_of_another_shape_is_refused(shape, said):
    with pytest.raises(ArgumentError, match=f"attention_mask {said}"):
        causal()(tokens(2, 6), attention_mask=torch.ones(shape, dtype=torch.bool))


def test_a_static_cache_takes_nothing_back():
    model = causal()
    cache = StaticCache(config=model.config, max_cache_len=20)
    with torch.no_grad():
        model(tokens(1, 6), past_key_values=cache)
    with pytest.raises(UnsupportedError, match="a static cache remembers no tokens"):
        cache.layers[0].crop(-1)
