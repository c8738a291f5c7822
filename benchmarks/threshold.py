"""How far each threshold rule is from softmax, on normal scores: the table in docs/threshold.md.

    python benchmarks/threshold.py

Mean over 2,000 rows of 256 scores of |w - p| / |p|, w the rule's weights and p the softmax's.
"""

import torch

import softless

ROWS, KEYS = 2_000, 256
DEVIATIONS = (0.1, 0.3, 1.0, 2.0)
RULES = (("max", "drop"), ("mean", "drop"), ("minimax", "drop"), ("max", "mean"), ("mean", "mean"), ("minimax", "mean"))


def errors(deviation: float) -> dict[str, float]:
    """The mean error of each rule, of uniform weights and of 1 + s over all keys."""
    generator = torch.Generator().manual_seed(0)
    scores = deviation * torch.randn(1, 1, ROWS, KEYS, generator=generator, dtype=torch.float64)
    softmax = scores.softmax(-1)
    plain = (1 + scores) / (1 + scores).sum(-1, keepdim=True)
    errors_by_rule = {
        "uniform": relative(torch.full_like(softmax, 1 / KEYS), softmax),
        "1 + s": relative(plain, softmax),
    }
    q, k = scores.new_zeros(1, 1, ROWS, 1), scores.new_zeros(1, 1, KEYS, 1)  # the bias is the whole score
    for tau in (1, 2):
        for expansion, tail in RULES:
            report = softless.threshold_report(q, k, tau=tau, expansion=expansion, tail=tail, bias=scores)
            errors_by_rule[f"tau={tau} {expansion}, {tail}"] = report.error.mean().item()
    return errors_by_rule


def relative(weights: torch.Tensor, softmax: torch.Tensor) -> float:
    return ((weights - softmax).norm(dim=-1) / softmax.norm(dim=-1)).mean().item()


def table() -> str:
    columns = {deviation: errors(deviation) for deviation in DEVIATIONS}
    lines = ["| weights | " + " | ".join(f"sd {deviation:g}" for deviation in DEVIATIONS) + " |"]
    lines.append("|---|" + "---|" * len(DEVIATIONS))
    lines += [
        f"| {rule} | " + " | ".join(f"{columns[each][rule]:.2f}" for each in DEVIATIONS) + " |"
        for rule in columns[DEVIATIONS[0]]
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
