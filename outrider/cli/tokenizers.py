"""Reads a checkpoint's tokenizer, for commands that need no more of the checkpoint."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from outrider.core.session.digest import tokenizer_digest
from outrider.errors import CheckpointError
from outrider.hub import checkpoint_folder


def read_tokenizer(checkpoint: Path) -> tuple[Tokenizer, bytes]:
    """Return a checkpoint's tokenizer and its digest. Raises CheckpointError."""
    path = checkpoint_folder(checkpoint, weights=False) / "tokenizer.json"
    try:
        content = path.read_bytes()
        return Tokenizer.from_buffer(content), tokenizer_digest(content)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}; give the target's checkpoint") from None
    except Exception as error:  # the library raises bare Exceptions
        raise CheckpointError(f"{path}: not a tokenizer of the `tokenizers` library: {error}") from None
