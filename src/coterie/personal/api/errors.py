"""Errors in the shape of OpenAI's."""

from typing import Any

SHOWN = 80  # characters of what a caller sent that an error repeats


class ApiError(Exception):
    """A request that is refused or has failed.

    Args:
        status: HTTP's.
        message: The problem and the remedy, for the caller.
        param: The field of the request that is wrong.
        code: For programs.
        kind: OpenAI's `type`.
        headers: Of the response.
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
    """Return what a caller sent, short enough to be repeated in an error."""
    text = str(given)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
