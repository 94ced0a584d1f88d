"""What readers copy from the pages is right: settings exist and are valid, YAML parses, imports lead somewhere."""

from __future__ import annotations

import ast
import functools
import importlib
import re
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from agl_async_ckpt.config import SECTION, AsyncCheckpointConfig, read_config
from tests.docs.pages import Block, all_pages, blocks
from tests.rig.settings import RunSettings, compose_config

ROOTS = ("actor_rollout_ref", "agentlightning", "algorithm", "critic", "data", "ray_kwargs", "trainer")
DOTTED = re.compile(rf"(?<![\w./-])((?:{'|'.join(ROOTS)})(?:\.[A-Za-z_]\w*)+)(=[^\s`,;:)\"']+)?")

NOT_IN_THE_DEFAULTS = {
    "ray_kwargs.ray_init.runtime_env.worker_process_setup_hook": "Ray's own, handed on to ray.init",
    "ray_kwargs.ray_init.runtime_env.env_vars": "Ray's own, handed on to ray.init",
    "data.gen_batch_size": "VERL asks whether it is there",
}
NOT_A_SETTING = {
    "data.pt": "a file",
    "data.pkl": "a file",
    "agentlightning.verl.entrypoint": "a module",
    "agentlightning.verl.trainer": "a module",
}
MEANT_TO_BE_WRONG = {f"{SECTION}.nonsense": "shows that the extension is loaded"}


def every(*languages: str) -> list[Block]:
    """Blocks of all pages in some languages."""
    return [block for page in all_pages() for block in blocks(page, *languages)]


@functools.cache
def defaults() -> Any:
    """The config of agent-lightning and VERL as a training script has it."""
    return compose_config(RunSettings(n=8, B=2, A=3), "checkpoints/my_run", "http://127.0.0.1:1")


def is_known(key: str) -> bool:
    """Whether something reads a setting."""
    if key == SECTION or key.removeprefix(f"{SECTION}.") in AsyncCheckpointConfig.model_fields:
        return True
    parent, _, name = key.rpartition(".")
    section = OmegaConf.select(defaults(), parent)
    return OmegaConf.is_dict(section) and name in section


def test_every_setting_on_any_page_exists() -> None:
    """Of this package, of agent-lightning and of VERL; each exception has a reason and is used."""
    exceptions = NOT_IN_THE_DEFAULTS | NOT_A_SETTING | MEANT_TO_BE_WRONG
    unknown: dict[str, set[str]] = {}
    for page in all_pages():
        for key, _ in DOTTED.findall(page.read_text()):
            if not is_known(key):
                unknown.setdefault(key, set()).add(page.name)
    assert {key: pages for key, pages in unknown.items() if key not in exceptions} == {}
    assert set(exceptions) <= set(unknown)


def test_every_value_of_our_settings_on_any_page_is_allowed() -> None:
    """`agentlightning.async_checkpoint.key=value`, wherever it stands."""
    found = 0
    for page in all_pages():
        for key, value in DOTTED.findall(page.read_text()):
            if value and key.startswith(f"{SECTION}.") and key not in MEANT_TO_BE_WRONG and "<" not in value:
                read_config(OmegaConf.from_dotlist([key + value.rstrip(".")]))
                found += 1
    assert found > 3


@pytest.mark.parametrize("block", every("yaml", "yml"), ids=lambda block: f"{block.page}_{block.number}")
def test_yaml_parses_and_its_settings_exist(block: Block) -> None:
    """A trainer config is validated as a start does it; other YAML is YAML."""
    for document in yaml.safe_load_all(block.code):
        assert isinstance(document, dict)
        if not set(document) & set(ROOTS):
            continue
        config = OmegaConf.create(document)
        read_config(config)
        for key in leaves(document):
            assert is_known(key) or key in NOT_IN_THE_DEFAULTS, key


@pytest.mark.parametrize("block", every("python"), ids=lambda block: f"{block.page}_{block.number}")
def test_python_parses_and_its_imports_lead_somewhere(block: Block) -> None:
    """Names of this package and of the frameworks."""
    for node in ast.walk(ast.parse(block.code)):
        if isinstance(node, ast.ImportFrom):
            assert node.module is not None
            module = importlib.import_module(node.module)
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                importlib.import_module(alias.name)


def test_every_language_of_a_block_is_one_that_is_tested_or_plain() -> None:
    """A block of a new language needs a test of its own."""
    assert {block.language for block in every()} <= {"bash", "console", "python", "text", "yaml"}


def leaves(values: dict[str, Any], above: str = "") -> list[str]:
    """Dotted names of the innermost settings."""
    found: list[str] = []
    for name, value in values.items():
        key = f"{above}{name}"
        found += leaves(value, f"{key}.") if isinstance(value, dict) else [key]
    return found
