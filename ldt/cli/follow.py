"""Runs a rank of the cloud for a Hugging Face model, without a script: the edge decides what it does.

Started by torchrun with --stages, or by `python -m ldt launch` with the topology of job.toml.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ldt.errors import LdtError, RemoteStageError
from ldt.topology import Topology

if TYPE_CHECKING:
    import torch

    from ldt.runtime import Mesh

_INTERRUPTED = 128 + signal.SIGINT  # as shells have it
_OF_TOPOLOGY = ("stages", "dp", "edge_dp", "laps")  # arguments
_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.epilog = (
        "example: torchrun --nnodes 2 --node-rank 1 --nproc-per-node 2 --master-addr EDGE --master-port 29500 "
        "-m ldt follow --model path/to/model --stages 1,1,1"
    )
    parser.add_argument(
        "--model",
        required=True,
        help="folder or hub name of the model at this site; its config must be the edge's",
    )
    parser.add_argument("--optimizer", metavar="NAME", help="adamw, adamw_8bit or sgd (default: the edge's)")
    parser.add_argument("--checkpoints", type=Path, metavar="DIR", help="folder for this site's checkpoints")
    parser.add_argument(
        "--stages",
        type=_sizes,
        metavar="TP,...",
        help="ranks of each stage, the edge first; not with job.toml",
    )
    parser.add_argument(
        "--dp", type=int, metavar="N", help="with --stages: replicas of the cloud (default: 1)"
    )
    parser.add_argument(
        "--edge-dp", type=int, metavar="N", help="with --stages: replicas of the edge (default: as many)"
    )
    parser.add_argument(
        "--laps", type=int, choices=(1, 2), help="with --stages: 2 for a vision-language model (default: 1)"
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda", "npu"),
        help="default: of the site, or CUDA or an NPU if there is one",
    )


def run(arguments: argparse.Namespace) -> int:
    """Follow until the edge closes. Returns 1 if a rank fails, and 2 for wrong usage, and prints the error."""
    in_job = bool(os.environ.get("LDT_JOB"))
    given = [name for name in _OF_TOPOLOGY if getattr(arguments, name) is not None]
    if (in_job and given) or not (in_job or "stages" in given):
        print(
            "python -m ldt follow: give --stages under torchrun, such as 1,1,1 for an edge and two cloud stages, and "
            "none of --stages, --dp, --edge-dp and --laps where `python -m ldt launch` starts it, as job.toml has the "
            "topology",
            file=sys.stderr,
        )
        return 2
    missing = [
        name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ
    ]
    if missing and not in_job:
        print(
            f"python -m ldt follow: {', '.join(missing)} not set: start it with torchrun, as --help shows, or set them "
            "for each rank",
            file=sys.stderr,
        )
        return 2
    try:
        import torch.distributed as dist

        from ldt.integrations import hf
    except ImportError as error:
        print(f"python -m ldt follow: {error}: pip install 'ldt-torch[hf]'", file=sys.stderr)
        return 2
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    try:
        with _connected(arguments) as mesh:
            if mesh.is_edge:
                raise LdtError("this rank is of the edge, which leads: run your script there")
            hf.follow(mesh, arguments.model, optimizer=arguments.optimizer, checkpoints=arguments.checkpoints)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except (LdtError, RemoteStageError, ValueError, OSError, ImportError) as error:
        print(f"python -m ldt follow: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


def _connected(arguments: argparse.Namespace) -> Mesh:
    """The mesh of job.toml, or of ``--stages``."""
    import ldt

    if arguments.stages is None:
        job = ldt.Job.from_env()
        _init(job.device if arguments.device is None else _device(arguments.device))
        return job.connect()
    given = {"dp": arguments.dp, "edge_dp": arguments.edge_dp, "laps": arguments.laps}
    topology = Topology(arguments.stages, **{name: n for name, n in given.items() if n is not None})
    _init(_device(arguments.device))
    return ldt.connect(topology)


def _init(device: torch.device) -> None:
    import torch
    import torch.distributed as dist

    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)
    dist.init_process_group(_BACKENDS[device.type])


def _device(kind: str | None) -> torch.device:
    """The device of this local rank. Raises ValueError if there is none."""
    import torch

    found = torch.accelerator.current_accelerator() if kind is None else torch.device(kind)
    if found is None or found.type == "cpu" or (kind is None and found.type not in _BACKENDS):
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0"))
    count = torch.get_device_module(found).device_count()
    if index >= count:
        raise ValueError(
            f"local rank {index} has no {found.type} device, this host has {count}: use --device cpu"
        )
    return torch.device(found.type, index)


def _sizes(text: str) -> list[int]:
    try:
        return [int(size) for size in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected sizes such as 1,2,2, got {text!r}") from None
