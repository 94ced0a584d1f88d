"""Values of an input state, as plain ones that `torch.load(weights_only=True)` takes, and back."""
