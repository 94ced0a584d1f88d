"""The command `agl-async-ckpt`: look at checkpoints, and stop a training, without the training stack."""
