"""The data and the model of the vision-language example, in one process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("sklearn")

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    torch.set_num_threads(1)


def test_microbatches_mix_images_of_many_sizes_with_text() -> None:
    from vlm.digits import Digits
    from vlm.model import small_config
    from vlm.words import IMAGE

    microbatches = Digits(small_config(), batch=16, seed=0).training(step=3, number=8)
    shown = [inputs for inputs, _ in microbatches if "pixel_values" in inputs]
    assert len(shown) == 6
    grids = torch.cat([inputs["image_grid_thw"] for inputs in shown])
    assert len(grids.unique(dim=0)) == 9
    for inputs in shown:
        images = inputs["image_grid_thw"].prod(-1).sum()
        assert len(inputs["pixel_values"]) == images == 4 * (inputs["input_ids"] == IMAGE).sum()
    counts = {int(n) for inputs in shown for n in (inputs["input_ids"] == IMAGE).any(-1)}
    assert counts == {0, 1}, "some samples of a microbatch with images have none"
    for inputs, labels in microbatches:
        assert (labels != -100).sum(-1).eq(1).all()
        assert inputs["position_ids"].shape == (3, *labels.shape)


def test_the_same_step_has_the_same_microbatches_and_none_is_held_out() -> None:
    from vlm.digits import Digits
    from vlm.model import small_config

    digits = Digits(small_config(), batch=4, seed=0)
    (some, _), (again, _), (other, _), (unseen, _) = (
        one[0]
        for one in (digits.training(1, 1), digits.training(1, 1), digits.training(2, 1), digits.held_out(1))
    )
    assert torch.equal(some["pixel_values"], again["pixel_values"])
    assert some["input_ids"].shape != other["input_ids"].shape or not torch.equal(
        some["input_ids"], other["input_ids"]
    )
    assert not torch.equal(some["pixel_values"][0], unseen["pixel_values"][0])


def test_patches_that_become_one_token_follow_each_other() -> None:
    from vlm.digits import _patches
    from vlm.model import PATCH

    image = (
        torch.arange(16.0)[:, None] // PATCH * 10 + torch.arange(24.0) // PATCH
    )  # row and column of the patch
    corners = _patches(image)[:, 0].int().tolist()
    assert corners[:8] == [0, 1, 10, 11, 2, 3, 12, 13]
    assert corners[-4:] == [24, 25, 34, 35]
    assert _patches(image).std(dim=1).eq(0).all()


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_a_step_has_a_gradient_for_every_weight_and_lowers_the_loss(stages: int) -> None:
    from vlm.digits import Digits
    from vlm.model import layers_of_chunks, small_config

    from ldt.integrations import hf

    parts = hf.split(small_config(), layers_of_chunks(stages), laps=2)
    chunks = parts.build(range(parts.num_chunks))
    hf.init_weights(chunks, seed=0)
    ((inputs, labels),) = Digits(parts.config, batch=8, seed=0).training(0, 1)
    parameters = list({id(p): p for chunk in chunks for p in chunk.parameters()}.values())
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    losses = []
    for _ in range(2):
        total, count = hf.token_loss(walk(chunks, inputs), labels)
        (total / count).backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in parameters)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total.detach()))
    assert losses[1] < losses[0]


def walk(chunks: list[torch.nn.Module], inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    import inspect

    hop: tuple[torch.Tensor, ...] = ()
    for chunk in chunks:
        declared = inspect.signature(chunk.forward).parameters
        output = chunk(*hop, **{name: tensor for name, tensor in inputs.items() if name in declared})
        hop = output if isinstance(output, tuple) else (output,)
    return hop[0]
