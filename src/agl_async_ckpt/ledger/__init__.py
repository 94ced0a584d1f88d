"""The ledger of a run: which inputs each step pulled, trained, dropped and left in flight, and its audit."""
