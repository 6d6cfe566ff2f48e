"""One of three ranks: runs a step over the gloo transport of the environment and prints "equal" if it is correct."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

import ldt
from ldt.testing import paced, toy_chunks, toy_loss, toy_microbatches, unsplit_step
from ldt.topology import Topology

TIMEOUT = paced(15)


def main(rank: int, port: int) -> None:
    store = TCPStore("127.0.0.1", port, None, False, timeout=TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=TIMEOUT)
    topology = Topology([1, 1, 1])
    chunks, batch = toy_chunks(topology), toy_microbatches(2)
    losses, reference = unsplit_step(chunks, batch, toy_loss)
    with ldt.connect(topology, timeout=TIMEOUT) as mesh:
        mine = topology.chunks_of(mesh.stage)
        pipeline = ldt.Pipeline([chunks[i] for i in mine], mesh, loss_fn=toy_loss if mesh.is_edge else None)
        result = pipeline.step(batch if mesh.is_edge else None)
    assert result.losses is None or all(map(torch.equal, result.losses, losses))
    for index in mine:
        for one, other in zip(chunks[index].parameters(), reference[index].parameters(), strict=True):
            assert one.grad is not None
            assert torch.equal(one.grad, other.grad)
    dist.destroy_process_group()
    print("equal")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
