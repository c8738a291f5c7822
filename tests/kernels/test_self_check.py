"""The check of the kernels on a GPU without recorded evidence. Triton's interpreter stands in for the GPU."""

import json
import warnings
from pathlib import Path

import pytest
import torch

from softless import attention
from softless.algebra.kernel_spec import KernelSpec
from softless.kernels.common import choice, self_check
from softless.kernels.common.self_check import OperatorKind, SampleCall, Verdict

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
LINEAR = KernelSpec("elu", "elu", "divide")
SPECS = {
    "linear": LINEAR,
    "inline": KernelSpec("identity", "identity", "subtract"),
    "taylor": KernelSpec("unit", "unit", "divide", constant=True),
    "efficient": KernelSpec("softmax", "exp", "channel"),
    "exp": KernelSpec("exp", "exp", "divide"),
    "relu": KernelSpec("relu", "relu", "divide"),
    "signed": KernelSpec("leaky_relu", "identity", "divide"),
    "none": KernelSpec("elu", "softmax", "none"),
    "blend": KernelSpec("elu", "elu", "blend"),
    "regress": KernelSpec("identity", "identity", "regress"),
    "delta": KernelSpec("identity", "identity", "delta"),
    "efla": KernelSpec("identity", "identity", "efla"),
    "nearfar": KernelSpec("shared", "shared", "near"),
    "nearfar without maps": KernelSpec("identity", "identity", "near"),
}
RULES = "delta", "efla"
FORMS = [(name, False) for name in SPECS if name not in (*RULES, "nearfar", "nearfar without maps")]
FORMS += [(name, True) for name in SPECS if name not in ("blend", "regress")]
OPERATOR = OperatorKind.of(LINEAR, False, torch.float16)
# numpy says it where a GPU says nothing: in branches not taken.
quiet = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")
interpreted = pytest.mark.kernels


def small(operator: OperatorKind) -> tuple[SampleCall, ...]:
    """Return calls that the interpreter can do in a second."""
    masked = SampleCall(9, 9, 6, 5, groups=1, masked=True)
    if operator.reader in RULES or operator.is_causal:
        if operator.reader == "near":  # longer than the window
            masked = masked._replace(queries=70, keys=70)
        return (
            (masked,)
            if "exp" in operator[:2] or operator.reader == "near"
            else (masked, SampleCall(5, 5, 4, 4, step=True))
        )
    return masked, SampleCall(7, 11, 4, 6), SampleCall(7, 7, 4, 4, grid=(2, 3))


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No verdict and no warning of an earlier test, a cache folder of its own, and small calls."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(self_check, "VERDICTS", {})
    monkeypatch.setattr(choice, "WARNED", [])
    monkeypatch.setattr(OperatorKind, "cases", small)


@quiet
@interpreted
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.float32, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "is_causal"), FORMS)
def test_right_kernels_pass(name, is_causal, dtype):
    assert self_check.failure(CPU, OperatorKind.of(SPECS[name], is_causal, dtype)) is None


def inexact(out, *, forward: float = 0.0, backward: float = 0.0):
    return out + forward * out.detach().abs().max() + backward * (out - out.detach())


MUTANTS = {
    "an output off by 1 %": ({"forward": 0.01}, "the output was off by"),
    "gradients off by 2 %": ({"backward": 0.02}, "the gradient of q was off by"),
    "an output that is not a number": ({"forward": torch.nan}, "the output was off by inf ulp"),
}


@interpreted
@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_wrong_kernels_fail_with_the_result_that_is_wrong(monkeypatch, mutant, dtype):
    real, (change, said) = self_check.attend_op, MUTANTS[mutant]
    monkeypatch.setattr(self_check, "attend_op", lambda *given: (inexact(real(*given)[0], **change), None))
    reason = self_check.failure(CPU, OperatorKind.of(LINEAR, False, dtype))
    assert reason.startswith(said)
    assert "are allowed with 9 queries, 9 keys, heads of 6 and 5 in float" in reason


@interpreted
@pytest.mark.parametrize("times", [1.01, 0.5, 0.0])
@pytest.mark.parametrize("name", ["nearfar", "nearfar without maps"])
def test_a_wrong_gradient_of_the_gain_fails_in_float32(monkeypatch, name, times):
    """Though it is held to the sum of its terms, which cancel."""
    real = self_check.near_check.on_kernels

    def wrong(q, k, v, mask, scale, gain, *matrix):
        return real(q, k, v, mask, scale, gain.detach() + times * (gain - gain.detach()), *matrix)

    monkeypatch.setattr(self_check.near_check, "on_kernels", wrong)
    reason = self_check.failure(CPU, OperatorKind.of(SPECS[name], True, torch.float32))
    assert reason.startswith("the gradient of the gain was off by")


def raising(error: Exception):
    def run(*_: object) -> None:
        raise error

    return run


def test_a_kernel_that_does_not_compile_fails_with_the_error_on_one_line(monkeypatch):
    monkeypatch.setattr(self_check, "attend_op", raising(RuntimeError("out of resource:\nshared memory")))
    reason = self_check.failure(CPU, OPERATOR)
    assert reason.startswith("RuntimeError: out of resource: shared memory with 9 queries")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """A GPU without evidence. Its facts can be changed; `checks` counts how often it was checked, with `result`."""
    facts: dict[str, object] = {"driver": "580.1", "capability": (8, 6), "checks": 0, "result": None}

    def check(_device: torch.device, _operator: OperatorKind) -> str | None:
        facts["checks"] += 1
        if isinstance(facts["result"], Exception):
            raise facts["result"]
        return facts["result"]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: facts["capability"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA L4")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(self_check, "driver", lambda: facts["driver"])
    monkeypatch.setattr(self_check, "failure", check)
    return facts


def another_process() -> None:
    self_check.VERDICTS.clear()


def files() -> list[Path]:
    return sorted(self_check.folder().glob("*"))


@pytest.mark.parametrize("result", [None, "the output was off by 9.0 ulp"])
def test_a_verdict_is_kept_for_later_processes(gpu, result):
    gpu["result"] = result
    first = self_check.verdict(CUDA, OPERATOR)
    assert first == (result is None, first.date, result or "")
    another_process()
    assert self_check.known(CUDA, OPERATOR) == self_check.verdict(CUDA, OPERATOR) == first
    assert gpu["checks"] == 1
    assert len(files()) == 1


@pytest.mark.parametrize("change", ["driver", "dtype", "form"])
def test_another_driver_dtype_or_form_is_checked_anew(gpu, change):
    self_check.verdict(CUDA, OPERATOR)
    other = OPERATOR
    if change == "driver":
        gpu["driver"] = "590.2"
    else:
        other = OPERATOR._replace(**{"dtype": "bfloat16"} if change == "dtype" else {"is_causal": True})
    assert self_check.known(CUDA, other) is None
    self_check.verdict(CUDA, other)
    assert gpu["checks"] == 2


@pytest.mark.parametrize("text", ["", "{", "[]", '{"passed": true}', "null", "\x00"])
def test_a_damaged_file_is_ignored_and_replaced(gpu, text):
    self_check.verdict(CUDA, OPERATOR)
    (path,) = files()
    path.write_text(text)
    another_process()
    assert self_check.known(CUDA, OPERATOR) is None
    assert self_check.verdict(CUDA, OPERATOR).passed
    another_process()
    assert self_check.known(CUDA, OPERATOR).passed
    assert gpu["checks"] == 2


def test_a_file_about_another_machine_is_ignored(gpu):
    self_check.verdict(CUDA, OPERATOR)
    (path,) = files()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"machine": "another"}))
    another_process()
    assert self_check.known(CUDA, OPERATOR) is None


def test_a_folder_that_cannot_be_written_is_no_error(gpu, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert self_check.verdict(CUDA, OPERATOR).passed
    assert self_check.verdict(CUDA, OPERATOR).passed
    assert gpu["checks"] == 1


def test_too_little_memory_gives_no_verdict(gpu):
    gpu["result"] = torch.OutOfMemoryError("out of memory")
    assert self_check.verdict(CUDA, OPERATOR) is None
    assert "not yet checked" in choice.untested(CUDA, LINEAR, False, torch.float16)
    gpu["result"] = None
    assert choice.untested(CUDA, LINEAR, False, torch.float16) is None


def test_auto_runs_kernels_that_passed_and_says_once_that_it_checks_them(gpu, capsys):
    for _ in range(2):
        assert choice.untested(CUDA, LINEAR, False, torch.float16) is None
    assert gpu["checks"] == 1
    said = "softless checks the kernels of this call (divide, float16) on this GPU, once: it may take a minute\n"
    assert capsys.readouterr().err == said


def test_auto_runs_torch_and_warns_once_where_the_kernels_failed(gpu):
    gpu["result"] = "the output was off by 9.0 ulp where 2.0 are allowed"
    with pytest.warns(
        UserWarning, match="softless runs torch because .* off by 9.0 ulp where 2.0 are allowed"
    ) as caught:
        reasons = {choice.untested(CUDA, LINEAR, False, dtype) for dtype in (torch.float16, torch.bfloat16)}
    assert len(caught) == 1
    assert "\n" not in str(caught[0].message)
    assert all(reason.startswith("the kernels failed their check on this GPU: the output was") for reason in reasons)


def test_recorded_evidence_needs_no_check(gpu):
    gpu["capability"] = (9, 0)
    assert choice.untested(CUDA, LINEAR, False, torch.float16) is None
    assert gpu["checks"] == 0


def test_near_and_far_tokens_are_checked_on_every_gpu(gpu):
    gpu["capability"] = (9, 0)
    assert choice.untested(CUDA, SPECS["nearfar"], True, torch.float16) is None
    assert gpu["checks"] == 1
    assert "checked on this GPU" in choice.evidence(CUDA, SPECS["nearfar"], True, torch.float16)


def test_a_compute_capability_of_amd_is_not_that_of_nvidia(gpu, monkeypatch):
    """(9, 0) is an MI250 there."""
    gpu["capability"] = (9, 0)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert choice.untested(CUDA, LINEAR, False, torch.float16) is None
    assert gpu["checks"] == 1


def test_no_check_runs_while_a_cuda_graph_is_captured(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert "not yet checked on this GPU" in choice.untested(CUDA, LINEAR, False, torch.float16)
    assert gpu["checks"] == 0


def test_an_explanation_runs_no_check_and_says_what_is_known(gpu):
    def known() -> str:
        assert choice.untested(CUDA, LINEAR, False, torch.float16, explained=True) is None
        return choice.evidence(CUDA, LINEAR, False, torch.float16)

    assert known().endswith("if the check passes that the first call on this GPU runs")
    assert gpu["checks"] == 0
    verdict = self_check.verdict(CUDA, OPERATOR)
    assert known().endswith(f"checked on this GPU on {verdict.date[:10]}, not measured")
    gpu["capability"] = (9, 0)
    assert known().endswith("with recorded evidence for compute capability 9.0")


def test_an_explanation_of_kernels_that_failed_does_not_warn(gpu):
    self_check.VERDICTS[self_check.machine(CUDA), OPERATOR] = Verdict(False, "2026-11-18", "dk was wrong")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "dk was wrong" in choice.untested(CUDA, LINEAR, False, torch.float16, explained=True)


@pytest.mark.compile
@pytest.mark.parametrize("checked", [False, True])
def test_torch_compile_reads_a_verdict_while_it_traces(monkeypatch, checked):
    torch.compiler.reset()
    monkeypatch.setattr(self_check, "machine", lambda _: "NVIDIA L4")
    if checked:
        self_check.VERDICTS["NVIDIA L4", OPERATOR] = Verdict(True, "2026-11-18")

    def passed(x: torch.Tensor) -> torch.Tensor:
        spec = KernelSpec("elu", "elu", "divide")
        found = self_check.recall(CUDA, *spec[:4], False, torch.float16)
        return x + (found is not None and found.passed)

    assert torch.compile(passed, fullgraph=True, backend="eager")(torch.zeros(1)).item() == float(checked)


@interpreted
def test_the_check_sees_nothing_of_its_caller(gpu, monkeypatch):
    """Neither no_grad, a default dtype's autocast nor a counter of operators."""
    from torch.utils.flop_counter import FlopCounterMode

    monkeypatch.undo()
    monkeypatch.setattr(OperatorKind, "cases", small)
    monkeypatch.setattr(self_check, "machine", lambda _: "interpreter")
    monkeypatch.setattr(self_check, "_write", lambda *_: None)
    monkeypatch.setattr(self_check, "_read", lambda *_: None)
    with torch.no_grad(), torch.autocast("cpu"), FlopCounterMode(display=False) as counter:
        found = self_check.verdict(CPU, OperatorKind.of(LINEAR, False, torch.float32))
    assert found.passed, found.reason
    assert counter.get_total_flops() == 0


def test_auto_on_a_cpu_runs_no_check(gpu):
    x = torch.randn(1, 1, 3, 4)
    attention(x, x, x, "linear")
    assert gpu["checks"] == 0
