"""An update recorded once as a CUDA graph and replayed.

To start a graph takes the host microseconds, where its thousand kernels take it milliseconds, and the device waits.
What a graph reads and writes lies where it was: batches and rates are copied there before, answers away after.
"""

import gc
from collections.abc import Callable

import torch
from torch import Tensor

Batch = list[tuple[Tensor, Tensor]]  # pixels and targets of each part
Learn = Callable[[Batch], tuple[Tensor, Tensor]]

WARM = 3  # updates before the recorded one: libraries choose their kernels and take their memory


class Replay:
    """`learn`, which updates by an optimizer that is `capturable`, for batches of one shape."""

    def __init__(self, learn: Learn, optimizer: torch.optim.Optimizer):
        self.learn, self.optimizer, self.graph = learn, optimizer, torch.cuda.CUDAGraph()
        self.inputs: Batch = []
        self.answers: tuple[Tensor, ...] = ()
        self.rates: list[Tensor] = []

    def __call__(self, batch: Batch) -> tuple[Tensor, ...]:
        for own, given in zip(self.inputs, batch, strict=True):
            for mine, new in zip(own, given, strict=True):
                mine.copy_(new)
        for rate, group in zip(self.rates, self.optimizer.param_groups, strict=True):
            rate.fill_(group["lr"])
        self.graph.replay()
        return tuple(answer.clone() for answer in self.answers)

    def record(self, batch: Batch) -> None:
        """`learn` runs WARM times, for the caller to undo; it is recorded, and not run, by what it does then."""
        self.inputs = [(pixels.clone(), targets.clone()) for pixels, targets in batch]
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self.rates = [torch.tensor(rate, device=batch[0][0].device) for rate in rates]
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)  # a graph has a stream of its own
        self._set_rates(self.rates)
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(WARM):
                self.learn(self.inputs)
        torch.cuda.current_stream().wait_stream(aside)
        gc.collect()  # an earlier training's graph must not be freed in the midst of a recording: that would end it
        with torch.cuda.graph(self.graph):
            self.answers = self.learn(self.inputs)
        self._set_rates(rates)

    def _set_rates(self, rates: list[Tensor] | list[float]) -> None:
        for rate, group in zip(rates, self.optimizer.param_groups, strict=True):
            group["lr"] = rate
