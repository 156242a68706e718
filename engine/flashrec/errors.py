"""The errors that FlashRec raises on purpose. Each message says what, where, and what to do."""

from __future__ import annotations


class FlashRecError(Exception):
    """Base of every error that a user can cause; the command line prints it in one line and exits with 2."""


class ConfigError(FlashRecError):
    """A flag or an :class:`~flashrec.config.EngineConfig` field is out of range or contradicts another."""


class CheckpointError(FlashRecError):
    """A model directory is incomplete, or its tensors do not fit its config."""


class UnsupportedModelError(FlashRecError):
    """The checkpoint asks for something that has neither a kernel nor a complete fallback."""


class LayoutError(FlashRecError):
    """The tokenizer's semantic-ID tokens cannot be understood, or contradict ``--sid``."""


class CatalogError(FlashRecError):
    """A catalog file is malformed or names codes that the layout does not have."""


class CatalogStateError(FlashRecError):
    """The engine's catalogs cannot be changed like this now, such as going back to nothing; servers answer 409."""


class RequestError(FlashRecError):
    """A request is invalid. ``field`` names the offending field; servers answer 400."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message

    def __reduce__(self) -> tuple[type[RequestError], tuple[str, str]]:
        return type(self), (self.field, self.message)


class QueueFullError(FlashRecError):
    """The scheduler's queue is full; servers answer 503 with ``Retry-After``."""


class DeadlineError(FlashRecError):
    """A request's deadline passed before it was answered; servers answer 504."""


class NonFiniteError(FlashRecError):
    """The model's scores for one request were NaN or infinite. Its wave mates are not affected."""


class EngineFault(FlashRecError):  # noqa: N818 - a state of the engine, not a kind of bad input
    """The engine cannot go on; every waiting request gets this, and a server ends with status 1."""


class CaptureError(FlashRecError):
    """An operation cannot be captured as a CUDA graph: the start ends with it, a wave that needed it fails."""
