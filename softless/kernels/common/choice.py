"""Which calls the kernels take. If they refuse one, `auto` runs torch, and `backend="triton"` raises the reason."""

import torch
from torch import Tensor

from softless.algebra.kernel_spec import RULES, KernelSpec
from softless.kernels.common.arithmetic import INTERPRETED
from softless.kernels.common.launch import PTXAS, PTXAS_NEEDED

WIDEST = 256
WIDEST_RULE = 128  # the memory and its gradient stay in registers
# Compute capabilities for which `make gpu` has written evidence to benchmarks/results: `auto` takes the kernels there.
TESTED: frozenset[tuple[int, int]] = frozenset({(9, 0)})


def refusal(
    spec: KernelSpec | None, name: str, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, device: torch.device
) -> str | None:
    """Return why the kernels cannot run this call on a device, or None."""
    if spec is None:
        return f"no kernel computes mechanism '{name}' with these options"
    if device.type != "cuda" and not INTERPRETED.value:
        return f"Triton runs on {device.type} only in its interpreter (TRITON_INTERPRET=1)"
    if q.dtype == torch.float64:
        return "the kernels take float16, bfloat16 and float32, and q is torch.float64"
    widest = WIDEST_RULE if spec.reader in RULES else WIDEST
    if max(q.shape[3], v.shape[3]) > widest:
        return f"the kernels take head dimensions up to {widest}, and q has {q.shape[3]}, v has {v.shape[3]}"
    if is_causal and "exp" in (spec.phi_q, spec.phi_k):
        return "the causal kernels have no running maximum for exponential features"
    if is_causal and q.shape[2] != k.shape[2]:
        return f"the causal kernels need as many queries as keys, got {q.shape[2]} and {k.shape[2]}"
    if torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling():  # compiling, torch 2.11 reports both
        return "exported programs use plain torch operators"
    return None


def untested(device: torch.device, reader: str) -> str | None:
    """Return why `auto` does not use the kernels on a device, or None."""
    if device.type != "cuda":
        return None
    if not torch.cuda.is_available():
        return "there is no CUDA device here to ask about"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) not in TESTED:
        return (
            f"the kernels have no recorded evidence on compute capability {major}.{minor}; backend='triton' runs them"
        )
    if reader not in RULES or PTXAS is None or PTXAS >= PTXAS_NEEDED:
        return None
    version, needed = (".".join(map(str, numbers)) for numbers in (PTXAS, PTXAS_NEEDED))
    return (
        f"ptxas {version}, which TRITON_PTXAS_PATH names, assembles the {reader} rule's kernels wrong for some heads: "
        f"{needed} or later is needed; backend='triton' runs them"
    )
