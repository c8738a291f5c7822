"""Decode and train a language model of 135 M parameters: linear attention, softmax, and no attention at all.

    python benchmarks/decoding.py --json benchmarks/results/decoding.json --minutes 9
    python benchmarks/decoding.py --tiny --device cpu          # a small model, to see that it runs

Every row is written at once, and a second call with the same file measures the rows that are missing.

    decode    tokens per second after CONTEXT tokens: in `generate()`, and with the step compiled and the cache static;
              "skips" counts what could not be captured in a CUDA graph
    train     tokens per second of forward and backward on sequences of LENGTH tokens, eager and compiled

The model without attention is the bound: what no attention can be faster than. Ratios are of tokens per second, each
against softmax in the same run (SDPA with its cache of keys and values).
"""

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    StaticCache,
)

import softless.transformers
from softless.errors import FileError
from softless.io.files import write_json

SMOL = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3}  # fmt: skip
TINY = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
WAYS = ("softmax", "linear", "inline", "delta", "none")


def no_attention(_module: nn.Module, query: Tensor, _k: Tensor, _v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    return query.transpose(1, 2), None


AttentionInterface.register("none", no_attention)
AttentionMaskInterface.register("none", lambda *_args, **_kwargs: None)


def model_of(way: str, args: argparse.Namespace) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(**(TINY if args.tiny else SMOL), max_position_embeddings=2 * args.context)
    with torch.device(args.device):
        model = LlamaForCausalLM(config).to(args.dtype).eval()
    if way == "none":
        model.set_attn_implementation("none")
    elif way != "softmax":
        softless.transformers.set_mechanism(model, way)
    return model


def filled(model: LlamaForCausalLM, way: str, args: argparse.Namespace, static: bool) -> Any:
    """Return a cache after CONTEXT tokens; keys and values are random numbers, states come from real tokens."""
    room = args.context + args.steps + 8
    cache = StaticCache(model.config, max_cache_len=room) if static else DynamicCache(config=model.config)
    config = model.config
    if way == "softmax":
        shape = args.batch, config.num_key_value_heads, args.context, config.hidden_size // config.num_attention_heads
        for index in range(config.num_hidden_layers):
            k, v = (torch.randn(shape, device=args.device, dtype=args.dtype) for _ in "kv")
            cache.update(k, v, index)
    elif way != "none":
        ids = torch.randint(3, config.vocab_size, (args.batch, args.context), device=args.device)
        for begin in range(0, args.context, 2048):
            model(ids[:, begin : begin + 2048], past_key_values=cache, logits_to_keep=1)
    return cache


def clock(args: argparse.Namespace, call: Callable[[], Any]) -> float:
    if args.device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if args.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


@torch.no_grad()
def generated(way: str, args: argparse.Namespace) -> float:
    """Tokens per second of plain `generate()`: the time of many tokens less the time of few."""
    model, few = model_of(way, args), 4
    ids = torch.randint(3, model.config.vocab_size, (args.batch, args.context + 1), device=args.device)
    seconds = []
    for count in (few, few, args.steps):  # the first call warms up
        how: dict[str, Any] = {}  # frees the last cache before the next one is filled: each takes 48 GB with softmax
        how |= {"past_key_values": filled(model, way, args, False)} if way != "none" else {}
        tokens = ids if way != "none" else ids[:, -1:]
        want = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        seconds.append(clock(args, lambda t=tokens, w=want, h=how: model.generate(t, **w, **h)))  # type: ignore[misc]
    return args.batch * (args.steps - few) / (seconds[2] - seconds[1])


@torch.no_grad()
def compiled(way: str, args: argparse.Namespace) -> float:
    """Tokens per second of a decode step that is compiled, with CUDA graphs on a GPU."""
    model = model_of(way, args)
    cache = filled(model, way, args, True) if way != "none" else None
    torch.compiler.reset()
    mode = "reduce-overhead" if args.device == "cuda" else None
    step = torch.compile(model, mode=mode, fullgraph=True) if args.device == "cuda" else model
    ids = torch.randint(3, model.config.vocab_size, (args.batch, 1), device=args.device)
    place = torch.full((args.batch, 1), args.context, device=args.device)

    def steps(count: int) -> None:
        nonlocal ids, place
        for _ in range(count):
            how = {} if cache is None else {"past_key_values": cache}
            logits = step(ids, position_ids=place, use_cache=cache is not None, **how).logits
            ids, place = logits[:, -1:].argmax(-1).clone(), place + 1

    steps(4)
    many = args.steps // 2
    return args.batch * many / clock(args, lambda: steps(many))


def trained(way: str, args: argparse.Namespace, compile_: bool) -> float:
    """Tokens per second of forward and backward."""
    step = training_step(way, args, compile_)
    times = sorted(clock(args, step) for _ in range(5))
    return args.length / times[2]


def training_step(way: str, args: argparse.Namespace, compile_: bool) -> Callable[[], None]:
    """Return a step that has run three times."""
    model = model_of(way, args).train()
    torch.compiler.reset()
    run = torch.compile(model) if compile_ else model
    ids = torch.randint(3, model.config.vocab_size, (1, args.length), device=args.device)

    def step() -> None:
        run(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad()

    for _ in range(3):
        step()
    return step


def profile(way: str, args: argparse.Namespace) -> None:
    """Print the kernels of one training step that take longest."""
    step = training_step(way, args, False)
    with torch.profiler.profile() as profiler:
        clock(args, step)
    order = f"self_{args.device}_time_total"
    print(profiler.key_averages().table(sort_by=order, row_limit=30, max_name_column_width=60))


def before(path: Path | None, about: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows that were measured before; a file of other settings raises an error."""
    if path is None or not path.exists():
        return []
    document = json.loads(path.read_text())
    other = [key for key, value in about.items() if document.get(key) != value]
    if other:
        raise FileError(f"{path} was measured with another {', '.join(other)}: give another file, or delete it")
    return document["rows"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--context", type=int, default=32_768)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=68)
    parser.add_argument("--length", type=int, default=16_384)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--what", action="append", help="measure only this, such as generate; repeatable")
    parser.add_argument("--profile", metavar="WAY", help="print where the time of a training step goes, and end")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no row later")
    args = parser.parse_args()
    args.dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    if args.profile:
        profile(args.profile, args)
        return 0
    measures: dict[str, Callable[[str], float]] = {
        "generate": lambda way: generated(way, args),
        "compiled step": lambda way: compiled(way, args),
        "train": lambda way: trained(way, args, False),
    }
    if args.device == "cuda":
        measures["train, compiled"] = lambda way: trained(way, args, True)
    about: dict[str, Any] = {
        "schema": "softless.decoding/1", "torch": torch.__version__, "transformers": transformers.__version__,
        "parameters": sum(x.numel() for x in model_of("softmax", args).parameters()), "context": args.context,
        "batch": args.batch, "length": args.length, "steps": args.steps, "dtype": str(args.dtype),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "CPU",
    }  # fmt: skip
    rows, ends = before(args.json, about), time.time() + 60 * args.minutes
    for (name, measure), way in product(measures.items(), args.ways.split(",")):
        if (args.what and name not in args.what) or any((row["what"], row["way"]) == (name, way) for row in rows):
            continue
        if time.time() > ends:
            print("rows are left: call again")
            break
        began = time.time()
        counters.clear()
        try:
            rate = measure(way)
        except Exception as error:  # noqa: BLE001 - the other rows are still to be measured
            print(f"{name:16} {way:8} failed: {type(error).__name__}: {str(error)[:300]}", flush=True)
            traceback.print_exc()
            continue
        skips = counters["inductor"]["cudagraph_skips"]
        rows.append({"what": name, "way": way, "tokens_per_second": rate} | ({"skips": skips} if skips else {}))
        softmax = next((row["tokens_per_second"] for row in rows if (row["what"], row["way"]) == (name, "softmax")), 0)
        ratio = f"{rate / softmax:6.2f}x" if softmax else ""
        ratio += f"  {skips} skips" if skips else ""
        print(f"{name:16} {way:8} {rate:12,.0f} tokens/s  {ratio}  ({time.time() - began:.0f} s)", flush=True)
        if args.json:
            write_json(args.json, {**about, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
