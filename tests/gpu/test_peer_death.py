"""A process dies while a peer writes into its memory by the copy engine: the survivor's GPU still works."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from two_ranks import first_of_two

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

# Rank 1 posts receives and is killed; rank 0 sends into its memory and to the bounce slots, before and after that.
JOB = """
import os, signal, sys, time, torch, torch.distributed as dist
import ldt

rank, ready = int(sys.argv[1]), sys.argv[2]
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{ready}.store", rank=rank, world_size=2)
mesh = ldt.connect(ldt.Topology([1, 1]), transport="copy_engine", device=device)
end = mesh.endpoints[mesh.topology.channel(0, "F", 0)]
message = torch.ones(64 << 20, device=device)
if rank == 1:
    targets = [end.lane.empty(message.shape, message.dtype) for _ in range(4)]
    works = [end.receive([target], "doomed") for target in targets]
    open(ready, "w").close()
    works[1].wait()
    torch.cuda.synchronize()
    os.kill(os.getpid(), signal.SIGKILL)
while not os.path.exists(ready):
    time.sleep(0.01)
works = [end.send([message], "doomed") for _ in range(8)]
time.sleep(3.0)
end.lane.abort("the receiver has died")
torch.cuda.synchronize()
assert float(torch.ones(1000, device=device).sum()) == 1000
try:
    works[-1].wait()
except ldt.LaneError as error:
    print(error, flush=True)
os._exit(0)
"""


def test_the_survivors_gpu_still_works(tmp_path: Path) -> None:
    said = first_of_two(JOB, tmp_path, str(tmp_path / "ready"))
    assert "rank 1 (stage 1, replica 0) failed first: no heartbeat" in said, "before this rank's own words"
