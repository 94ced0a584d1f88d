"""An output folder seen from outside, without a trainer: steps, seals, run and lives, lock, what a start does."""
