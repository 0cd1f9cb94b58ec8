"""Shared models and a rule for CI: there, a skipped test fails the run."""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))


def pytest_sessionfinish(session, exitstatus):
    reporter = session.config.pluginmanager.getplugin("terminalreporter")
    if os.environ.get("CI") and reporter.stats.get("skipped") and exitstatus == 0:
        session.exitstatus = 1


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """make(name, **config): the directory of a random Qwen3 with the toy tokenizer."""
    from toy import lm

    root = tmp_path_factory.mktemp("models")

    def make(name, edit=lambda tokenizer: None, **config):
        directory = root / name
        if not directory.exists():
            tokenizer = lm.tokenizer()
            edit(tokenizer)
            lm.random_model(**dict(vocab_size=len(tokenizer)) | config).save_pretrained(directory)
            tokenizer.save_pretrained(directory)
        return str(directory)

    return make


@pytest.fixture(scope="session")
def toy(tmp_path_factory):
    """The real toy model and its problems, as `python dppo.py` makes them."""
    from toy import lm

    root = tmp_path_factory.mktemp("toy")
    model, dataset = lm.make(root / "toy-base")
    return root, str(model), str(dataset)
