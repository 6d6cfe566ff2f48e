"""Tensor specs: text, JSON, differences, and the encoding of layouts in messages."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from ldt.runtime.common.tensor_spec import TensorSpec, describe, first_difference, specs_of

TENSORS = {
    "scalar": torch.tensor(1.0),
    "empty": torch.empty(0, 3),
    "plain": torch.randn(2, 3),
    "with grad": torch.randn(2, 3, requires_grad=True),
    "int": torch.zeros(4, dtype=torch.int64),
    "bool": torch.zeros(1, 1, dtype=torch.bool),
    "float8": torch.zeros(2, dtype=torch.float8_e4m3fn),
    "transposed": torch.randn(2, 3).t(),
    "channels_last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "permuted": torch.randn(2, 3, 4).permute(2, 0, 1),
    "strided": torch.randn(4, 6)[:, ::2],
    "expanded": torch.randn(1, 6).expand(4, 6),
}


@pytest.mark.parametrize("name", sorted(TENSORS))
def test_round_trips(name: str) -> None:
    tensor = TENSORS[name]
    spec = TensorSpec.of(tensor)
    assert TensorSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    assert (spec.shape, spec.dtype, spec.requires_grad) == (
        tuple(tensor.shape),
        tensor.dtype,
        tensor.requires_grad,
    )
    received = torch.empty(spec.wire_shape, dtype=spec.dtype).copy_(spec.to_wire(tensor.detach()))
    arrived = spec.from_wire(received)
    assert torch.equal(arrived.float(), tensor.detach().float())
    dense = name not in ("strided", "expanded")
    assert spec.to_wire(tensor).is_contiguous() == dense
    assert (arrived.stride() == tensor.stride()) == dense
    assert TensorSpec.of(arrived).order == spec.order


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        [[1], "float32", True],
        [[1], "float32", 1, []],
        [[-1], "float32", True, []],
        [[1.5], "float32", True, []],
        [[True], "float32", True, []],
        [[1], "Tensor", True, []],
        [[1], "nothing", True, []],
        [[1, 2], "float32", True, [0, 0]],
        [[1, 2], "float32", True, [1]],
        {"shape": [1]},
    ],
)
def test_invalid_specs(data: Any) -> None:
    with pytest.raises(ValueError, match="expected a tensor spec such as"):
        TensorSpec.from_json(data)


def test_texts() -> None:
    assert describe(specs_of([TENSORS["with grad"], TENSORS["int"]])) == "float32[2, 3] with grad, int64[4]"
    assert describe(()) == "nothing"


def test_differences() -> None:
    plain, grad, transposed = (TensorSpec.of(TENSORS[name]) for name in ("plain", "with grad", "transposed"))
    assert first_difference([plain, grad], [plain, grad]) is None
    assert first_difference([grad], [plain]) is None, "its gradient is received and dropped"
    assert "call pipeline.forget_shapes()" in str(first_difference([plain], [grad]))
    assert "1 tensors were agreed" in str(first_difference([plain], [plain, plain]))
    assert "tensor 1 was agreed as float32[2, 3], got float32[3, 2]" in str(
        first_difference([plain, plain], [plain, transposed])
    )
