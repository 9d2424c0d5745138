"""Who may look at a page: whoever has its link."""

import base64
import hashlib
import re
from http import HTTPStatus

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coterie.personal.api.errors import ApiError
from coterie.personal.api.guard import Guard

_INLINE = re.compile(rb"<script[^>]*>(.*?)</script>", re.DOTALL)  # scripts within a page


class PageGuard(Guard):
    """As for programs, but the token is in the page's link, and after that in a cookie.

    Args:
        page: Gradio's application.
        host: The address that the server listens on.
        port: Likewise.
        token: What browsers must know.
    """

    # Gradio makes functions of texts, and styles of elements: both are its own.
    policy = (
        "default-src 'self'; img-src 'self' data: blob:; style-src 'self' 'unsafe-inline'; "
        "object-src 'none'; base-uri 'self'; form-action 'none'; frame-ancestors 'none'; "
        "script-src 'self' 'unsafe-eval'"
    )

    def __init__(self, page: ASGIApp, host: str, port: int, token: str) -> None:
        super().__init__(self._answer, host, token)
        self._page, self._cookie = page, f"coterie-{port}"  # browsers send it to every port

    @property
    def link(self) -> str:
        """The path and query of the page's link."""
        return f"/?token={self._token.decode()}"

    def refusal(self, error: ApiError) -> ASGIApp:
        text = str(error)
        if error.status == HTTPStatus.UNAUTHORIZED:
            text = "Open the whole link that coterie serve has printed: it has a token in it."
        return PlainTextResponse(text, error.status, {"Connection": "close"})

    def token_of(self, request: Request) -> str:
        return _linked(request) or request.cookies.get(self._cookie, "")

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (token := _linked(request := Request(scope))):
            await self._welcome(request, token)(scope, receive, send)
        elif scope["type"] == "http" and scope["path"] == "/":
            await self._send_page(scope, receive, send)
        else:
            await self._page(scope, receive, send)

    def _welcome(self, request: Request, token: str) -> Response:
        """Return the answer to the link: the cookie, and the way to the page without the token."""
        # Followed from a page elsewhere, a redirect would count as asked for by that page, and
        # browsers would not send the cookie; what this page asks for itself, they do.
        foreign = request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
        response = (
            Response(headers={"Refresh": "0; url=/"})
            if foreign
            else Response(status_code=303, headers={"Location": "/"})
        )
        response.set_cookie(self._cookie, token, httponly=True, samesite="strict")
        return response

    async def _send_page(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the page, and let browsers run the scripts in it, and no others."""
        headers = [(name, value) for name, value in scope["headers"] if name != b"accept-encoding"]
        messages: list[Message] = []

        async def keep(message: Message) -> None:
            messages.append(message)

        await self._page({**scope, "headers": headers}, receive, keep)
        body = b"".join(message.get("body", b"") for message in messages)
        hashes = [base64.b64encode(hashlib.sha256(s).digest()) for s in _INLINE.findall(body) if s]
        policy = " ".join([self.policy, *(f"'sha256-{value.decode()}'" for value in hashes)])
        MutableHeaders(scope=messages[0])["Content-Security-Policy"] = policy
        for message in messages:
            await send(message)


def _linked(request: Request) -> str:
    """Return the token of the link, if this is it."""
    return request.query_params.get("token", "") if request.url.path == "/" else ""
