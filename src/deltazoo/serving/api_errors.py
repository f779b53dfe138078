"""Errors of the HTTP server: their status, and their body in the form of OpenAI's API."""

import math
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from deltazoo.serving.requests import EngineError, EngineStopped, QueueFull, RequestError

__all__ = ["ApiError", "add_error_handlers", "api_error_of", "shortened"]


class ApiError(Exception):
    """An error that the client is told about.

    Args:
        status: of HTTP.
        message: a sentence.
        param: the field of the request that is wrong.
        code: a name for programs, one of OpenAI's where it has one.
        retry_after: seconds after which trying again makes sense.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after = retry_after

    @property
    def body(self) -> dict[str, Any]:
        """`{"error": {"message", "type", "param", "code"}}`."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        if self.status == 429:
            kind = "rate_limit_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The error as a whole response."""
        headers = {} if self.retry_after is None else {"Retry-After": str(max(1, math.ceil(self.retry_after)))}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body, self.status, headers)


def api_error_of(error: Exception) -> ApiError:
    """What a client is told about an error of the engine."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull):
        return ApiError(429, str(error), code="queue_full", retry_after=error.retry_after)
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=error.param)
    if isinstance(error, EngineStopped):
        return ApiError(503, f"the server takes no new requests: {error}", code="stopping", retry_after=1)
    return ApiError(500, f"the engine failed on this request: {error}")


def add_error_handlers(app: FastAPI) -> None:
    """Give every error of an application the form of OpenAI's API."""

    async def of_engine(request: Request, error: Exception) -> JSONResponse:
        return api_error_of(error).response()

    async def of_body(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return _body_error(error).response()

    async def of_http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}").response()

    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        return ApiError(500, f"unexpected {type(error).__name__}; the server's log has the traceback").response()

    for kind in (ApiError, QueueFull, RequestError, EngineStopped, EngineError):
        app.add_exception_handler(kind, of_engine)
    app.add_exception_handler(RequestValidationError, of_body)
    app.add_exception_handler(HTTPException, of_http)
    app.add_exception_handler(Exception, unexpected)


def _body_error(errors: RequestValidationError) -> ApiError:
    """The first thing that is wrong with a body, as a sentence that names the field."""
    error = errors.errors()[0]
    path = [part for part in error["loc"][1:] if part is not None]  # behind "body"
    if error["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {error.get('ctx', {}).get('error', error['msg'])}")
    if not path:
        return ApiError(400, "the body must be a JSON object, sent with the header Content-Type: application/json")
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
    if error["type"] == "missing":
        return ApiError(400, f"{param} is missing", param=param, code="missing_required_parameter")
    if error["type"] == "extra_forbidden":
        return ApiError(400, f"{param}: there is no such field", param=param, code="unknown_parameter")
    message = error["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{param}: {message[:1].lower()}{message[1:]}, got {shortened(error['input'])}", param=param)


def shortened(value: Any) -> str:
    """A value as Python writes it, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
