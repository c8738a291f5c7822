"""Packed sequences: one call for all of them is a call for each, in numbers, in gradients and in refusals. Law 14."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import softless
from softless import attention, attention_weights, attention_with_state, mechanism
from softless.errors import ArgumentError, SoftlessError, UnsupportedError
from tests.laws.cases import CASES, STATEFUL, Ask, Case, nested, packed, several

CLOSE = {"rtol": 1e-12, "atol": 1e-12}
LENGTHS = (  # queries and keys of each sequence
    ((9, 9), (0, 0), (1, 1), (6, 6)),
    ((5, 9), (1, 6), (0, 3), (7, 7)),
    ((7, 3), (3, 7), (4, 0)),  # a batch would have as many queries as keys, and no sequence has
    ((4, 4), (4, 4)),
)


def call(case: Case, at: Ask, is_causal: bool, **options: Any) -> Tensor:
    return attention(*at[:3], case.made, is_causal=is_causal, inputs=at.inputs, **options)


def each_alone(case: Case, rows: list[Ask], is_causal: bool, **options: Any) -> list[Tensor] | str:
    """The outputs, or what the first refusal says."""
    try:
        return [call(case, row, is_causal, **options) for row in rows]
    except SoftlessError as error:
        return str(error)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_pack_is_a_call_for_each_sequence(case: Case):
    """Or the same refusal: two pictures of one grid must be of one size."""
    for lengths in LENGTHS:
        rows = several(case, *lengths, heads=(4, 2))
        options = {"grid": rows[0].extra["grid"]} if rows[0].picture else {}
        for is_causal in case.forms:
            alone = each_alone(case, rows, is_causal, **options)
            if isinstance(alone, str):
                with pytest.raises(SoftlessError) as refused:
                    call(case, packed(rows), is_causal, **options)
                assert str(refused.value) == alone
                continue
            together = call(case, packed(rows), is_causal, **options)
            for given, true in zip(together.unbind(), alone, strict=True):
                torch.testing.assert_close(given[None], true, **CLOSE)


DIFFERENT = [
    case for case in CASES if case.name in ("softmax", "inline", "focused", "topk", "sparse", "nystrom", "efla")
]


@pytest.mark.parametrize("case", DIFFERENT, ids=str)
def test_gradients_of_a_pack_are_those_of_each_sequence(case: Case):
    for lengths in (((5, 5), (0, 0), (3, 3)), ((2, 5), (1, 3))):
        rows = several(case, *lengths)
        leaves = [x.requires_grad_() for row in rows for x in row[:3]]
        for is_causal in case.forms:
            if lengths[0] == (2, 5) and case.name == "sparse" and not is_causal:
                continue  # it needs as many queries as keys
            together = call(case, packed(rows), is_causal).transpose(1, 2).values()
            given = torch.autograd.grad(together.square().sum(), leaves)
            alone = torch.stack([call(case, row, is_causal).square().sum() for row in rows]).sum()
            for x, true in zip(given, torch.autograd.grad(alone, leaves), strict=True):
                torch.testing.assert_close(x, true, rtol=0, atol=1e-11)


@pytest.mark.parametrize("case", STATEFUL, ids=str)
def test_a_state_has_a_row_for_each_sequence(case: Case):
    """Prompts of different lengths, then a token for each: the states go on as they would alone."""
    first, second = several(case, (7, 7), (0, 0), (3, 3)), several(case, (1, 1), (1, 1), (1, 1))
    second = [then._replace(inputs=row.inputs | {"beta": then.inputs["beta"]} if "beta" in row.inputs else row.inputs)
              for row, then in zip(first, second, strict=True)]  # fmt: skip
    state, states = None, [None] * 3
    for rows in (first, second):
        at = packed(rows)
        together, state = attention_with_state(*at[:3], case.made, state, inputs=at.inputs)
        for b, (row, given) in enumerate(zip(rows, together.unbind(), strict=True)):
            alone, states[b] = attention_with_state(*row[:3], case.made, states[b], inputs=row.inputs)
            torch.testing.assert_close(given[None], alone, **CLOSE)


def qkv(*lengths: int) -> Tensor:
    return nested(torch.randn(1, 2, n, 4) for n in lengths)


def test_the_output_is_packed_as_the_queries_are():
    """So the two can be added; a pack with holes comes back without."""
    q, k = qkv(5, 0, 3), qkv(2, 4, 1)
    assert attention(q, k, k).offsets() is q.offsets()
    assert (attention(q, k, k) + q).shape == q.shape
    rows = torch.randn(2, 6, 2, 4)  # [B, N, H, d]
    holes = torch.nested.narrow(rows, 1, torch.tensor([1, 0]), torch.tensor([3, 4]), layout=torch.jagged).transpose(
        1, 2
    )
    given = attention(holes, holes, holes, "softmax")
    assert given.offsets().tolist() == [0, 3, 7]
    alone = rows[:1, 1:4].transpose(1, 2)
    torch.testing.assert_close(given.unbind()[0][None], attention(alone, alone, alone, "softmax"))


def test_no_sequences_and_no_tokens_give_nothing():
    none = torch.nested.nested_tensor_from_jagged(torch.zeros(0, 2, 4), torch.tensor([0])).transpose(1, 2)
    assert attention(none, none, none).transpose(1, 2).values().shape == (0, 2, 4)
    assert attention(qkv(0, 0), qkv(0, 0), qkv(0, 0), "softmax").transpose(1, 2).values().shape == (0, 2, 4)
    q, k = qkv(2, 3), qkv(0, 0)
    assert not attention(q, k, k, "softmax").transpose(1, 2).values().any()


def test_autocast_and_half_precision_are_those_of_each_sequence():
    q = qkv(5, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention(q, q, q).dtype == torch.bfloat16
    low = q.to(torch.float16)
    for given, x in zip(attention(low, low, low).unbind(), low.unbind(), strict=True):
        assert torch.equal(given[None], attention(x[None], x[None], x[None]))


def strided() -> Tensor:
    with warnings.catch_warnings(action="ignore"):  # PyTorch advises the other layout too
        return torch.nested.nested_tensor([torch.randn(2, 3, 4), torch.randn(2, 5, 4)])


REFUSED = {
    "k is not nested and others of this call are": lambda x: attention(
        x, torch.randn(2, 2, 5, 4), torch.randn(2, 2, 5, 4)
    ),
    "q is not nested": lambda x: attention(torch.randn(2, 2, 5, 4), x, x),
    "q is a nested tensor of layout torch.strided and must be of layout torch.jagged": lambda x: attention(
        strided(), x, x
    ),
    r"q is a nested tensor \[2, j\d+, 2, 4\] and must be \[batch, heads, j, dim\]": lambda x: attention(
        x.transpose(1, 2), x, x
    ),
    "key_mask was passed with packed sequences": lambda x: attention(x, x, x, key_mask=torch.ones(2, 5).bool()),
    "bias was passed with packed sequences": lambda x: attention(x, x, x, "softmax", bias=torch.zeros(5, 5)),
    r"k and v have sequences of \[3, 5\] and \[3, 4\] tokens": lambda x: attention(x, x, qkv(3, 4)),
    "numbers of packed sequences must be equal, and are: q 2 and k 3": lambda x: attention(
        x, qkv(1, 2, 3), qkv(1, 2, 3)
    ),
    "input 'beta' is not nested": lambda x: attention(
        x, x, x, "efla", is_causal=True, inputs={"beta": torch.rand(2, 2, 5)}
    ),
    "needs inputs beta and got none": lambda x: attention(x, x, x, "efla", is_causal=True),
    r"needs grid=.* got \(1, 3\) with 5 queries": lambda x: attention(x, x, x, "mlla", grid=(1, 3)),
    "5 tokens are more than cosformer's length 4": lambda x: attention(x, x, x, mechanism("cosformer", length=4)),
    "in packed sequences, every token needs its query": lambda x: attention_with_state(qkv(1, 1), x, x, "linear"),
    "only attention and attention_with_state take packed sequences": lambda x: attention_weights(x, x),
    "q is a nested tensor, and only": lambda x: attention_weights(strided(), x),
    "has no state of fixed size": lambda x: attention_with_state(x, x, x, "softmax"),
}


@pytest.mark.parametrize("says", REFUSED)
def test_what_a_pack_cannot_do_is_refused_in_one_sentence(says: str):
    with pytest.raises(SoftlessError, match=says):
        REFUSED[says](qkv(3, 5))


LAYERS = {"inline": {}, "softmax": {"kv_heads": 1}, "efla": {}, "reformer": {}, "emanet": {}, "soft": {}}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_takes_packed_sequences(name: str):
    layer = softless.nn.Attention(8, 2, name, **LAYERS[name]).double()
    sequences = [torch.randn(n, 8, dtype=torch.float64, requires_grad=True) for n in (5, 0, 1, 7)]
    is_causal = name == "efla"
    moved = softless.nn.Attention(8, 2, name, **LAYERS[name]).double()
    moved.load_state_dict(layer.state_dict())
    x = torch.nested.as_nested_tensor(sequences, layout=torch.jagged)
    together = layer.eval()(x, is_causal=is_causal)
    assert together.shape == x.shape
    alone = torch.cat([layer(each[None], is_causal=is_causal)[0] for each in sequences])
    torch.testing.assert_close(together.values(), alone, **CLOSE)
    given, true = (torch.autograd.grad(out.square().sum(), sequences) for out in (together.values(), alone))
    for got, want in zip(given, true, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-11)
    layer.train()(x, is_causal=is_causal)  # emanet's bases move, as with a mask
    real = torch.arange(7) < torch.tensor([[5], [0], [1], [7]])
    moved.train()(torch.nested.to_padded_tensor(x, 0.0), is_causal=is_causal, key_mask=real)
    for got, want in zip(layer.buffers(), moved.buffers(), strict=True):
        torch.testing.assert_close(got, want, **CLOSE)


def test_a_layer_that_reads_a_picture_refuses_packed_sequences():
    x = torch.nested.nested_tensor([torch.randn(4, 8), torch.randn(9, 8)], layout=torch.jagged)
    for options in ({"local": True}, {"window": 2}):
        with pytest.raises(UnsupportedError, match="x is packed sequences"):
            softless.nn.Attention(8, 2, **options)(x, grid=(2, 2))
    with pytest.raises(ArgumentError, match="only attention and attention_with_state take packed sequences"):
        softless.nn.Attention(8, 2, "softmax", attn_drop=0.5)(x)


def test_a_layer_with_a_state_goes_on_with_each_sequence():
    layer = softless.nn.Attention(8, 2, "linear").double()
    sequences = [torch.randn(n, 8, dtype=torch.float64) for n in (5, 2)]
    _, state = layer.with_state(torch.nested.nested_tensor([x[:-1] for x in sequences], layout=torch.jagged))
    last, _ = layer.with_state(torch.stack([x[-1:] for x in sequences]), state)
    for x, given in zip(sequences, last, strict=True):
        torch.testing.assert_close(given, layer(x[None], is_causal=True)[0, -1:], **CLOSE)
