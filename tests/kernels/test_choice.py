"""Which calls the kernels take: every refusal is a sentence that says what was given and what is needed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from softless import attention, attention_with_state, mechanism
from softless.algebra.kernel_spec import KernelSpec
from softless.errors import ArgumentError, BackendError
from softless.functional import attention_qkv, attention_with_residual
from softless.kernels.common import choice
from softless.mechanisms import Call

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="says what an ordinary process does: unset TRITON_INTERPRET"
)

ROOT = Path(__file__).parents[2]
CUDA = torch.device("cuda")


def tensors(*, dtype: torch.dtype = torch.float32, dims: tuple[int, int] = (4, 4), keys: int = 3):
    return torch.zeros(1, 2, 3, dims[0], dtype=dtype), *(torch.zeros(1, 2, keys, d, dtype=dtype) for d in dims)


def why(made, *, is_causal: bool = False, device: torch.device = CUDA, **options) -> str | None:
    q, k, v = tensors(**options)
    return choice.refusal(made.kernel_spec(1.0), made.name, q, k, v, is_causal, device)


def square(x: torch.Tensor) -> torch.Tensor:
    return x.square()


NO_KERNEL = {
    "softmax": mechanism("softmax"),
    "general": mechanism("general", sim=lambda q, k: (q @ k.mT).square()),
    "threshold": mechanism("threshold"),
    "a callable phi": mechanism("linear", phi=square),
    "a callable phi_k": mechanism("linear", phi_k=square),
    "affine_relu": mechanism("inline", phi="affine_relu"),
    "hydra": mechanism("hydra"),
    "angular": mechanism("angular"),
    "focused": mechanism("focused"),
    "taylor of order 2": mechanism("taylor", order=2),
}


@pytest.mark.parametrize("kind", NO_KERNEL)
def test_a_mechanism_without_a_kernel_is_refused_by_name(kind):
    made, (q, k, v) = NO_KERNEL[kind], tensors()
    inputs = {name: torch.zeros(shape) for name, shape in made.needed(q, k).items()}
    with pytest.raises(BackendError, match=f"backend 'triton' .*no kernel computes mechanism '{made.name}'") as caught:
        attention(q, k, v, made, inputs=inputs, backend="triton")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("call", ["attention", "state", "residual", "packed"])
def test_a_cpu_is_refused_without_the_interpreter(call):
    q, k, v = tensors()
    calls = {
        "attention": lambda: attention(q, k, v, backend="triton"),
        "state": lambda: attention_with_state(q, k, v, backend="triton"),
        "residual": lambda: attention_with_residual(q, k, v, torch.zeros(1, 2, 9, 4), grid=(1, 3), backend="triton"),
        "packed": lambda: attention_qkv(torch.zeros(1, 3, 3, 2, 4), backend="triton"),
    }
    with pytest.raises(BackendError, match=r"'triton' .* on cpu only in its interpreter \(TRITON_INTERPRET=1\)"):
        calls[call]()


REFUSED = {
    "float64": (mechanism("linear"), {"dtype": torch.float64}, "float16, bfloat16 and float32, .* torch.float64"),
    "a wide query": (mechanism("linear"), {"dims": (257, 4)}, "up to 256, and q has 257, v has 4"),
    "a wide value": (mechanism("linear"), {"dims": (4, 257)}, "up to 256, and q has 4, v has 257"),
    "causal exp": (mechanism("inline", phi="exp"), {"is_causal": True}, "exp by exp, .* got .*'subtract'"),
    "causal exp of keys": (mechanism("linear", phi_k="exp"), {"is_causal": True}, "exp by exp, .* phi_q 'elu'"),
    "wide causal exp": (mechanism("efficient"), {"is_causal": True, "dims": (129, 4)}, "up to 128, and q has 129"),
    "causal with more keys": (mechanism("linear"), {"is_causal": True, "keys": 5}, "as many queries .* got 3 and 5"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_refusal_names_the_limit_and_the_value(kind):
    """Asked of a CUDA device, which need not be here."""
    made, options, sentence = REFUSED[kind]
    reason = why(made, **options)
    assert reason is not None
    with pytest.raises(BackendError, match=sentence):
        raise BackendError(reason)


@pytest.mark.parametrize("kind", REFUSED)
def test_the_kernels_take_the_same_call_without_its_obstacle(kind):
    made, options, _ = REFUSED[kind]
    allowed = {"dtype": torch.float16, "dims": (256, 256), "is_causal": False, "keys": 3}
    assert why(made, **{name: allowed[name] for name in options}) is None


FRESH = """
import sys, torch, softless, softless.errors
x = torch.randn(1, 1, 3, 4, requires_grad=True)
softless.attention(x, x, x).sum().backward()
softless.attention(x, x, x, "linear", is_causal=True)
softless.attention_with_state(x, x, x, "linear")
softless.attention_weights(x, x)
print([name for name in sys.modules if name.split(".")[0] == "triton" or name.startswith("softless.kernels")])

sys.modules["triton"] = None  # importing it raises ImportError
softless.attention(x, x, x)
try:
    softless.attention(x, x, x, backend="triton")
except softless.errors.BackendError as error:
    print(error)
"""


def test_auto_on_a_cpu_imports_no_triton_and_does_without_it():
    """What asks for it is told that it is missing."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", FRESH], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout
    loaded, said = done.stdout.splitlines()
    assert loaded == "[]"
    assert said.startswith("backend 'triton' was asked for and cannot run: triton cannot be imported (")


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_mixed_dtypes_and_devices_are_refused_before_any_backend(backend):
    q, k, v = tensors()
    with pytest.raises(ArgumentError, match=r"torch.float32, torch.float16, torch.float32 and must share one dtype"):
        attention(q, k.half(), v, backend=backend)
    with pytest.raises(ArgumentError, match=r"cpu, meta, cpu and must share one device"):
        attention(q, k.to("meta"), v, backend=backend)
    with pytest.raises(ArgumentError, match="key_mask is on meta"):
        attention(q, k, v, key_mask=torch.ones(1, 3, dtype=torch.bool, device="meta"), backend=backend)


def test_auto_never_refuses():
    """What the kernels cannot run, torch does."""
    for made, options, _ in REFUSED.values():
        is_causal = options.get("is_causal", False)
        q, k, v = tensors(**{name: value for name, value in options.items() if name != "is_causal"})
        assert attention(q, k, v, made, is_causal=is_causal).shape == (1, 2, 3, v.shape[3])


def untested(device: torch.device, reader: str) -> str | None:
    return choice.untested(device, KernelSpec("identity", "identity", reader), True, torch.float32)


def test_a_cuda_device_that_is_not_here_cannot_be_asked():
    assert untested(torch.device("cpu"), "subtract") is None
    assert torch.cuda.is_available() or "no CUDA device here" in untested(CUDA, "subtract")


def test_auto_runs_the_delta_rule_on_torch_where_ptxas_is_too_old(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert untested(CUDA, "delta") is None
    monkeypatch.setattr(choice, "PTXAS", (12, 8))
    said = "ptxas 12.8, which TRITON_PTXAS_PATH names, assembles the efla rule's kernels wrong"
    assert said in untested(CUDA, "efla")
    assert untested(CUDA, "subtract") is None


def test_an_unknown_backend_is_refused_with_the_list():
    with pytest.raises(ArgumentError, match="backend 'cuda' is not one of auto, reference, torch, triton"):
        attention(*tensors(), backend="cuda")


def test_a_refusal_can_be_asked_with_meta_tensors():
    """`softless explain` asks with meta tensors about devices that are not here."""
    q, k, v = (x.to("meta") for x in tensors())
    made, call = mechanism("linear"), Call()
    assert choice.refusal(made.kernel_spec(call.scale), made.name, q, k, v, False, CUDA) is None
