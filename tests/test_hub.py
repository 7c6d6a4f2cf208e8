"""A checkpoint may be a folder or a name on the hub; what cannot be had is reported with what to do."""

from __future__ import annotations

import errno
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from outrider.config import VerifierConfig
from outrider.errors import CheckpointError
from outrider.hub import HubName, checkpoint_folder, hub_name
from tests.fake_hub import Hub, cached, serving_hub

TARGET = Path(__file__).parents[1] / "models" / "target"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "cache"


@pytest.fixture
def hub(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with the target as org/name, among files that are not for us."""
    folder = tmp_path / "repository"
    shutil.copytree(TARGET, folder)
    for name in ("pytorch_model.bin", "consolidated.safetensors", "model.pt", "README.md"):
        (folder / name).write_text("x")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    with serving_hub({"org/name": folder}) as hub:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace("https://huggingface.co", hub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield hub


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("org/name", HubName("org/name")),
        ("Org-1/a.b_c-d@v1.0", HubName("Org-1/a.b_c-d", "v1.0")),
        ("org/name@refs/pr/1", HubName("org/name", "refs/pr/1")),
        ("org/name:a.Q4_K_M.gguf", HubName("org/name", None, "a.Q4_K_M.gguf")),
        ("org/name-GGUF@v1:sub-1/a-00001-of-00002.GGUF", HubName("org/name-GGUF", "v1", "sub-1/a-00001-of-00002.GGUF")),
        ("org/name.gguf", None),
        ("org/name:model.safetensors", None),
        ("org/name:../a.gguf", None),
        ("org/name:/a.gguf", None),
        ("org/name:a*.gguf", None),
        ("name", None),
        ("a/b/c", None),
        ("../name", None),
        ("/org/name", None),
        ("org/name@", None),
        ("org/na me", None),
    ],
)
def test_names_on_the_hub_are_recognized(given: str, name: HubName | None) -> None:
    assert hub_name(given) == hub_name(Path(given)) == name


def test_an_existing_path_is_not_a_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    cached(cache, "org/name", TARGET)
    assert checkpoint_folder("org/name") != Path("org/name")
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert hub_name("org/name") == HubName("org/name")
    assert hub_name("org/name", tmp_path) is None
    monkeypatch.chdir(tmp_path)
    assert hub_name("org/name") is None
    assert checkpoint_folder("org/name") == Path("org/name")


def test_a_model_without_a_name_is_named_after_its_repository() -> None:
    assert VerifierConfig(model=Path("org/name@v1")).model_name == "name"
    assert VerifierConfig(model=Path("org/name@v1"), name="other").model_name == "other"
    assert VerifierConfig(model=TARGET).model_name == "target"
    assert VerifierConfig(model=Path("org/name@v1:sub/a.Q8_0-00001-of-00003.gguf")).model_name == "a.Q8_0"
    assert VerifierConfig(model=Path("models/a.Q4_K_M.gguf")).model_name == "a.Q4_K_M"


def test_a_revision_is_its_own_snapshot(cache: Path) -> None:
    main, tagged = cached(cache, "org/name", TARGET), cached(cache, "org/name", TARGET, revision="v1")
    assert main != tagged
    assert checkpoint_folder("org/name") == main
    assert checkpoint_folder("org/name@v1") == tagged
    assert checkpoint_folder(f"org/name@{tagged.name}") == tagged


def test_a_snapshot_without_weights_suffices_for_a_tokenizer(cache: Path) -> None:
    snapshot = cached(cache, "org/name", TARGET, files="*.json")
    assert checkpoint_folder("org/name", weights=False) == snapshot
    with pytest.raises(CheckpointError, match=r"^org/name: model\.safetensors is missing.*hf download org/name"):
        checkpoint_folder("org/name")


def test_of_a_repository_only_the_named_file_is_fetched_and_its_parts(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "gguf"
    folder.mkdir()
    for name in ("a.Q4_0.gguf", "a.Q8_0.gguf", "b-00001-of-00002.gguf", "b-00002-of-00002.gguf", "config.json"):
        (folder / name).write_text(name)
    hub.repositories["org/gguf"] = folder
    for weights in (True, False):
        found = checkpoint_folder("org/gguf:a.Q4_0.gguf", weights=weights)
        assert found.read_text() == "a.Q4_0.gguf"
    assert hub.sent == ["a.Q4_0.gguf"]
    assert checkpoint_folder("org/gguf@main:b-00001-of-00002.gguf").name == "b-00001-of-00002.gguf"
    assert sorted(hub.sent[1:]) == ["b-00001-of-00002.gguf", "b-00002-of-00002.gguf"]
    with pytest.raises(CheckpointError, match=r"b-00002-of-00002\.gguf: is part 2 of 2; give the first one"):
        checkpoint_folder("org/gguf:b-00002-of-00002.gguf")
    with pytest.raises(
        CheckpointError, match=r"^org/gguf:c\.gguf: c\.gguf is missing in .*hf download org/gguf c\.gguf"
    ):
        checkpoint_folder("org/gguf:c.gguf")


def test_every_shard_of_the_index_must_exist(cache: Path, tmp_path: Path) -> None:
    snapshot = cached(cache, "org/name", TARGET, files="*.json")
    shards = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    (snapshot / "model-1.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"^org/name: model-2\.safetensors is missing"):
        checkpoint_folder("org/name")
    (snapshot / "model-2.safetensors").touch()
    assert checkpoint_folder("org/name") == snapshot
    for broken in ('{"weight_map": 1}', '{"weight_map": {"a": 1}}', "{}", "x"):
        (snapshot / "model.safetensors.index.json").write_text(broken)
        with pytest.raises(CheckpointError, match=r"index\.json: is no index of weights"):
            checkpoint_folder("org/name")


def test_a_name_missing_from_the_cache_is_reported_with_its_download_command(cache: Path) -> None:
    cached(cache, "org/name", TARGET)
    for missing, command in (
        ("org/other", "hf download org/other`"),
        ("org/name@v2", "hf download org/name --revision v2`"),
    ):
        with pytest.raises(CheckpointError, match=rf"^{missing}: .*not in .*HF_HUB_OFFLINE forbids.*{command}"):
            checkpoint_folder(missing)


def test_a_download_fetches_only_the_needed_files(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "outrider.hub"):
        folder = checkpoint_folder("org/name", weights=False)
    assert [record.getMessage() for record in caplog.records if record.name == "outrider.hub"] == [
        "fetching org/name from the Hugging Face hub, as far as its cache here lacks it"
    ]
    described = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert set(hub.sent) == described | {"chat_template.jinja"}
    assert checkpoint_folder("org/name") == folder
    assert sorted(hub.sent) == sorted({*described, "chat_template.jinja", "model.safetensors"})
    assert (folder / "model.safetensors").read_bytes() == (TARGET / "model.safetensors").read_bytes()


def test_an_interrupted_download_is_incomplete_offline(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint_folder("org/name")
    (folder / "tokenizer.json").unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match=r"^org/name: .*incomplete, and HF_HUB_OFFLINE forbids.*hf download"):
        checkpoint_folder("org/name")


def test_a_hub_that_cannot_be_reached_does_not_matter_where_the_cache_has_all(hub: Hub) -> None:
    folder = checkpoint_folder("org/name")
    hub.refusals["org/name"] = (503, "")
    assert checkpoint_folder("org/name") == folder


@pytest.mark.parametrize(
    ("refusal", "name", "reason"),
    [
        (None, "org/other", "no such folder here, and no such repository .*HF_TOKEN"),
        (None, "org/name@v9", "has no revision 'v9'"),
        ((403, "GatedRepo"), "org/name", "is gated: accept .*HF_TOKEN"),
        ((503, ""), "org/name", "the hub cannot be reached; .*hf download org/name"),
    ],
)
def test_a_refusal_by_the_hub_is_reported_with_the_remedy(
    hub: Hub, refusal: tuple[int, str] | None, name: str, reason: str
) -> None:
    if refusal:
        hub.refusals["org/name"] = refusal
    with pytest.raises(CheckpointError, match=rf"^{name}: .*{reason}"):
        checkpoint_folder(name)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device; make room there, or set HF_HOME"),
        (PermissionError(errno.EACCES, "Permission denied"), "Permission denied; set HF_HOME"),
        (RuntimeError("reset by peer"), "cannot be fetched from the Hugging Face hub: reset by peer; try again"),
    ],
)
def test_a_failed_download_is_reported_with_the_remedy(
    cache: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    def fails(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fails)
    with pytest.raises(CheckpointError, match=rf"^org/name: .*{reason}"):
        checkpoint_folder("org/name")
