"""The command `agl-async-ckpt`: look at checkpoints without a GPU, a cluster, or the training stack."""
