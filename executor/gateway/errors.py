"""What clients are told, in OpenAI's form."""

from __future__ import annotations

import json

from starlette.responses import JSONResponse

RETRY_AFTER_S = 5
CLIENT = "invalid_request_error"


class RequestError(Exception):
    """A request that gets an error as its answer."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.code = status, message, kind, code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, object]:
        """The error object."""
        error = {"message": self.message, "type": self.kind, "param": None, "code": self.code}
        return {"error": error}

    def event(self) -> bytes:
        """The same in a stream that has begun."""
        return f"data: {json.dumps(self.body())}\n\n".encode()

    def response(self) -> JSONResponse:
        """The answer."""
        headers = None if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        return JSONResponse(self.body(), self.status, headers=headers)


def unknown_model(name: str) -> RequestError:
    return RequestError(404, f"The model {name!r} does not exist here.", CLIENT, "model_not_found")


def not_ready(name: str) -> RequestError:
    return RequestError(
        503, f"No replica of {name!r} is ready; try again.", "server_error", "no_replica_ready",
        RETRY_AFTER_S,
    )  # fmt: skip


def busy(name: str) -> RequestError:
    return RequestError(
        429, f"All replicas of {name!r} are full; try again.", "rate_limit_error", "engines_full",
        RETRY_AFTER_S,
    )  # fmt: skip


def over_limit(limit: str, retry_after_s: int) -> RequestError:
    return RequestError(
        429, f"This API key may have {limit}; try again.", "rate_limit_error",
        "rate_limit_exceeded", max(1, retry_after_s),
    )  # fmt: skip


def wrong_key() -> RequestError:
    return RequestError(401, "No API key that is valid here.", CLIENT, "invalid_api_key")


def failed(name: str) -> RequestError:
    return RequestError(
        502, f"The replica of {name!r} that served this request failed.", "server_error", "failed"
    )


def late(deadline_s: float) -> RequestError:
    return RequestError(
        504, f"The request was not answered in {deadline_s:g} s.", "server_error", "deadline"
    )


def malformed(why: str) -> RequestError:
    return RequestError(400, why, CLIENT, "malformed")


def too_large(most_bytes: int) -> RequestError:
    return RequestError(
        413, f"The request is larger than {most_bytes} bytes.", CLIENT, "request_too_large"
    )


def too_slow(seconds: float) -> RequestError:
    return RequestError(408, f"The request did not come in {seconds:g} s.", CLIENT, "too_slow")


def gone() -> RequestError:
    return RequestError(499, "The client went away.", CLIENT, "gone")
