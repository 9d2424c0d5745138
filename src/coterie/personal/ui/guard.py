"""The guard of a web page: only browsers with its link are admitted."""

import base64
import hashlib
import re
from http import HTTPStatus

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coterie.personal.api.guard import Guard
from coterie.personal.api.requests import ApiError

_INLINE = re.compile(rb"<script[^>]*>(.*?)</script>", re.DOTALL)  # a page's inline scripts


class PageGuard(Guard):
    """The guard of the API with the token in the page's link, and after that in a cookie."""

    # Gradio evaluates its own scripts from strings, and sets inline styles
    policy = (
        "default-src 'self'; img-src 'self' data: blob:; style-src 'self' 'unsafe-inline'; "
        "object-src 'none'; base-uri 'self'; form-action 'none'; frame-ancestors 'none'; "
        "script-src 'self' 'unsafe-eval'"
    )

    def __init__(self, page: ASGIApp, host: str, port: int, token: str) -> None:
        super().__init__(self._answer, host, token)
        # browsers send a cookie to every port of a host, so its name contains the port
        self._page, self._cookie = page, f"coterie-{port}"

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
        """Return the answer to the link: a cookie, and a redirect to the page without the token."""
        # If the link is on a foreign page, browsers attribute a redirect to that page and do not
        # send the cookie; a refresh is attributed to this page.
        foreign = request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
        response = (
            Response(headers={"Refresh": "0; url=/"})
            if foreign
            else Response(status_code=303, headers={"Location": "/"})
        )
        response.set_cookie(self._cookie, token, httponly=True, samesite="strict")
        return response

    async def _send_page(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the page with a policy that allows its own inline scripts and no others."""
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
    """Return the token of a request to the page's link; "" for other requests."""
    return request.query_params.get("token", "") if request.url.path == "/" else ""
