"""Errors as HTTP responses: `{"error": {"message", "type", "param", "code"}}`, the format OpenAI clients read."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from http import HTTPStatus

import msgspec

from quire.errors import (
    BusyError,
    CacheTooSmallError,
    EngineDeadError,
    OutOfResourcesError,
    QuireError,
    ReplicaDownError,
    SessionBusyError,
    SessionExistsError,
    SessionLostError,
    SessionNotFoundError,
    SessionQuotaError,
    StoreError,
    StoreFullError,
    ValidationError,
)
from quire.resource_limits import as_resource_error, log_cause

logger = logging.getLogger(__name__)

RETRY_SECONDS = 1
"""Default of Retry-After."""
LONGEST_MESSAGE = 1000
"""Characters of an error message."""

TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "timeout",
    409: "ConflictError",
    410: "GoneError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "RateLimitError",
    431: "RequestTooLargeError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
    505: "NotImplementedError",
    507: "InsufficientStorageError",
}
SESSION_ERRORS: tuple[tuple[type[QuireError], int], ...] = (
    (SessionNotFoundError, 404),
    (SessionExistsError, 409),
    (SessionBusyError, 409),
    (SessionLostError, 410),
    (SessionQuotaError, 429),
    (StoreFullError, 507),
    (StoreError, 503),
)
"""Status of session errors, subclasses first."""


class ErrorDetail(msgspec.Struct):
    """What is wrong with the request."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(msgspec.Struct):
    """The body of every error response, and the last event of a stream that failed."""

    error: ErrorDetail
    detail: str | msgspec.UnsetType = msgspec.UNSET
    """Of a path that is not served here: what clients of other servers look at."""


class ApiError(QuireError):
    """An error to be sent as a response with this status."""

    def __init__(
        self,
        status: int,
        message: str,
        type: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        detail: str | msgspec.UnsetType = msgspec.UNSET,
    ) -> None:
        message, param = shortened(message), None if param is None else shortened(param)
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type or TYPES.get(status, "InternalServerError")
        self.param = param
        self.headers = dict(headers or {})
        self.detail = detail

    @property
    def body(self) -> ErrorBody:
        """The response body."""
        return ErrorBody(ErrorDetail(self.message, self.type, self.param, self.status), self.detail)


def shortened(text: str) -> str:
    """Shorten a message in the middle: it may quote a value of megabytes."""
    return text if len(text) <= LONGEST_MESSAGE else f"{text[: LONGEST_MESSAGE // 2]} … {text[-LONGEST_MESSAGE // 4 :]}"


def bad_request(message: str, param: str | None = None) -> ApiError:
    """400: the request is invalid."""
    return ApiError(400, message, param=param)


def not_found(message: str, param: str | None = None) -> ApiError:
    """404: no such model or object."""
    return ApiError(404, message, param=param)


def not_served(message: str) -> ApiError:
    """404: no such route, or none for this model."""
    return ApiError(404, message, detail="Not Found")


def unavailable(message: str, retry_after: float = RETRY_SECONDS) -> ApiError:
    """503: the request cannot be served now."""
    return ApiError(503, message, headers={"Retry-After": retry_text(retry_after)})


def engine_failure(reason: str | None) -> ApiError:
    """500: the engine ended the request."""
    return ApiError(500, f"the engine could not finish this request: {reason or 'it was aborted'}")


def retry_text(seconds: float) -> str:
    """Seconds as Retry-After requires them: whole, and at least one."""
    return str(max(1, round(seconds)))


def as_api_error(error: BaseException, retry_after: float = RETRY_SECONDS) -> ApiError:
    """Any exception as a response. An unexpected one is logged, and sent without details."""
    if isinstance(error, ApiError):
        return error
    if (status := next((status for kind, status in SESSION_ERRORS if isinstance(error, kind)), 0)) != 0:
        if isinstance(error, StoreError) and status >= 500:
            log_cause(str(error))
        return ApiError(status, str(error), param="session")
    if isinstance(error, ValidationError):
        return bad_request(str(error), error.parameter)
    if isinstance(error, CacheTooSmallError):
        return bad_request(str(error), "input_tokens")
    if isinstance(error, BusyError):
        return ApiError(429, str(error), headers={"Retry-After": retry_text(retry_after)})
    if isinstance(error, ReplicaDownError):
        return unavailable(str(error), retry_after)
    if isinstance(error, EngineDeadError):
        return unavailable(f"the engine is not running and is being restarted: {error}", retry_after)
    if (short := error if isinstance(error, OutOfResourcesError) else as_resource_error(error)) is not None:
        return unavailable(f"the server is out of resources: {short}", retry_after)
    if isinstance(error, QuireError):
        return ApiError(500, str(error))
    logger.error("a request failed with an unexpected exception", exc_info=error)
    return ApiError(500, f"an unexpected {type(error).__name__} was raised; the server's log has more")


_FIELD = re.compile(r"[a-z]+(?:[_.][a-z]+)+")
"""Text that can only be a field's name: a plain word such as `stop` may mean something else."""


def in_client_terms(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """The same error with the client's field names; `names` maps internal names to them."""
    message = _FIELD.sub(lambda found: names.get(found[0], found[0]), error.message)
    inner = error.param or ""
    param = names.get(inner, inner)
    if param != inner and not message.startswith(param):
        message = param + message[len(inner) :] if message.startswith(f"{inner} ") else f"{param}: {message}"
    return ApiError(error.status, message, error.type, param or None, error.headers, error.detail)


_AT = re.compile(r" - at (?:`key` in )?`\$?\.?([^`]*)`$")
_UNKNOWN = re.compile(r"unknown field `([^`]*)`")
_MISSING = re.compile(r"missing required field `([^`]*)`")
_NULL_ONLY = re.compile(r"^Expected `null`, got")


def as_decode_error(error: Exception, hints: Mapping[str, str]) -> ApiError:
    """A decoding error as a 400 that names the field. `hints`: what to use instead of refused fields."""
    if isinstance(error, RecursionError):
        return bad_request("the body is nested too deep")
    text = str(error)
    if len(text) > 2 * LONGEST_MESSAGE:  # it quotes a field's name of megabytes
        text = text[:LONGEST_MESSAGE] + text[-LONGEST_MESSAGE:]
    if not isinstance(error, msgspec.ValidationError):
        return bad_request(f"the body is not valid JSON: {text}")
    at = match[1] if (match := _AT.search(text)) else ""
    for pattern in (_UNKNOWN, _MISSING):
        if match := pattern.search(text):
            field = match[1]
            path = f"{at}.{field}" if at else field
            hint = hints.get(field) if pattern is _UNKNOWN and not at else None
            verb = "is not supported" if pattern is _UNKNOWN else "is missing"
            return bad_request(f"{path} {verb}{': ' + hint if hint else ''}", path)
    if _NULL_ONLY.match(text):
        hint = hints.get(at)
        return bad_request(f"{at} is not supported{': ' + hint if hint else '; leave it out'}", at)
    message = text.replace("$.", "").replace("$", "the body") if at else text.replace("`object`", "a JSON object")
    return bad_request(message, at or None)


def phrase(status: int) -> str:
    """A status's reason phrase."""
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return str(status)


def error_json(error: ApiError) -> bytes:
    """The encoded response body."""
    return msgspec.json.encode(error.body)
