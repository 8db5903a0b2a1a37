"""What a client is told where it does not get what it asked for, in OpenAI's form."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """A refusal or a failure.

    Attributes:
      status: of HTTP. message: one sentence. param: the field of the body that is meant. code: for programs.
      retry_after: seconds after which a client may try again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_after = status, message, param, code, retry_after

    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}
