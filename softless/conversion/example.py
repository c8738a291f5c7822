"""A model to convert without any files: a small Llama that learns the bytes of Python's own help texts in seconds."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from softless.errors import needs_extra

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LENGTH, BATCH, UPDATES, RATE = 128, 12, 200, 4e-3
SAMPLES = 96
NAME = "a small Llama, trained on the help texts of Python"


def train_example(seed: int, advance: Callable[[str, float], None]) -> "PreTrainedModel":
    """Train the model; `advance` gets a share of the work after each update."""
    with needs_extra("the example is a model of transformers", "hf"):
        from transformers import LlamaConfig, LlamaForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=256, hidden_size=64, intermediate_size=160, num_hidden_layers=6, num_attention_heads=4,
            max_position_embeddings=4096, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        model = LlamaForCausalLM(config)
        text, draw = _texts()[0], torch.Generator().manual_seed(seed)
        adam = torch.optim.AdamW(model.parameters(), RATE, betas=(0.9, 0.95), weight_decay=0.1)
        falling = torch.optim.lr_scheduler.OneCycleLR(adam, RATE, total_steps=UPDATES, pct_start=0.1)
        for _ in range(UPDATES):
            starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=draw)
            tokens = text[starts[:, None] + torch.arange(LENGTH)].long()
            model(tokens, labels=tokens).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            adam.step()
            falling.step()
            adam.zero_grad()
            advance("training the example", 1 / UPDATES)
    return model.eval()


def example_samples() -> Tensor:
    """Return tokens [samples, LENGTH] of the texts that the example did not learn."""
    text = _texts()[1]
    return text[: SAMPLES * LENGTH].view(SAMPLES, LENGTH).long()


def decode(tokens: Iterable[int]) -> str:
    """Return bytes as text."""
    return bytes(tokens).decode(errors="replace")


def _texts() -> tuple[Tensor, Tensor]:
    """Return the bytes to learn and those that are kept back, in the order of their topics."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    held_out = SAMPLES * LENGTH
    return data[:-held_out], data[-held_out:]
