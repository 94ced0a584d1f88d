"""What lies on disk: names, durable files, the container, commit, seal, steps."""
