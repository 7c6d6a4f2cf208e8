"""The errors of Outrider, one tree. `outrider.rpc.status` maps each to one gRPC status, there and back.

OutriderError
├── InvalidRequest        a field of a request is wrong: names the field and what is allowed
│   └── TooLong           prompt and answer do not fit into the model's context
├── NotFound              no such model or session
├── TokenizerMismatch     two parts of the cluster use different tokenizers
├── Unauthenticated       an API key is missing, unknown, expired or revoked
├── Forbidden             a ticket or a certificate does not permit it
├── Superseded            a router with a higher epoch owns the session now
├── Busy                  a generation of this session has not ended
├── Conflict              the log already holds other tokens there, or would get a gap
├── Overloaded            no capacity; retry after `retry_after` seconds
├── Unavailable           a part of the cluster cannot be reached
│   ├── Moved             a server shuts down in order; another one continues at once
│   └── Stalled           a part is connected and does not answer: it stands still
├── DeadlineExceeded      the deadline of the call has passed
├── Cancelled             the generation was cancelled
├── CheckpointError       a model folder is missing, incomplete or of an unknown kind
├── ConfigError           a configuration file or a flag is wrong
└── InternalError         a bug; everything not listed above
"""

from __future__ import annotations


class OutriderError(Exception):
    """Base of all errors that Outrider raises on purpose. Its text says what to do."""


class InvalidRequest(OutriderError):
    """A field of a request is wrong."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


class TooLong(InvalidRequest):
    """The prompt, or the answer that is asked for behind it, does not fit into the model's context."""


class NotFound(OutriderError):
    """No such model or session."""


class TokenizerMismatch(OutriderError):
    """Two parts of the cluster use different tokenizers."""


class Unauthenticated(OutriderError):
    """An API key is missing, unknown, expired or revoked."""


class Forbidden(OutriderError):
    """A ticket is missing, forged, expired, or permits something else; or a certificate is for another role."""


class Superseded(OutriderError):
    """A router with a higher epoch owns the session now. Do not retry."""


class Busy(OutriderError):
    """A generation of this session has not ended: resume it, cancel it, or wait."""


class Conflict(OutriderError):
    """What a session began with has changed: its log at a position, or the files of its adapter."""


class Overloaded(OutriderError):
    """No capacity. Retry after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Unavailable(OutriderError):
    """A part of the cluster cannot be reached."""


class Moved(Unavailable):
    """A server shuts down in order and has released the generation where it stands. Another one continues at once."""


class Stalled(Unavailable):
    """A part of the cluster is connected, and has not answered for so long that it must stand still."""


class DeadlineExceeded(OutriderError):
    """The deadline of the call has passed."""


class Cancelled(OutriderError):
    """The generation was cancelled."""


class CheckpointError(OutriderError):
    """A model folder is missing, incomplete or of an unknown kind."""


class ConfigError(OutriderError):
    """A configuration file or a flag is wrong."""


class InternalError(OutriderError):
    """A bug."""
