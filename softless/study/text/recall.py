"""Recall on synthetic sequences: can a mechanism find again what it has seen, and does it at lengths beyond training?

    associative recall   a key, its value, another key, its value, ...; then every key again: which value follows?
                         (multi-query associative recall, Arora et al. 2023, arXiv 2312.04927)
    induction            tokens at random, once the trigger and a token after it; the trigger again: what follows?
                         (Olsson et al. 2022, arXiv 2209.11895)

The model has one block with one head, and learns both tasks at once: odd updates are recall, even ones induction. Each
position also sees the embedding of the token before, as through the short convolutions of recurrent language models.
So a memory can bind a value to its key in one block. Order then plays no role, so the rotation of positions is slow.

A sequence with n pairs has 4 n tokens, and one for induction is as long. Only the answers count, in the loss and in the
accuracy. Another key is never asked twice, and its value is one of `VALUES` at random: chance is 1 / VALUES.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypedDict

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from softless.data.sequences import IGNORED
from softless.errors import NonFiniteError, needs_extra
from softless.machine import circumstances
from softless.study.text.plan import RecallPlan
from softless.study.text.twins import TextTwin
from softless.study.workers import GridRun, RunWatcher
from softless.train.loop import Interrupted, seed_all

RECALL_SCHEMA = "softless.recall/1"
RECALL, INDUCTION = "recall", "induction"
KEYS = VALUES = 16
TRIGGER = KEYS + VALUES
SLOW = 1e8  # base of the rotation of positions
START = 0.1  # standard deviation of the first weights: with much smaller ones, delta takes far longer to learn
WARMUP = 20  # updates
TEST_SEED = 10**6  # of the sequences that are tested on


class RecallPoint(TypedDict):
    """The accuracy of a run on one task at one length."""

    task: str
    tokens: int
    inside: bool
    accuracy: float


class RecallModel(nn.Module):
    """A Llama of one block and one head that also sees the token before."""

    def __init__(self, twin: TextTwin, dim: int):
        super().__init__()
        with needs_extra("language models come from transformers", "hf"):
            from transformers import LlamaConfig, LlamaForCausalLM

        from softless.transformers import set_mechanism

        config = LlamaConfig(
            vocab_size=TRIGGER + 1, hidden_size=dim, intermediate_size=2 * dim, num_hidden_layers=1,
            num_attention_heads=1, use_cache=False, bos_token_id=None, eos_token_id=None, attn_implementation="sdpa",
            rope_parameters={"rope_type": "default", "rope_theta": SLOW}, initializer_range=START,
        )  # fmt: skip
        self.inner = LlamaForCausalLM(config)
        set_mechanism(self.inner, twin.mechanism, **twin.options)
        self.before = nn.Linear(dim, dim, bias=False)

    def forward(self, tokens: Int[Tensor, "b l"]) -> Float[Tensor, "b l n"]:
        x = self.inner.model.embed_tokens(tokens)
        return self.inner(inputs_embeds=x + self.before(F.pad(x, (0, 0, 1, -1)))).logits


def pairs_and_keys(batch: int, pairs: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return sequences [batch, 4 pairs] of keys with values and then the keys again, and the targets."""
    keys = torch.rand(batch, KEYS, generator=generator).argsort(1)[:, :pairs]
    values = torch.randint(KEYS, TRIGGER, (batch, pairs), generator=generator)
    order = torch.rand(batch, pairs, generator=generator).argsort(1)
    questions, answers = keys.gather(1, order), values.gather(1, order)
    tokens = torch.cat([torch.stack([keys, values], 2), torch.stack([questions, answers], 2)], 1).flatten(1)
    targets = torch.full_like(tokens, IGNORED)
    targets[:, 2 * pairs :: 2] = answers
    return tokens, targets


def trigger_twice(batch: int, pairs: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return sequences [batch, 4 pairs] of random tokens with a trigger inside and at the end, and the targets."""
    length = 4 * pairs
    tokens = torch.randint(0, TRIGGER, (batch, length), generator=generator)
    place = torch.randint(0, length - 2, (batch, 1), generator=generator)
    tokens.scatter_(1, place, TRIGGER)
    tokens[:, -1] = TRIGGER
    targets = torch.full_like(tokens, IGNORED)
    targets[:, -1:] = tokens.gather(1, place + 1)
    return tokens, targets


TASKS = {RECALL: pairs_and_keys, INDUCTION: trigger_twice}


def accuracy(model: nn.Module, task: str, pairs: int, plan: RecallPlan) -> float:
    """Return the share of right answers at one length."""
    tokens, targets = TASKS[task](plan.tested, pairs, torch.Generator().manual_seed(TEST_SEED + pairs))
    with torch.no_grad():
        right = model(tokens).argmax(-1) == targets
    return (right.sum() / (targets != IGNORED).sum()).item()


@dataclass(frozen=True, kw_only=True)
class RecallRun(GridRun):
    """The training of a twin on both tasks."""

    twin: TextTwin
    plan: RecallPlan

    def train(self, material: None, watch: RunWatcher) -> dict[str, Any]:
        plan, generator = self.plan, torch.Generator().manual_seed(self.seed)
        seed_all(self.seed, -1, 0)
        model = RecallModel(self.twin, plan.dim)
        watch.parameters, watch.total = sum(parameter.numel() for parameter in model.parameters()), plan.updates
        optimizer = torch.optim.AdamW(model.parameters(), lr=plan.lr, betas=(0.9, 0.95), weight_decay=0.1)
        for update in range(plan.updates):
            if watch.over():
                watch.requested = True
                raise Interrupted
            for group in optimizer.param_groups:
                group["lr"] = plan.lr * _rate(update, plan.updates)
            task = (RECALL, INDUCTION)[update % 2]
            tokens, targets = TASKS[task](plan.batch, plan.inside[update // 2 % len(plan.inside)], generator)
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
            if not math.isfinite(loss.item()):
                raise NonFiniteError(f"the loss of update {update} on {task} is {loss.item()}")
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            watch.progress(self.name, (update + 1) / plan.updates)
        model.eval()
        points: list[RecallPoint] = [
            {
                "task": task,
                "tokens": 4 * pairs,
                "inside": pairs in plan.inside,
                "accuracy": accuracy(model, task, pairs, plan),
            }
            for task in TASKS
            for pairs in (*plan.inside, *plan.beyond)
        ]
        return {"points": points}

    def record_of(self, scores: Mapping[str, Any], parameters: int = 0, wall: float = 0.0) -> dict[str, Any]:
        where = circumstances("cpu", "transformers")
        return {
            "schema": RECALL_SCHEMA, "twin": asdict(self.twin), "seed": self.seed, "status": scores["status"],
            "reason": scores.get("reason"), "points": scores.get("points"), "plan": asdict(self.plan),
            "parameters": parameters, "wall_seconds": round(wall, 3), "together": self.together,
            "versions": where["versions"], "machine": where["machine"],
        }  # fmt: skip


def _rate(update: int, updates: int) -> float:
    """Return the share of the learning rate: a short warm-up, then half a cosine."""
    return min(1.0, (update + 1) / WARMUP) * (1 + math.cos(math.pi * update / updates)) / 2
