"""Drafters come and go, and lie; the texts stay."""

from __future__ import annotations

import json
import logging
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch

from outrider_vllm import remote_drafter
from outrider_vllm.settings import Settings
from running import DRAFTER, Vllm, running_drafter, wait_until


@pytest.fixture(scope="module")
def address() -> str:
    with socket.socket() as it:
        it.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{it.getsockname()[1]}"


@pytest.fixture(scope="module")
def vllm(address: str) -> Vllm:
    return Vllm([address], settings={"wait_ms": 20.0})


@pytest.fixture(scope="module")
def plain(vllm: Vllm) -> list[list[int]]:
    return vllm.texts(100, drafted=False, temperature=1.0, prompts=4, ignore_eos=True)


def drafted(vllm: Vllm) -> list[list[int]]:
    return vllm.texts(100, drafted=True, temperature=1.0, prompts=4, ignore_eos=True)


def test_without_a_drafter_there_are_no_drafts(vllm: Vllm, plain: list[list[int]]) -> None:
    assert drafted(vllm) == plain
    assert vllm.drafts.counts.drafted == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_drafter_that_dies_or_freezes_in_a_text(
    number: int, vllm: Vllm, plain: list[list[int]], address: str
) -> None:
    with running_drafter(listen=address) as it:
        wait_until(lambda: vllm.drafts.drafters)
        before = vllm.drafts.counts.drafted
        timer = threading.Timer(0.3, it.process.send_signal, [number])
        timer.start()
        assert drafted(vllm) == plain
        timer.join()
        assert vllm.drafts.counts.drafted > before
        assert drafted(vllm) == plain
        wait_until(lambda: not vllm.drafts.drafters)


def test_a_drafter_that_drafts_wrongly(vllm: Vllm, plain: list[list[int]], address: str, tmp_path: Path) -> None:
    with running_drafter(model=turned(tmp_path / "wrong"), listen=address):
        wait_until(lambda: vllm.drafts.drafters)
        before = vllm.drafts.counts.drafted, vllm.drafts.counts.accepted
        assert drafted(vllm) == plain
        found = vllm.drafts.counts.drafted - before[0], vllm.drafts.counts.accepted - before[1]
    assert found[0] > 50
    assert found[1] < found[0] / 10
    wait_until(lambda: not vllm.drafts.drafters)


def turned(folder: Path) -> Path:
    """The drafter's model, whose head names other tokens than it means."""
    shutil.copytree(DRAFTER, folder)
    [file] = folder.glob("*.safetensors")
    weights = safetensors.torch.load_file(file)
    config = json.loads((folder / "config.json").read_text())
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].roll(371, 0).clone()
    config["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.torch.save_file(weights, file)
    return folder


def test_a_drafter_of_another_tokenizer(vllm: Vllm, plain: list[list[int]], address: str, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    shutil.copytree(DRAFTER, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["!"], vocabulary["#"] = vocabulary["#"], vocabulary["!"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with running_drafter(model=folder, listen=address):
        time.sleep(2.0)
        assert vllm.drafts.drafters == 0
        assert drafted(vllm) == plain


def test_a_failure_is_said_once_and_costs_drafts_alone(
    vllm: Vllm, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> Iterator[None]:
        raise OSError("no drafts")

    monkeypatch.setattr(vllm.drafts, "step", fail)
    said: list[str] = []
    monkeypatch.setattr(logging.getLogger("vllm.outrider_vllm.remote_drafter"), "exception", said.append)
    assert drafted(vllm) == plain
    assert said == ["drafts fail, so vLLM goes on without; this is said once"]


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"drafterz": []}, "drafterz"),
        ({"drafters": "10.0.0.5:7072"}, "drafters"),
        ({"wait_ms": -1.0}, "wait_ms"),
        ({"shared_noise": "yes"}, "shared_noise"),
        ({"ca": "ca.pem"}, "cert"),
    ],
)
def test_settings_that_do_not_hold_are_named(given: dict[str, object], key: str) -> None:
    with pytest.raises(ValueError, match=key):
        Settings.read({"outrider": given}).upstream(DRAFTER, 4096, 4)


def test_an_unknown_version_of_vllm_has_no_drafts(monkeypatch: pytest.MonkeyPatch, vllm: Vllm) -> None:
    monkeypatch.setattr(remote_drafter.vllm, "__version__", "0.99.0")
    config = vllm.llm.llm_engine.vllm_config
    monkeypatch.setattr(config, "additional_config", {})
    other = remote_drafter.RemoteDrafter(config)
    other.load_model(None)
    assert other.propose([[5], []], [9, 3], None) == [[], []]
