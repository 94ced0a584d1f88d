"""The inputs as an uninterrupted run pulls them: the same dataset, sampler, seed and loader, read without training."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from agentlightning.verl.dataset import LoadedDataset
from omegaconf import OmegaConf
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.trainer.main_ppo import create_rl_sampler
from verl.utils.dataset.rl_dataset import collate_fn

from cpu_training.settings import TRAIN_BATCH, dataset_rows
from cpu_training.train import data_settings


def pull_order(num_inputs: int) -> list[int]:
    """Input ids of one epoch in loader order; what does not fill a batch is left out by the loader, as in training."""
    dataset = LoadedDataset(dataset_rows(num_inputs))
    data = OmegaConf.create(data_settings())
    loader = StatefulDataLoader(
        dataset=dataset,
        batch_size=TRAIN_BATCH,
        num_workers=data.dataloader_num_workers,
        drop_last=True,
        collate_fn=collate_fn,
        sampler=create_rl_sampler(data, dataset),
    )
    return [int(i) for batch in loader for i in batch["input_id"]]


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(pull_order(int(sys.argv[1]))))
