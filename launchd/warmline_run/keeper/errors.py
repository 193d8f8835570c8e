"""Errors of the keeper's HTTP routes, by class: status, type and code of OpenAI's error object."""


class KeeperError(Exception):
    """A refused call; the text is for people."""

    status = 400
    kind = "invalid_request_error"
    code: str | None = None


class UnknownModelError(KeeperError):
    status, code = 404, "model_not_found"


class ModelPinnedError(KeeperError):
    status, code = 409, "model_pinned"


class PinNotWrittenError(KeeperError):
    """A pin that the next start would not know of."""

    status, kind, code = 503, "unavailable", "pin_not_written"


class KeeperStoppingError(KeeperError):
    status, kind, code = 503, "unavailable", "stopping"


class LoadRefusedError(KeeperError):
    """Base of the refusals for want of memory."""


class NoRoomError(LoadRefusedError):
    """It would fit if another model was unloaded."""

    status, code = 409, "no_room"


class ModelTooLargeError(LoadRefusedError):
    """It fits beside nothing but the pinned models, or not even there."""

    status, code = 400, "model_too_large"
