"""OpenRLHF's real generator, trainer, queues and data on CPU; engines and models are stand-ins."""
