"""OpenRLHF's own arguments, as its own command line makes them."""

from __future__ import annotations

import importlib.metadata
import json
import runpy
import sys
from pathlib import Path
from typing import Any

PAD = "<pad>"


class _Parsed(Exception):  # noqa: N818 - control flow
    pass


def parse(*words: str) -> Any:
    """Return what `openrlhf.cli.train_ppo_ray` makes of a command line. Starts no Ray."""
    import openrlhf.utils
    import ray

    def stop(args: Any) -> None:
        raise _Parsed(args)

    # The parser is not a function: it is stopped at the first thing that `train` does with its result.
    originals = openrlhf.utils.get_strategy, ray.is_initialized, sys.argv
    openrlhf.utils.get_strategy, ray.is_initialized, sys.argv = stop, lambda: True, ["train_ppo_ray", *words]
    try:
        runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__")
    except _Parsed as parsed:
        return parsed.args[0]
    finally:
        openrlhf.utils.get_strategy, ray.is_initialized, sys.argv = originals
    raise AssertionError("train() returned")


def training_words(folder: Path, num_prompts: int, **settings: Any) -> list[str]:
    """Return a command line for a small asynchronous run.

    Args:
        folder: Gets the prompts, the tokenizer, and the checkpoints in `ckpt`.
        num_prompts: Prompts "0" to "num_prompts - 1".
        settings: `rollout__batch_size=2` for `--rollout.batch_size 2`; True for a switch, None to leave it out.
    """
    values: dict[str, Any] = {
        "actor.model_name_or_path": tokenizer_folder(folder),
        "data.prompt_dataset": prompts_file(folder, num_prompts),
        "data.input_key": "input",
        "data.label_key": "label",
        "ckpt.path": folder / "ckpt",
        "ckpt.load_enable": True,
        "ckpt.save_steps": 1,
        "train.async_enable": True,
        "train.agent_func_path": "agent.py",
        "train.batch_size": 1,
        "actor.num_gpus_per_node": 1,
        "rollout.batch_size": 2,
        "rollout.vllm_generate_batch_size": 4,
        "algo.advantage.estimator": "reinforce",
        "vllm.num_engines": 1,
    }
    values |= {key.replace("__", "."): value for key, value in settings.items()}
    words: list[str] = []
    for key, value in values.items():
        if value is not None and value is not False:
            words += [f"--{key}"] if value is True else [f"--{key}", *(str(value).split())]
    return words


def prompts_file(folder: Path, num_prompts: int) -> Path:
    """Write prompts "0", "1", ... with their numbers as labels."""
    path = folder / f"prompts_{num_prompts}.jsonl"
    if not path.exists():
        rows = [json.dumps({"input": str(number), "label": f"label {number}"}) for number in range(num_prompts)]
        path.write_text("\n".join(rows) + "\n")
    return path


def tokenizer_folder(folder: Path) -> Path:
    """Write a tokenizer that knows digits."""
    path = folder / "tokenizer"
    if not path.exists():
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from tokenizers.pre_tokenizers import Whitespace
        from transformers import PreTrainedTokenizerFast

        words = [PAD, "<unk>", *map(str, range(100))]
        built = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
        built.pre_tokenizer = Whitespace()
        PreTrainedTokenizerFast(
            tokenizer_object=built, pad_token=PAD, unk_token="<unk>", eos_token=PAD
        ).save_pretrained(str(path))
    return path


def version() -> str:
    """Return the version of OpenRLHF that is tested."""
    return importlib.metadata.version("openrlhf")
