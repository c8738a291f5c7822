"""How much `softless study` measures."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Plan:
    """Sizes and repeats of one study."""

    tokens: tuple[int, ...] = (256, 512, 1024, 2048, 4096)
    repeats: int = 5
    heads: int = 4
    head_dim: int = 64
    deviations: tuple[float, ...] = (0.03, 0.1, 0.3, 0.5, 1.0, 3.0)
    score_tokens: int = 256
    score_heads: int = 2
    sets_of_keys: int = 50  # each of 20 keys: 1,000 pairs of queries
    keys: int = 20
    key_dim: int = 16


FULL = Plan()
QUICK = replace(FULL, tokens=(256, 512, 1024), repeats=3, score_tokens=128)
