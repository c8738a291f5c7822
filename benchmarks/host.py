"""Time calls as users make them: no CUDA graph, no preparation, by the clock.

    python benchmarks/host.py                  all groups of this device, as a table
    python benchmarks/host.py --group host     host, clock, modules, models, causal or ragged; cpu: one CPU thread
    python benchmarks/host.py --json           also writes benchmarks/results/host-DATE.json
    python benchmarks/host.py --page           fills the table of docs/kernels.md from the newest of these files

A small call is over on the device before Python has started the next one, so its time is that of the host. Each row
compares two calls in the same process, in turns, and holds the ratio of their medians to a bar.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu import fill
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

import softless
from softless.bench.contestants import RIVALS, load
from softless.machine import circumstances, timestamp

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "kernels.md"
MARKS = ("<!-- host: python benchmarks/host.py --page -->", "<!-- end of host -->")
Call = Callable[[], object]
TINY = (2, 12, 49, 32)
SHAPES = {(256, 6, 197, 32): 1.0, (128, 12, 49, 32): 0.7, (4, 16, 4096, 64): 1.0}  # the least speed against SDPA
CAUSAL = {(8, 16, 4096, 64): 0.8, (2, 16, 16384, 64): 1.5, (1, 16, 65536, 64): 3.0}  # against fla's fused_chunk
SIDES = {224: (256, 1.0, 0.9), 1024: (16, 1.9, 1.5), 2048: (4, 5.0, 4.3)}  # pixels: batch, compiled and eager bars


@dataclass(frozen=True)
class Row:
    """One ratio. `most`: the ratio of times is at most the bar; otherwise the ratio of speeds is at least the bar."""

    group: str
    what: str
    against: str
    ratio: float
    bar: float
    most: bool
    microseconds: float
    of_rival: float

    @property
    def holds(self) -> bool:
        return self.ratio <= self.bar if self.most else self.ratio >= self.bar


def finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(call: Call, count: int) -> float:
    """Return the seconds of one call, when `count` follow each other."""
    finish()
    start = time.perf_counter()
    for _ in range(count):
        call()
    finish()
    return (time.perf_counter() - start) / count


def in_turns(ours: Call, rival: Call, rounds: int = 15, at_least: float = 0.02) -> tuple[float, float]:
    """Return the median seconds of two calls, measured in turns."""
    for call in (ours, rival):
        seconds(call, 3)
    counts = [max(1, round(at_least / seconds(call, 3))) for call in (ours, rival)]
    laps = [(seconds(ours, counts[0]), seconds(rival, counts[1])) for _ in range(rounds)]
    return statistics.median(lap[0] for lap in laps), statistics.median(lap[1] for lap in laps)


def slower(group: str, what: str, against: str, ours: Call, rival: Call, bar: float) -> Row:
    mine, other = in_turns(ours, rival)
    return Row(group, what, against, mine / other, bar, True, 1e6 * mine, 1e6 * other)


def faster(group: str, what: str, against: str, ours: Call, rival: Call, bar: float) -> Row:
    mine, other = in_turns(ours, rival)
    return Row(group, what, against, other / mine, bar, False, 1e6 * mine, 1e6 * other)


def draw(shape: tuple[int, ...], device: str, dtype: torch.dtype, grad: bool = False) -> list[Tensor]:
    return [torch.randn(shape, device=device, dtype=dtype).requires_grad_(grad) for _ in range(3)]


def both_passes(attend: Callable[..., Tensor], leaves: list[Tensor]) -> Call:
    upstream = torch.randn_like(attend(*leaves))
    return lambda: torch.autograd.grad(attend(*leaves), leaves, upstream)


def host() -> Iterator[Row]:
    """Calls whose time is that of the host."""
    q, k, v = draw(TINY, "cuda", torch.bfloat16)
    leaves = draw(TINY, "cuda", torch.bfloat16, grad=True)
    token = [x[:, :, :1] for x in (q, k, v)]
    _, state = softless.attention_with_state(q, k, v, "linear")
    calls = {
        "inline": ({"mechanism": "inline"}, 2.0, 1.7),
        "linear": ({"mechanism": "linear"}, 2.0, 1.7),
        "causal linear": ({"mechanism": "linear", "is_causal": True}, 2.5, 2.0),
        "causal inline": ({"mechanism": "inline", "is_causal": True}, 2.5, 2.0),
    }
    for name, (options, forward, backward) in calls.items():
        ours = partial(softless.attention, **options)
        rival = partial(sdpa, is_causal=options.get("is_causal", False))
        one = partial(ours, q, k, v), partial(rival, q, k, v)
        yield slower("host", f"{name} forward {list(TINY)}", "SDPA", *one, forward)
        two = both_passes(ours, leaves), both_passes(rival, leaves)
        yield slower("host", f"{name} forward + backward", "SDPA", *two, backward)
    step = partial(softless.attention_with_state, *token, "linear", state)
    yield slower("host", "decode step", "SDPA's forward", step, partial(sdpa, q, k, v), 2.5)


def clock() -> Iterator[Row]:
    """Shapes of vision models, where the device has something to do."""
    for shape, bar in SHAPES.items():
        q, k, v = draw(shape, "cuda", torch.bfloat16)
        calls = partial(softless.attention, q, k, v), partial(sdpa, q, k, v)
        yield faster("clock", f"inline forward {list(shape)}", "SDPA", *calls, bar)


def modules() -> Iterator[Row]:
    from timm.layers import Attention

    theirs = Attention(192, num_heads=6, qkv_bias=True).to("cuda", torch.bfloat16)
    layer = softless.nn.Attention(192, 6, "inline", local=True).to("cuda", torch.bfloat16)
    for batch in (2, 64):
        x = torch.randn(batch, 196, 192, device="cuda", dtype=torch.bfloat16)
        what = f"nn.Attention(192, 6, 'inline', local=True) forward [{batch}, 196, 192]"
        calls = partial(layer, x, grid=(14, 14)), partial(theirs, x)
        with torch.no_grad():
            yield slower("modules", what, "timm's", *calls, 2.5)
        yield slower("modules", what + ", grad", "timm's", *calls, 2.5)


@cache
def pair(side: int) -> tuple[nn.Module, nn.Module]:
    import timm

    ours = softless.create_model("inline_deit_tiny", img_size=side).to("cuda", torch.bfloat16).eval()
    theirs = timm.create_model("deit_tiny_patch16_224", img_size=side).to("cuda", torch.bfloat16).eval()
    return ours, theirs


def models() -> Iterator[Row]:
    """Images per second of InLine-DeiT-T and timm's DeiT-T."""
    for side, (batch, compiled, eager) in SIDES.items():
        x = torch.randn(batch, 3, side, side, device="cuda", dtype=torch.bfloat16)
        for way, bar in (("eager", eager), ("torch.compile", compiled)):
            ours, theirs = pair(side) if way == "eager" else map(torch.compile, pair(side))
            what = f"InLine-DeiT-T {side} px, batch {batch}, {way}"
            with torch.no_grad():
                yield faster("models", what, "timm", partial(ours, x), partial(theirs, x), bar)
        torch.compiler.reset()


def causal() -> Iterator[Row]:
    """Training steps of causal linear attention, against fla's kernels if it is installed."""
    if find_spec("fla") is None:
        return
    chunk, fused = (
        next(rival for rival in RIVALS if rival.label == label) for label in ("fla chunk", "fla fused_chunk alone")
    )
    for shape, bar in CAUSAL.items():
        leaves = draw(shape, "cuda", torch.bfloat16, grad=True)
        theirs = [chunk.lay(x.detach()).requires_grad_() for x in leaves]
        ours = both_passes(partial(softless.attention, mechanism="linear", is_causal=True), leaves)
        what = f"causal linear forward + backward {list(shape)}"
        for rival, least in ((chunk, 5.0), (fused, bar)):
            formula = load(rival, softless.mechanism("linear"))
            yield faster("causal", what, rival.label, ours, both_passes(formula, theirs), least)


def ragged() -> Iterator[Row]:
    """Sequences of different lengths as jagged nested tensors, against the same sequences padded, with a key mask."""
    longest, heads, dim = 16384, 32, 64
    uneven = [longest, *(round(longest * (i % 16) / 20) for i in range(1, 32))]
    batches = ((uneven, "padding", 2.0), ([longest] * 16, "dense", 0.9))
    for lengths, against, bar in batches:
        for is_causal in (False, True):
            what = (
                f"{'causal ' * is_causal}linear, {len(lengths)} sequences of {sum(lengths) / len(lengths):.0f} tokens"
            )
            packs, padded, mask = packed_and_padded(lengths, longest, heads, dim)
            ours = partial(softless.attention, mechanism="linear", is_causal=is_causal)
            rival = partial(ours, key_mask=mask if against == "padding" else None)
            with torch.no_grad():
                yield faster("ragged", f"{what}, forward", against, partial(ours, *packs), partial(rival, *padded), bar)
            for x in (*packs, *padded):
                x.requires_grad_()
            calls = both_passes(ours, packs), both_passes(rival, padded)
            yield faster("ragged", f"{what}, forward + backward", against, *calls, bar)


def packed_and_padded(
    lengths: list[int], longest: int, heads: int, dim: int
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    offsets = torch.tensor([0, *lengths], device="cuda").cumsum(0)
    values = [torch.randn(sum(lengths), heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    packs = [torch.nested.nested_tensor_from_jagged(x, offsets).transpose(1, 2).detach() for x in values]
    mask = torch.arange(longest, device="cuda") < torch.tensor(lengths, device="cuda")[:, None]
    padded = draw((len(lengths), longest, heads, dim), "cuda", torch.bfloat16)  # in memory as in a layer, and as packed
    return packs, [x.transpose(1, 2) for x in padded], mask


def cpu() -> Iterator[Row]:
    """One CPU thread, float32."""
    torch.set_num_threads(1)
    for tokens, forward, training in ((17, 3.0, None), (64, 1.7, 1.5), (256, 1.7, 1.5)):
        q, k, v = draw((1, 6, tokens, 32), "cpu", torch.float32)
        leaves = draw((1, 6, tokens, 32), "cpu", torch.float32, grad=True)
        for name in ("inline", "linear"):
            what, ours = f"{name} [1, 6, {tokens}, 32]", partial(softless.attention, mechanism=name)
            with torch.no_grad():
                one = partial(ours, q, k, v), partial(sdpa, q, k, v)
                yield slower("cpu", f"{what} forward", "SDPA", *one, forward)
            if training:
                two = both_passes(ours, leaves), both_passes(sdpa, leaves)
                yield slower("cpu", f"{what} training step", "SDPA", *two, training)
    for tokens in (16, 64, 256, 4096):
        q, k, v = draw((1, 1, tokens, 64), "cpu", torch.float32)
        with torch.no_grad():
            one = partial(softless.attention, q, k, v, "linear"), partial(plain_linear, q, k, v)
            yield slower("cpu", f"linear [1, 1, {tokens}, 64] forward", "its plain formula", *one, 1.0)


def plain_linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Linear attention with elu + 1, as one writes it down."""
    q, k = F.elu(q) + 1, F.elu(k) + 1
    return q @ (k.mT @ v) / (q @ k.sum(-2)[..., None])


GROUPS: dict[str, Callable[[], Iterator[Row]]] = {
    "host": host, "clock": clock, "modules": modules, "models": models, "causal": causal, "ragged": ragged,
    "cpu": cpu,
}  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """Return the table of docs/kernels.md."""
    lines = ["| plain call | against | ours | theirs | ratio | bar |", "|---|---|---|---|---|---|"]
    for row in rows:
        bar = f"{'at most' if row['most'] else 'at least'} {row['bar']}x{'' if row['holds'] else ', missed'}"
        times = " | ".join(f"{row[name]:,.0f} µs" for name in ("microseconds", "of_rival"))
        lines.append(f"| {row['what']} | {row['against']} | {times} | {row['ratio']:.2f}x | {bar} |")
    return "\n".join(lines)


def fill_page() -> None:
    rows = json.loads(max(RESULTS.glob("host-*.json")).read_text())["rows"]
    PAGE.write_text(fill(PAGE.read_text(), table(rows), MARKS))


def write(path: Path, rows: list[Row]) -> None:
    shown = [asdict(row) | {"holds": row.holds} for row in rows]
    evidence = {"date": timestamp(), **circumstances("auto", "triton", "timm"), "rows": shown}
    path.write_text(json.dumps(evidence, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--group", action="append", choices=GROUPS)
    parser.add_argument("--json", type=Path, nargs="?", const=RESULTS / f"host-{timestamp()[:10]}.json")
    parser.add_argument("--page", action="store_true")
    args = parser.parse_args()
    if args.page:
        fill_page()
        return
    groups = args.group or ([name for name in GROUPS if name != "cpu"] if torch.cuda.is_available() else ["cpu"])
    rows: list[Row] = []
    for group in groups:
        for row in GROUPS[group]():
            rows.append(row)
            if args.json:
                write(args.json, rows)
            sign, mark = "<=" if row.most else ">=", "" if row.holds else "   missed"
            print(
                f"{row.what:<64} {row.microseconds:10.1f} us {row.of_rival:10.1f} us {row.against:<18} "
                f"{row.ratio:6.2f}x {sign} {row.bar}x{mark}", flush=True,
            )  # fmt: skip


if __name__ == "__main__":
    main()
