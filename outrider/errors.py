"""The errors of Outrider, one tree. `outrider.rpc.status` maps each to one gRPC status, there and back.

OutriderError
├── InvalidRequest        a field of a request is wrong: names the field and what is allowed
├── NotFound              no such model or session
├── TokenizerMismatch     two parts of the cluster use different tokenizers
├── Unauthenticated       an API key is missing, unknown, expired or revoked
├── Forbidden             a ticket or a certificate does not permit it
├── Superseded            somebody with a higher epoch owns the session now
├── Busy                  a generation of this session has not ended
├── Conflict              the log already says something else, or would get a gap
├── Overloaded            no room; `retry_after` says when to come back
├── Unavailable           a part of the cluster cannot be reached
│   └── Moved             it is going down in order and has let go: another one goes on, at once
├── DeadlineExceeded      the caller's time ran out
├── Cancelled             somebody cancelled the generation
├── CheckpointError       a model folder is missing, incomplete or of an unknown kind
├── ConfigError           a configuration file or a flag is wrong
└── InternalError         a bug; everything not listed above
"""

from __future__ import annotations


class OutriderError(Exception):
    """Base of all errors that Outrider raises on purpose. Its text tells the user what to do."""


class InvalidRequest(OutriderError):
    """A field of a request is wrong."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


class NotFound(OutriderError):
    """No such model or session."""


class TokenizerMismatch(OutriderError):
    """Two parts of the cluster use different tokenizers."""


class Unauthenticated(OutriderError):
    """An API key is missing, unknown, expired or revoked."""


class Forbidden(OutriderError):
    """A ticket is missing, forged, expired, or permits something else; or a certificate is for another role."""


class Superseded(OutriderError):
    """Somebody with a higher epoch owns the session now. Do not retry."""


class Busy(OutriderError):
    """A generation of this session has not ended: resume it, cancel it, or wait."""


class Conflict(OutriderError):
    """The log already holds different tokens at a position, or the append would leave a gap."""


class Overloaded(OutriderError):
    """No room. Come back after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Unavailable(OutriderError):
    """A part of the cluster cannot be reached."""


class Moved(Unavailable):
    """A server is going down in order and has let the generation go where it stands. Another one goes on at once."""


class DeadlineExceeded(OutriderError):
    """The caller's time ran out."""


class Cancelled(OutriderError):
    """Somebody cancelled the generation."""


class CheckpointError(OutriderError):
    """A model folder is missing, incomplete or of an unknown kind."""


class ConfigError(OutriderError):
    """A configuration file or a flag is wrong."""


class InternalError(OutriderError):
    """A bug."""
