"""Training scripts and helpers for switching the extension on in real Ray; up to where workers on GPUs would start.

train.py      a training script of the shape of agent-lightning's examples; knows nothing of the extension
own_entry.py  the same through `agl_async_ckpt.run_ppo`, optionally in a Ray that it initialised itself
own_trainer.py  a user's trainer class, and a user's worker setup hook
names.py      what driver and observer agree on
observer.py   in every Ray worker: writes down what was built, in place of starting workers and training
cluster.py    a small Ray cluster for several scripts
launch.py     runs a script, reads its output
"""
