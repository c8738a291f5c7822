"""Which calls the kernels take. If they refuse one, `auto` runs torch, and `backend="triton"` raises the reason.

`auto` takes the kernels on GPUs with recorded evidence, and on others if they pass their check there (`self_check`).
"""

import logging
import warnings

import torch
from torch import Tensor

from softless.algebra.kernel_spec import NEAR, RULES, KernelSpec
from softless.kernels.common.arithmetic import INTERPRETED
from softless.kernels.common.launch import PTXAS, PTXAS_NEEDED
from softless.kernels.common.limits import widest_heads, widest_solved

WIDEST = 128  # on every GPU; of rules the memory and its gradient stay in registers
# Compute capabilities for which `make gpu` has written evidence to benchmarks/results: `auto` takes the kernels there.
TESTED: frozenset[tuple[int, int]] = frozenset({(9, 0)})
# The feature maps and readers with exponential keys that have causal kernels.
EXPONENTIAL = ("exp", "exp", "divide"), ("softmax", "exp", "channel")
PARALLEL = "blend", "regress"  # readers without causal kernels
UNRECORDED = (NEAR,)  # readers without evidence on any GPU, until `make gpu` has run them
WARNED: list[str] = []
LOG = logging.getLogger("softless")


def refusal(
    spec: KernelSpec | None, name: str, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, device: torch.device
) -> str | None:
    """Return why the kernels cannot run this call on a device, or None."""
    if spec is None:
        return f"no kernel computes mechanism '{name}' with these options"
    if device.type != "cuda" and not INTERPRETED.value:
        return f"Triton runs on {device.type} only in its interpreter (TRITON_INTERPRET=1)"
    if is_causal and spec.reader in PARALLEL:
        return f"mechanism '{name}' has no causal kernel"
    if spec.reader == NEAR and not is_causal:
        return f"mechanism '{name}' has only a causal kernel"
    if q.dtype == torch.float64:
        return "the kernels take float16, bfloat16 and float32, and q is torch.float64"
    width = max(q.shape[3], v.shape[3])
    exponential = is_causal and "exp" in (spec.phi_q, spec.phi_k)
    widest = WIDEST if spec.reader in (NEAR, *RULES) or exponential or width <= WIDEST else widest_heads(device)
    if spec.reader in ("regress", NEAR):
        widest = widest_solved(device)
    if width > widest:
        return f"the kernels take head dimensions up to {widest}, and q has {q.shape[3]}, v has {v.shape[3]}"
    if exponential and spec[:3] not in EXPONENTIAL:
        combination = f"phi_q {spec.phi_q!r}, phi_k {spec.phi_k!r}, reader {spec.reader!r}"
        return (
            "the causal kernels take exponential features in a division of exp by exp, or in 'efficient', "
            f"got {combination}"
        )
    if is_causal and q.shape[2] != k.shape[2]:
        return f"the causal kernels need as many queries as keys, got {q.shape[2]} and {k.shape[2]}"
    if torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling():  # compiling, torch 2.11 reports both
        return "exported programs use plain torch operators"
    return None


def untested(
    device: torch.device, spec: KernelSpec, is_causal: bool, dtype: torch.dtype, *, explained: bool = False
) -> str | None:
    """Return why `auto` does not use the kernels on a device, or None.

    A GPU without recorded evidence checks them at the first call. With `explained`, nothing runs, and a GPU that would
    check them counts as one that uses them. While torch.compile traces or a CUDA graph is captured, no check can run:
    without an earlier verdict, torch runs, and a compiled function keeps torch until it is compiled again.
    """
    if device.type != "cuda":
        return None
    if not torch.cuda.is_available():
        return "there is no CUDA device here to ask about"
    if spec.reader in RULES and PTXAS is not None and PTXAS < PTXAS_NEEDED:
        version, needed = (".".join(map(str, numbers)) for numbers in (PTXAS, PTXAS_NEEDED))
        return (
            f"ptxas {version}, which TRITON_PTXAS_PATH names, assembles the {spec.reader} rule's kernels wrong for "
            f"some heads: {needed} or later is needed; backend='triton' runs them"
        )
    if is_recorded(device) and spec.reader not in UNRECORDED:
        return None
    from softless.kernels.common import self_check

    busy = torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing()
    if explained or busy:
        verdict = self_check.recall(device, *spec[:4], is_causal, dtype)
    else:
        operator = self_check.OperatorKind.of(spec, is_causal, dtype)
        if self_check.known(device, operator) is None:
            form = f"{'causal ' if is_causal else ''}{spec.reader}, {operator.dtype}"
            LOG.warning("softless checks the kernels of this call (%s) on this GPU, once: it may take a minute", form)
        verdict = self_check.verdict(device, operator)
    if verdict is None:
        unchecked = "the kernels are not yet checked on this GPU, which a plain call with enough free memory does"
        return None if explained else f"{unchecked}; backend='triton' runs them"
    if verdict.passed:
        return None
    reason = f"the kernels failed their check on this GPU: {verdict.reason}; backend='triton' runs them"
    if not explained and not busy:
        warn_once(f"softless runs torch because {reason}")
    return reason


def evidence(device: torch.device, spec: KernelSpec, is_causal: bool, dtype: torch.dtype) -> str:
    """Return what is known about the kernels on a device that they run on."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return "the kernels take this call"
    if is_recorded(device) and spec.reader not in UNRECORDED:
        return f"the kernels take this call, with recorded evidence for {architecture(device)}"
    from softless.kernels.common import self_check

    verdict = self_check.recall(device, *spec[:4], is_causal, dtype)
    if verdict is None:
        return "the kernels take this call, if the check passes that the first call on this GPU runs"
    return f"the kernels take this call: checked on this GPU on {verdict.date[:10]}, not measured"


def is_recorded(device: torch.device) -> bool:
    """Return whether there is recorded evidence for a GPU. AMD's compute capabilities mean something else."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) in TESTED


def architecture(device: torch.device) -> str:
    return "compute capability {}.{}".format(*torch.cuda.get_device_capability(device))


def warn_once(message: str) -> None:
    """Warn about the first failure in a process."""
    if not WARNED:
        WARNED.append(message)
        warnings.warn(message, stacklevel=2)
