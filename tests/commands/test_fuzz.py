"""Command lines nobody would write: an exit code, perhaps a sentence, never a traceback (R24)."""

import random

import pytest

VERBS = ["list", "explain", "study", "data", "", "Explain", "train", "probe", "--", "-", "--help", "--version", "-h"]
NAMES = [
    "check",
    "inline",
    "linear",
    "softmax",
    "general",
    "hydra",
    "angular",
    "taylor",
    "threshold",
    "focused",
    "efficient",
]
OPTIONS = ["--shape", "--keys", "--kv-heads", "--causal", "--dtype", "--device", "--option", "--json", "--out"]
OPTIONS += [
    "--models",
    "--image-size",
    "--quick",
    "--tokens",
    "--seed",
    "--help",
    "--no-such",
    "--workers",
    "-x",
    "--shape=",
    "--json=1",
    "--",
]
VALUES = ["1,8,64,16", "1,1,1,1", "2,4,9,3", "0,0,0,0", "1,2,3", "-1,2,3,4", "a,b,c,d", ",,,", "1e3,1,1,1", "٣,1,1,1"]
VALUES += ["999999999999999,1,1,1", "1,1,999999999999999,1", "1,1,1,99999999", "1,1048576,1048576,1048576"]
VALUES += ["0", "1", "3", "7", "-5", "16", "8,16", "9" * 50, "1.5", "nan", "inf", "", " ", "\n", "\t", "cpu", "cuda"]
VALUES += [
    "float32",
    "bfloat16",
    "float16",
    "float64",
    "int8",
    "phi=relu",
    "phi=exp",
    "phi=affine_relu",
    "phi=",
    "=",
    "=x",
]
VALUES += [
    "phi_k=softmax",
    "t=0.2",
    "t=-1",
    "t=nan",
    "normalize=none",
    "normalize=1",
    "order=2",
    "order=two",
    "tau=inf",
]
VALUES += [
    "tau=0",
    "expansion=mean",
    "tail=mean",
    "exact=true",
    "p=3",
    "p=1e9",
    "learned_scale=true",
    "sim=dot",
    "a=b=c",
]
VALUES += ["[red]x[/red]", "{}", "%s", "\x1b[31m", "\udcff", "naïve", "💥", "../x", "/dev/null", "/proc/1/x", "a" * 300]
VALUES += ["inline_deit_tiny", "swin_tiny", "64x64", "16", "mechanism=linear", "local=false", "window=7", "window=x"]
VALUES += ["out", "'", '"', "$(id)", "\\", "\x00", "None", "True"]


def command_line(rng):
    words = [rng.choice(VERBS[:3] * 6 + VERBS)]
    if rng.random() < 0.7:
        words.append(rng.choice(NAMES * 3 + VALUES))
    for _ in range(rng.randrange(6)):
        words.append(rng.choice(OPTIONS))
        if rng.random() < 0.8:
            words.append(rng.choice(VALUES))
    return words


def assert_polite(softless, words):
    result = softless(*words)
    told = f"{words}: {result.exit_code}\n{result.output}\n{result.exception!r}"
    assert result.exit_code in (0, 2, 3), told
    assert result.exception is None or isinstance(result.exception, SystemExit), told
    assert "Traceback" not in result.output, told
    if result.exit_code == 3:
        assert result.stderr.count("\n") == 1, told


@pytest.mark.parametrize("lines", [100, *(pytest.param(count, marks=pytest.mark.slow) for count in (300, 5000))])
def test_command_lines_give_no_traceback(softless, lines):
    rng = random.Random(24)
    for _ in range(lines):
        assert_polite(softless, command_line(rng))


def test_a_few_in_a_process_of_their_own(fresh):
    rng = random.Random(3)
    tried = 0
    while tried < 6:
        words = command_line(rng)
        if "study" in words or any("\x00" in word for word in words):
            continue
        result = fresh(*words, errors="replace")
        assert result.returncode in (0, 2, 3), words
        assert "Traceback" not in result.stderr, words
        tried += 1
