"""Split backwards with hooks and checkpoints that have side effects: these happen once, or are refused by name."""

from __future__ import annotations

import pytest
import torch
from test_split_backward import run
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ldt.errors import LdtError, NonFiniteError
from ldt.runtime.execution.chunk_runner import ChunkRunner


class Noting(nn.Module):
    """Modifies a buffer or a gradient in a tensor's hook, or in a layer that a checkpoint recomputes."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.linear, self.norm = how, nn.Linear(16, 16), nn.BatchNorm1d(8)
        self.shift = nn.Parameter(torch.zeros(16))
        self.register_buffer("seen", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "recomputed":
            return checkpoint(lambda x: self.norm(self.linear(x)), x, use_reentrant=False)  # type: ignore[no-any-return]
        if self.how == "node":
            y = self.linear(x) + self.shift
            y.grad_fn.register_hook(lambda _, grads: self.note(grads[0]))
        elif self.how == "no parameter":
            y = torch.tanh(self.linear(x))
            y.register_hook(self.note)
        else:
            y = self.linear(x) + self.shift
            y.register_hook(self.note)
        return self.norm(y)  # type: ignore[no-any-return]

    def count(self, _: Tensor) -> None:
        assert self.norm.num_batches_tracked is not None
        self.norm.num_batches_tracked.add_(1)

    def note(self, grad: Tensor) -> None:
        more = grad.detach().sum((0, 1))
        if self.how == "grad":
            bias = self.linear.bias
            bias.grad = more if bias.grad is None else bias.grad.add_(more)
        elif self.how == "another":
            self.seen = self.seen + more
        else:
            self.seen.add_(more)


@pytest.mark.parametrize(
    ("how", "changed"),
    [
        ("tensor", "seen"),
        ("another", "seen"),
        ("node", "seen"),
        ("grad", "linear.bias.grad"),
        ("recomputed", "norm.running_mean|norm.num_batches_tracked"),
    ],
)
def test_hooks_and_checkpoints_that_would_change_something_twice(how: str, changed: str) -> None:
    torch.manual_seed(0)
    module = Noting(how)
    if how == "grad":
        module.linear.bias.grad = torch.zeros(16)
    runner = ChunkRunner(7, module, True)
    with pytest.raises(LdtError, match=rf"^chunk 7 \(Noting\): .* it changes ({changed}) itself"):
        run(runner, True, True, leaves=False)


def test_hooks_that_change_something_in_one_part() -> None:
    """One hook is on a tensor that leads to no parameter of its own, another on a parameter."""
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        module = Noting("no parameter")
        module.linear.weight.register_hook(module.count)
        made.append(module)
    one, other = (ChunkRunner(1, m, True) for m in made)
    assert all(map(torch.equal, run(one, False, True), run(other, True, True)))
    for mine, theirs in zip(made[0].buffers(), made[1].buffers(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_what_a_hook_raises_stays_what_it_is() -> None:
    module = nn.Linear(16, 16)

    def refuse(_: Tensor) -> None:
        raise NonFiniteError("not finite", chunk=1, microbatch=0)

    module.weight.register_hook(refuse)
    with pytest.raises(NonFiniteError, match=r"^not finite$"):
        run(ChunkRunner(1, module, True), True, True)
