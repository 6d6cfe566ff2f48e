"""Saves and loads checkpoints of all stages. Each stage writes its own; any topology can read them.

    <path>/step-<n>/stage-<s>/      complete once it has this name
        stage.json                  step, topology, optimizer's hyperparameters, on the edge the data position
        rank-<replica>.<i>/         of each rank of the stage
            __0_0.distcp, .metadata tensors or its shards of them, in the format of torch.distributed.checkpoint
            random_states.json
            checksums.json          of each piece of these files

Only tensors pass from one stage to another, and only where a stage reads a folder that another stage wrote.
"""

from ldt.train.checkpoint.load import LoadedCheckpoint, load_checkpoint
from ldt.train.checkpoint.merge import merge_checkpoint
from ldt.train.checkpoint.save import save_checkpoint

__all__ = ["LoadedCheckpoint", "load_checkpoint", "merge_checkpoint", "save_checkpoint"]
