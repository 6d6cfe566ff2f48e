"""After ``close`` nothing keeps the lanes and groups of a mesh alive, so that no garbage collection has to end them.

Their destructors wait for a device and for threads. In a step of another mesh that might never end.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from pipeline_jobs import build, step_and_compare

import ldt
from ldt.testing import RankPool, ToyChunk, toy_chunks, toy_microbatches
from ldt.topology import Topology

WIDTH = 16


class BoomError(Exception):
    pass


class Failing(ToyChunk):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if type(x) is torch.Tensor:  # not in shape inference
            raise BoomError("no more")
        return super().forward(x)  # type: ignore[no-any-return]


def left_after_close(on_demand: bool, fails: bool) -> list[str]:
    """The lanes, groups and errors that are alive after a job whose mesh, pipeline and results still are."""
    gc.collect()
    gc.disable()
    try:
        topology = Topology([1, 1])
        chunks, batch = toy_chunks(topology, width=WIDTH), toy_microbatches(4, width=WIDTH)
        if fails:
            chunks[1] = Failing(WIDTH)
        kept: list[Any] = []
        with ldt.connect(topology, ranks=range(2)) as mesh:
            refs: list[weakref.ref[Any]] = [
                weakref.ref(thing) for thing in (*mesh.all_lanes(), *mesh._groups.values())
            ]
            before = len(refs)
            pipeline = build(mesh, chunks)
            pipeline._steps._first_use._waits = on_demand
            if fails:
                try:
                    pipeline.step(batch if mesh.is_edge else None)
                except (BoomError, ldt.LdtError) as error:  # its traceback has frames that hold lanes
                    refs.append(weakref.ref(error))
                assert len(refs) > before
            else:
                step_and_compare(mesh, pipeline, chunks, batch)
                step_and_compare(mesh, pipeline, chunks, batch)
                kept.append(pipeline.eval(batch if mesh.is_edge else None))
        assert len(refs) > 4
        return [repr(ref()) for ref in refs if ref() is not None]
    finally:
        gc.enable()


@pytest.mark.parametrize("fails", [False, True], ids=["as planned", "a chunk fails"])
@pytest.mark.parametrize("on_demand", [False, True], ids=["posted ahead", "on demand"])
def test_close_leaves_no_lane_and_no_group(pool: RankPool, on_demand: bool, fails: bool) -> None:
    assert pool.run(left_after_close, on_demand, fails, ranks=range(2)) == [[], []]
