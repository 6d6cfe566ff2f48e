"""Shows how training goes: a bar in the terminal, lines in the log, scalars for TensorBoard."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

__all__ = ["Progress"]


class Progress:
    """A progress bar over ``steps``.

    Args:
        steps: The number of steps.
        start: How many were done before.
        flops: Floating-point operations for one token, forward and backward.
        folder: Where TensorBoard's files go; None writes none.
    """

    def __init__(self, steps: int, start: int, flops: float, folder: Path | None) -> None:
        self._bar = tqdm(total=steps, initial=start, unit=" steps", dynamic_ncols=True)
        self._flops = flops
        self._writer: Any = None
        self._shown: dict[str, str] = {}
        self._began, self._tokens = time.perf_counter(), 0
        if folder is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder))

    def step(self, step: int, tokens: int, scalars: Mapping[str, float]) -> None:
        """Count a step of ``tokens``, and show its scalars."""
        self._tokens += tokens
        self.write(step, scalars)
        self._shown["loss"] = f"{scalars['loss']:.3f}"
        self._bar.set_postfix(self._shown, refresh=False)
        self._bar.update()

    def report(self, step: int, scalars: Mapping[str, float]) -> None:
        """Show the speed since the last report, and what ``scalars`` say of bubble and link."""
        seconds = time.perf_counter() - self._began
        rate = self._tokens / seconds
        speed = {"tokens_per_second": rate, "tflops": rate * self._flops / 1e12}
        self.write(step, {**speed, **scalars})
        self._shown |= {"tok/s": f"{rate:,.0f}", "TFLOP/s": f"{speed['tflops']:.1f}"}
        self._shown["bubble"] = f"{scalars['step/bubble']:.0%}"
        sent = [value for name, value in scalars.items() if name.endswith("/bytes_per_second")]
        self._shown["MB/s"] = " ".join(f"{value / 1e6:,.1f}" for value in sent)  # of each link, each way
        self._began, self._tokens = time.perf_counter(), 0

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        tqdm.write(text)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write scalars for TensorBoard."""
        if self._writer is not None:
            for name, value in scalars.items():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._bar.close()
        if self._writer is not None:
            self._writer.close()
