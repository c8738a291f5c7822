"""The fourteen invariants that every mechanism keeps, in one table: a row a mechanism, a column an invariant.

The other files try each law on many questions; here each is asked once of every mechanism, and where one does not apply
the mechanism says so.
"""

import pytest
import torch
from torch import Tensor

from softless import attention, attention_weights, attention_with_state, list_mechanisms, mechanism
from softless.errors import UnsupportedError
from tests.laws.cases import CASES, SQUARE, STATEFUL, Ask, Case, ask, packed, several, streamed

BY_NAME = {name: max((each for each in CASES if each.name == name), key=lambda each: len(each.forms)) for name in {
    each.name for each in CASES
}}  # fmt: skip
POSITIONAL = ("cosformer", "diagonal", "mlla", "sparse", "longformer", "linformer", "nystrom", "agent", "soft")
POSITIONAL += ("asymmetric_nonlocal", "reformer", "angular", "delta", "efla", "decay", "nearfar")
CLOSE = {"rtol": 1e-10, "atol": 1e-10}
TOKENS = 10


def out(case: Case, at: Ask, is_causal: bool | None = None, **call: object) -> Tensor:
    form = case.forms[0] if is_causal is None else is_causal
    return attention(*at[:3], case.made, is_causal=form, key_mask=at.key_mask, **at.extra, **call)


def ragged(case: Case) -> Ask:
    """Ten tokens, and six with four of padding after them."""
    return ask(case, TOKENS)._replace(key_mask=torch.arange(TOKENS) < torch.tensor([[TOKENS], [6]]))


def padding_content(case: Case) -> None:
    at = ragged(case)

    def poison(x: Tensor) -> Tensor:
        real = at.key_mask[:, None] if x.ndim == 3 else at.key_mask[:, None, :, None]
        return torch.where(real, x, torch.nan) if x.is_floating_point() else x

    poisoned = at.each(poison)
    real = at.key_mask[:, None, :, None].expand_as(at.v)
    for form in case.forms:
        clean = out(case, at, form)
        assert torch.equal(out(case, poisoned._replace(q=at.q), form), clean)
        assert torch.equal(out(case, poisoned, form)[real], clean[real]), "a padded query reaches a real token"


def batch_mates(case: Case) -> None:
    at, other = ask(case, TOKENS), ask(case, TOKENS, seed=1)
    mixed = Ask(*(torch.cat([a[:1], 9 * b[:1]]) for a, b in zip(at[:3], other[:3], strict=True)), None, at.inputs)
    mixed = mixed._replace(picture=at.picture)
    for form in case.forms:
        torch.testing.assert_close(out(case, mixed, form)[:1], out(case, at, form)[:1], **CLOSE)


def causality(case: Case) -> None:
    at = ask(case, TOKENS)
    if True not in case.forms:
        with pytest.raises(UnsupportedError, match=f"is_causal is True, and mechanism '{case.name}'"):
            out(case, at, True)
        return
    later = at._replace(**{name: x.clone() for name, x in zip("qkv", at[:3], strict=True)})
    for x in later[:3]:
        x[:, :, 7:] = 100 * torch.randn_like(x[:, :, 7:])
    assert torch.equal(out(case, later, True)[:, :, :7], out(case, at, True)[:, :, :7])


def forms_agree(case: Case) -> None:
    at = ask(case, TOKENS)
    for form in case.forms:
        torch.testing.assert_close(
            out(case, at, form, backend="torch"), out(case, at, form, backend="reference"), **CLOSE
        )
    if case not in STATEFUL:
        with pytest.raises(UnsupportedError):
            attention_with_state(*at[:3], case.made, **at.extra)
        return
    for cuts in ([3], [1, 2, 8], range(1, TOKENS)):
        torch.testing.assert_close(streamed(case, at, cuts)[0], out(case, at, True), **CLOSE)


def explicit_weights(case: Case) -> None:
    at = ragged(case)
    for form in case.forms:
        weights = attention_weights(*at[:2], case.made, is_causal=form, key_mask=at.key_mask, **at.extra)
        v = torch.where(at.key_mask[:, None, :, None], at.v, 0.0)
        if case.name == "hydra":  # a matrix a channel
            made = (weights @ v.transpose(2, 3).flatten(1, 2)[..., None])[..., 0].unflatten(1, (2, -1)).transpose(2, 3)
        else:
            made = weights @ v
        if case.name == "transnormer":  # what follows the weights
            made = made / made.square().mean((1, 3), keepdim=True).sqrt()
        elif case.name == "angular":
            made = made / made.norm(dim=-1, keepdim=True)
        real = at.key_mask[:, None, :, None].expand_as(made)
        torch.testing.assert_close(made[real], out(case, at, form)[real], **CLOSE)


def row_sums(case: Case) -> None:
    at = ask(case, TOKENS)
    for form in case.forms:
        sums = attention_weights(*at[:2], case.made, is_causal=form, **at.extra).sum(-1)
        one = torch.allclose(sums, torch.ones_like(sums), rtol=0, atol=1e-10)
        assert one == case.made.rows_sum_to_one


def permutation(case: Case) -> None:
    at, order = ask(case, TOKENS), torch.randperm(TOKENS)
    moved = at.each(lambda x: x[:, :, order])
    same = torch.allclose(out(case, moved), out(case, at)[:, :, order], rtol=1e-9, atol=1e-9)
    keys = at._replace(k=at.k[:, :, order], v=at.v[:, :, order])
    if case.name in POSITIONAL:
        assert not same or not torch.allclose(out(case, keys), out(case, at), rtol=1e-3), "it has places after all"
    else:
        assert same


LONG = {"linformer": {"rank": 4, "length": 65536}, "cosformer": {"length": 65536}, "topk": {"k": 5}}


def half_precision(case: Case) -> None:
    """65,536 keys whose features add up; where all pairs would be formed, two queries ask."""
    options = case.options | LONG.get(case.name, {})
    case = case._replace(made=mechanism(case.name, **options), options=options)
    linear = case.name in (*SQUARE, "mlla", "angular", "delta", "efla", "decay")
    at = ask(case, 65536 if linear else 2, 65536, batch=1, heads=(1, 1), dtype=torch.float32)
    at = at._replace(q=at.q.abs(), k=at.k.abs() / 4, v=at.v.abs())
    for dtype in (torch.float16, torch.bfloat16):
        low = at.to(dtype)
        wide = out(case, low.to(torch.float64))
        given, exact = out(case, low).double(), wide.clamp(-1e4, 1e4)  # what half precision can hold
        held = wide.abs() < 1e4
        assert given[held].isfinite().all()
        ulp = torch.finfo(dtype).eps * exact.abs().max()
        assert (given - exact).abs()[held].max() <= 4 * ulp if held.any() else True


def all_padding(case: Case) -> None:
    at = ask(case, TOKENS)._replace(key_mask=torch.zeros(2, TOKENS, dtype=torch.bool))
    for form in case.forms:
        given = out(case, at, form)
        assert torch.equal(given, torch.zeros_like(given))


def one_token(case: Case) -> None:
    at = ask(case, 1)
    for form in case.forms:
        given = out(case, at, form)
        assert given.isfinite().all()
        if case.made.rows_sum_to_one:
            torch.testing.assert_close(given, at.v, **CLOSE)


def untouched(case: Case) -> None:
    at = ragged(case)
    before = [x.clone() for x in (*at[:4], *at.inputs.values())]
    for form in case.forms:
        out(case, at, form)
        attention_weights(*at[:2], case.made, is_causal=form, key_mask=at.key_mask, **at.extra)
    if case in STATEFUL:
        _, state = attention_with_state(*at[:3], case.made, key_mask=at.key_mask, **at.extra)
        kept = [x.clone() for x in state]
        attention_with_state(*at[:3], case.made, state, key_mask=at.key_mask, **at.extra)
        assert all(map(torch.equal, state, kept))
    assert all(map(torch.equal, (*at[:4], *at.inputs.values()), before))


def determinism(case: Case) -> None:
    at = ask(case, TOKENS)
    first = out(case, at)
    torch.manual_seed(9)
    assert torch.equal(out(case, at), first)


def gradients(case: Case) -> None:
    at = ask(case, 3, heads=(1, 1), dims=(2, 2), batch=1)
    leaves = [x.clone().requires_grad_() for x in at[:3]]
    for form in case.forms:
        assert torch.autograd.gradcheck(
            lambda q, k, v, form=form: attention(q, k, v, case.made, is_causal=form, **at.extra), leaves
        )


def packing(case: Case) -> None:
    """Sequences in one call, padded with a mask or packed without padding, are each as alone."""
    at = ragged(case)
    lengths = (TOKENS, 0, TOKENS) if at.picture else (TOKENS, 0, 1, 6)  # pictures of one size
    rows = several(case, *((n, n) for n in lengths))
    for form in case.forms:
        whole = out(case, at, form)
        for b, length in enumerate((TOKENS, 6)):
            alone = at.row(b).tokens(0, length)._replace(key_mask=None)
            torch.testing.assert_close(whole[b : b + 1, :, :length], out(case, alone, form), **CLOSE)
        call = {"is_causal": form, **({"grid": rows[0].extra["grid"]} if at.picture else {})}
        together = attention(*packed(rows)[:3], case.made, inputs=packed(rows).inputs, **call)
        for row, given in zip(rows, together.unbind(), strict=True):
            torch.testing.assert_close(given[None], out(case, row, form), rtol=0, atol=1e-12)


INVARIANTS = (
    *(padding_content, batch_mates, causality, forms_agree, explicit_weights, row_sums, permutation),
    *(half_precision, all_padding, one_token, untouched, determinism, gradients, packing),
)


def test_the_table_has_every_mechanism_and_all_fourteen():
    assert set(BY_NAME) == set(list_mechanisms())
    assert len(INVARIANTS) == 14


@pytest.mark.parametrize("invariant", INVARIANTS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("name", list_mechanisms())
def test_the_invariant_holds(name: str, invariant):
    invariant(BY_NAME[name])
