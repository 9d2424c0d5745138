"""Errors in the shape of OpenAI's."""

from typing import Any

SHOWN = 80  # most characters of a caller's input that an error repeats


class ApiError(Exception):
    """A refused or failed request.

    Args:
        status: The HTTP status.
        message: The problem and the remedy, for the caller.
        param: The invalid field of the request.
        code: The error code, for programs.
        kind: The `type` of OpenAI's errors.
        headers: The additional headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.kind = status, param, code, kind
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """Return the JSON of the response."""
        return {
            "error": {
                "message": str(self),
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


def shown(given: object) -> str:
    """Return a caller's input, shortened so that an error can repeat it."""
    text = str(given)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
