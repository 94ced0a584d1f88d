"""A real asynchronous agent-lightning training run on CPU that is killed and resumed; `demo.py` is the entry point."""
