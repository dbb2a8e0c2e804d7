"""What clients are told, in OpenAI's form."""

from __future__ import annotations

from starlette.responses import JSONResponse

RETRY_AFTER_S = 5


class RequestError(Exception):
    """A request that gets an error as its answer."""

    def __init__(self, status: int, message: str, kind: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.code = status, message, kind, code

    def body(self) -> dict[str, object]:
        """The error object."""
        return {"error": {"message": self.message, "type": self.kind, "code": self.code}}

    def response(self) -> JSONResponse:
        """The answer."""
        headers = {"Retry-After": str(RETRY_AFTER_S)} if self.status == 503 else None
        return JSONResponse(self.body(), self.status, headers=headers)


def unknown_model(name: str) -> RequestError:
    return RequestError(
        404, f"The model {name!r} does not exist here.", "invalid_request_error", "model_not_found"
    )


def not_ready(name: str) -> RequestError:
    return RequestError(
        503, f"No replica of {name!r} is ready; try again.", "server_error", "no_replica_ready"
    )


def failed(name: str) -> RequestError:
    return RequestError(
        502, f"The replica of {name!r} that served this request failed.", "server_error", "failed"
    )


def malformed(why: str) -> RequestError:
    return RequestError(400, why, "invalid_request_error")
