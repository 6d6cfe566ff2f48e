"""Which calls count as those with new shapes, after which kernels are taken for loaded."""

import torch

from ldt.runtime.common.tensor_spec import TensorSpec
from ldt.runtime.step.first_use import MOST, FirstUse
from ldt.runtime.step.metadata import MicrobatchMetadata, StepMessage
from ldt.topology import Topology

CUDA = torch.device("cuda")


def call(sizes, masks=None, setting=""):
    """What a rank knows of a call whose microbatches have those sizes, of one edge replica."""
    hops = [[(TensorSpec((size, 8), torch.float32),)] * 2 for size in sizes]
    tensors = [
        {} if mask is None else {"attention_mask": torch.ones(mask)} for mask in masks or [None] * len(sizes)
    ]
    microbatches = tuple(MicrobatchMetadata(index, (), given) for index, given in enumerate(tensors))
    return [(hops, StepMessage("step", "", setting, None, microbatches))]


def test_shapes_are_new_once_for_training_and_for_eval():
    first = FirstUse(Topology([1, 1]), CUDA)
    assert first.has_new_shapes(True, call([4, 4]))
    assert not first.has_new_shapes(True, call([4, 4, 4]))
    assert first.has_new_shapes(False, call([4]))
    assert not first.has_new_shapes(False, call([4]))
    assert first.has_new_shapes(True, call([4, 5]))
    assert not first.has_new_shapes(True, call([5, 4]))


def test_metadata_count():
    first = FirstUse(Topology([1, 1]), CUDA)
    assert first.has_new_shapes(True, call([4], [None]))
    assert first.has_new_shapes(True, call([4], [3]))
    assert not first.has_new_shapes(True, call([4], [3]))


def test_modes_count():
    first = FirstUse(Topology([1, 1]), CUDA)
    assert first.has_new_shapes(True, call([4], setting="autocast=None"))
    assert first.has_new_shapes(True, call([4], setting="autocast=torch.bfloat16"))
    assert not first.has_new_shapes(True, call([4], setting="autocast=None"))


def test_each_replica_meets_a_shape_for_itself():
    first = FirstUse(Topology([1, 1], dp=2, edge_dp=1), CUDA)
    assert first.has_new_shapes(True, call([4, 5]))
    assert not first.has_new_shapes(True, call([4, 5]))
    assert first.has_new_shapes(True, call([5, 4]))


def test_the_shapes_of_all_edge_replicas_count():
    first = FirstUse(Topology([1, 1], dp=2), CUDA)
    assert first.has_new_shapes(True, [*call([4]), *call([4])])
    assert first.has_new_shapes(True, [*call([4]), *call([5])])
    assert not first.has_new_shapes(True, [*call([4]), *call([5, 4])])


def test_what_was_forgotten_is_new():
    first = FirstUse(Topology([1, 1]), CUDA)
    assert first.has_new_shapes(True, call([4]))
    first.forget()
    assert first.has_new_shapes(True, call([4]))


def test_after_a_number_of_calls_no_shape_is_new_which_is_logged_once(caplog):
    first = FirstUse(Topology([1, 1]), CUDA)
    assert [first.has_new_shapes(True, call([size])) for size in range(MOST)] == [True] * MOST
    assert not first.has_new_shapes(True, call([0]))
    assert not caplog.records
    assert [first.has_new_shapes(True, call([size])) for size in range(MOST, MOST + 3)] == [False] * 3
    (record,) = caplog.records
    assert "gpu_notes" in record.message


def test_nothing_waits_on_the_cpu_or_without_another_node():
    assert not FirstUse(Topology([1, 1]), torch.device("cpu")).has_new_shapes(True, call([4]))
    assert not FirstUse(Topology([1]), CUDA).has_new_shapes(True, call([4]))
