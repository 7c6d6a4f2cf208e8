"""Checkpoints by name: folders and GGUF files, of this machine or the Hugging Face hub, downloaded into its cache."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from outrider.errors import CheckpointError

# Types of a GGUF file's weights, as llama.cpp names its mixtures.
Mixture = Literal["Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "F16", "BF16", "F32"]
# What loads a checkpoint: see `ENGINES` in outrider.engine.loading.
Backend = Literal["auto", "native", "transformers", "llama.cpp"]

# Files to download before the weights. Outrider reads weights only as safetensors, so no other weight file is listed.
CARD = "outrider.json"  # a speculator's model card; see outrider.engine.checkpoints.model_card
DESCRIPTION = ("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "chat_template*", CARD)
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"

GGUF = ".gguf"  # ending of files that hold a model with its configuration and tokenizer

_NAME = re.compile(
    r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*)(?:@(?P<revision>[\w][\w./-]*))?"
    r"(?::(?P<file>(?:[\w-][\w. +-]*/)*[\w-][\w. +-]*\.gguf))?",
    re.ASCII | re.IGNORECASE,
)
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.ASCII | re.IGNORECASE)
_MOST_PARTS = 4096

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HubName:
    """The name of a repository of the hub, or of a file in it: ORG/NAME, ORG/NAME@REVISION, ORG/NAME@REVISION:FILE."""

    repository: str
    revision: str | None = None  # a branch, tag or commit; None: main
    file: str | None = None  # in GGUF, of a model that was split the first one; None: the whole repository is one model

    @property
    def name(self) -> str:
        """The last part of the repository's name, or the file's without its ending."""
        return gguf_stem(Path(self.file)) if self.file else self.repository.rpartition("/")[2]

    def __str__(self) -> str:
        revision, file = f"@{self.revision}" if self.revision else "", f":{self.file}" if self.file else ""
        return f"{self.repository}{revision}{file}"


class GgufParts(NamedTuple):
    """What the name of a file says of a model that was split."""

    stem: str
    number: int  # of the part, from 1
    parts: int


def is_gguf(checkpoint: str | Path) -> bool:
    """Return whether a checkpoint's name is that of a GGUF file."""
    return str(checkpoint).lower().endswith(GGUF)


def gguf_parts(path: Path) -> GgufParts | None:
    """Return what a file's name says of a model that was split, None where it says nothing of that."""
    match = _SPLIT.fullmatch(path.name)
    return GgufParts(match["stem"], int(match["number"]), int(match["count"])) if match else None


def gguf_stem(path: Path) -> str:
    """Return the name of a file's model: without the ending, and without the number of a part."""
    parts = gguf_parts(path)
    return parts.stem if parts else path.name[: -len(GGUF)]


def tokenizer_folder(checkpoint: Path) -> Path:
    """Return what holds a checkpoint's tokenizer and chat template: the checkpoint, or the folder of a GGUF file's name
    beside it, if that has a tokenizer.json."""
    folder = checkpoint.with_name(gguf_stem(checkpoint)) if is_gguf(checkpoint) else checkpoint
    return folder if (folder / TOKENIZER).is_file() else checkpoint


def hub_name(checkpoint: str | Path, base: Path | None = None) -> HubName | None:
    """Return the hub's repository that a checkpoint's name stands for; None where the name is a path.

    A name is a path when that path exists or the name does not look like ORG/NAME. `base`: the folder that relative
    paths start from; None: the current folder.
    """
    if os.path.lexists(checkpoint if base is None else base / checkpoint):
        return None
    match = _NAME.fullmatch(str(checkpoint))
    if match is None or (is_gguf(checkpoint) and not match["file"]):  # such a repository has no such ending
        return None
    return HubName(match["repository"], match["revision"], match["file"])


def checkpoint_folder(checkpoint: str | Path, *, weights: bool = True) -> Path:
    """Return the folder that holds a checkpoint: the path itself, or a snapshot of the repository in the hub's cache.
    Of a model in GGUF it is the path of the file.

    Downloads the files that the cache lacks: configuration, tokenizer and chat template, and with `weights` the
    safetensors; where a file is named, that one and its other parts. The hub's environment variables apply: HF_HOME,
    HF_HUB_CACHE, HF_TOKEN, HF_HUB_OFFLINE.

    Raises CheckpointError for a repository that cannot be downloaded, with what to do. Do not check
    the content of a path.
    """
    name = hub_name(checkpoint)
    if name is None:
        return Path(checkpoint)
    if not _offline():
        log.info("fetching %s from the Hugging Face hub, as far as its cache here lacks it", name)
    if name.file:
        return _download_file(name, name.file)
    folder = _download(name, name.revision, (*DESCRIPTION, INDEX) if weights else DESCRIPTION)
    needed = [TOKENIZER]
    if weights:
        files = _weight_files(folder)
        _download(name, folder.name, files)  # of the same commit as the description
        needed += ["config.json", *files]
    if missing := [file for file in needed if not (folder / file).is_file()]:
        raise CheckpointError(
            f"{name}: {_named_files(missing)} missing in {folder}; {_download_advice(name)}, unless the repository "
            "itself has none: it must hold a tokenizer.json, and weights as safetensors"
        )
    return folder


def _download_file(name: HubName, file: str) -> Path:
    """Return the path of a file in the cache, with its other parts beside it. Raises CheckpointError."""
    parts = gguf_parts(Path(file))
    files = [file]
    if parts is not None:
        if parts.number != 1 or not 1 <= parts.parts <= _MOST_PARTS:
            raise CheckpointError(f"{name}: is part {parts.number} of {parts.parts}; give the first one")
        head = file[: -len(f"00001-of-{parts.parts:05}{GGUF}")]
        files = [f"{head}{number:05}-of-{parts.parts:05}{GGUF}" for number in range(1, parts.parts + 1)]
    folder = _download(name, name.revision, files)
    if missing := [one for one in files if not (folder / one).is_file()]:
        raise CheckpointError(
            f"{name}: {_named_files(missing)} missing in {folder}; mind the spelling, as on the repository's page, or "
            f"{_download_advice(name)}"
        )
    return folder / file


def _weight_files(folder: Path) -> list[str]:
    """Return the files that the index names, or the single file without one. Raises CheckpointError if it is broken."""
    try:
        files = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
        return sorted(file.strip() for file in files)
    except FileNotFoundError:
        return [SINGLE]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{folder / INDEX}: is no index of weights ({error}); remove it and fetch it again"
        ) from None


def _download(name: HubName, revision: str | None, patterns: Iterable[str]) -> Path:
    """Return the snapshot of a revision with all of its files that match `patterns`. Raises CheckpointError."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        IncompleteSnapshotError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # it would log every request
    try:
        return Path(snapshot_download(name.repository, revision=revision, allow_patterns=list(patterns)))
    except HFValidationError as error:
        raise CheckpointError(f"{name}: no such folder, and no name of the hub's: {error}") from None
    except GatedRepoError:
        problem = "is gated: accept its conditions on huggingface.co, and set HF_TOKEN to a token of that account"
    except RepositoryNotFoundError:
        problem = (
            "no such folder here, and no such repository on the Hugging Face hub, or a private one; mind the spelling, "
            "and for a private one set HF_TOKEN to a token that may read it"
        )
    except RevisionNotFoundError:
        problem = f"{name.repository} has no revision {name.revision!r}; give a branch, a tag or a commit that it has"
    except IncompleteSnapshotError as error:
        problem = f"{error.snapshot_path} is incomplete, and {_hub_problem()}; {_download_advice(name)}"
    except LocalEntryNotFoundError:
        problem = (
            f"no such folder here, not in the Hugging Face cache ({constants.HF_HUB_CACHE}), and {_hub_problem()}; "
            f"mind the spelling, or {_download_advice(name)}"
        )
    except HfHubHTTPError as error:
        problem = _failed_download(error)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = (
            "make room there, or set HF_HOME to where there is some" if full else "set HF_HOME to a folder of yours"
        )
        problem = f"cannot be put into {constants.HF_HUB_CACHE}: {error.strerror or error}; {remedy}"
    except Exception as error:  # the errors of the transports have no common base
        problem = _failed_download(error)
    raise CheckpointError(f"{name}: {problem}")


def _failed_download(error: Exception) -> str:
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"cannot be fetched from the Hugging Face hub: {line}; try again, files that are complete are kept"


def _offline() -> bool:
    from huggingface_hub import constants

    return constants.is_offline_mode()


def _hub_problem() -> str:
    return "HF_HUB_OFFLINE forbids to fetch it" if _offline() else "the hub cannot be reached"


def _download_advice(name: HubName) -> str:
    revision = f" --revision {name.revision}" if name.revision else ""
    file = f" {name.file}" if name.file else ""
    return f"fill the cache where there is a network, with `hf download {name.repository}{file}{revision}`"


def _named_files(files: list[str]) -> str:
    more = f" and {len(files) - 3} more are" if len(files) > 3 else " are" if len(files) > 1 else " is"
    return ", ".join(files[:3]) + more
