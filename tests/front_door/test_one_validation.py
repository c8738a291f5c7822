"""Each public call validates its arguments once, and explains the keywords that it does not have."""

import pytest
import torch
from torch import distributed as dist

import softless
from softless import functional, validation
from softless.errors import ArgumentError
from softless.functional import attention_qkv, attention_with_residual
from tests.front_door.arguments import TENSORS, some

Q, K, V = TENSORS.values()
QKV, TAPS, PICTURE = some(2, 6, 3, 2, 4), some(2, 2, 9, 4), {"grid": (2, 3)}

CALLS = {
    "attention": lambda: softless.attention(Q, K, V),
    "attention by reference": lambda: softless.attention(Q, K, V, backend="reference"),
    "attention_weights": lambda: softless.attention_weights(Q, K),
    "attention_with_state": lambda: softless.attention_with_state(Q, K, V),
    "attention_with_residual": lambda: attention_with_residual(*QKV.permute(2, 0, 3, 1, 4), TAPS, **PICTURE),
    "attention_qkv": lambda: attention_qkv(QKV),
    "attention_qkv with taps": lambda: attention_qkv(QKV, taps=TAPS, **PICTURE),
    "nn.Attention": lambda: softless.nn.Attention(8, 2)(some(2, 6, 8)),
    "nn.Attention with residual": lambda: softless.nn.Attention(8, 2, local=True)(some(2, 6, 8), (2, 3)),
}
DOORS = [
    *(functional.attention, functional.attention_weights, functional.attention_with_state),
    *(attention_with_residual, attention_qkv, softless.threshold_report, softless.parallel.attention),
]


@pytest.fixture
def validations(monkeypatch):
    """Counts the calls of `prepare`, which checks every argument."""
    counted = []

    def count(*args, **options):
        counted.append(args)
        return prepare(*args, **options)

    prepare = validation.prepare
    monkeypatch.setattr(validation, "prepare", count)
    return counted


@pytest.mark.parametrize("name", CALLS)
def test_a_public_call_validates_its_arguments_once(name, validations):
    CALLS[name]()
    assert len(validations) == 1


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_over_ranks_validates_its_arguments_once(is_causal, validations):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        softless.parallel.attention(Q, K, V, is_causal=is_causal)
    finally:
        dist.destroy_process_group()
    assert len(validations) == 1


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)
@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("attn_mask", "pass key_mask .* is_causal=True, or a bias to add to the scores"),
        ("dropout_p", "attn_drop of softless.nn.Attention"),
        ("enable_gqa", "k and v may simply have fewer heads than q"),
        ("key_masks", "did you mean 'key_mask'"),
        ("xyz", "it takes "),
    ],
)
def test_an_unknown_keyword_is_answered_with_what_to_pass_instead(door, name, hint):
    with pytest.raises(ArgumentError, match=f"^{door.__name__} has no argument '{name}': .*{hint}") as caught:
        door(Q, K, V, **{name: torch.ones(2, 6, dtype=torch.bool)})
    assert "\n" not in str(caught.value)


def test_a_missing_argument_raises_a_type_error():
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'v'"):
        softless.attention(Q, K)
