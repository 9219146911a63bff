"""Checkpoints of torch.distributed.checkpoint, looked at without loading them."""

from vescale_optim.checkpoints.checks import check_checkpoint, latest_checkpoint
from vescale_optim.checkpoints.contents import CheckpointContents, SavedTensor, read_contents

__all__ = ["CheckpointContents", "SavedTensor", "check_checkpoint", "latest_checkpoint", "read_contents"]
